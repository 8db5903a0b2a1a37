// A CUDA driver without a GPU, for `mosaic.py`: Mosaic GPU compiles a kernel for SM90, loads and launches it here, and
// what it loads and launches is recorded.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { kMaxParameters = 64, kMajor = 75, kMinor = 76 };  // the attributes of the compute capability

typedef struct {
  const void* image;  // the ELF file of the device's code
  char name[256];
  uint32_t grid[3], block[3], shared_bytes, count;
  uint64_t parameters[kMaxParameters];
} Recorded;

Recorded recorded;

int cuInit(unsigned flags) { return 0; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = "there is no GPU";
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  *context = &recorded;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == kMajor ? 9 : 0;
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  *module = &recorded;
  recorded.image = image;
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = &recorded;
  snprintf(recorded.name, sizeof recorded.name, "%s", name);
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }

// Mosaic's parameters are fields of one structure, of 8 bytes each: where the row of their addresses breaks, they end.
int cuLaunchKernelEx(const uint32_t* config, void* function, void** parameters, void** extra) {
  memcpy(recorded.grid, config, sizeof recorded.grid);
  memcpy(recorded.block, config + 3, sizeof recorded.block);
  recorded.shared_bytes = config[6];
  const char* first = parameters[0];
  uint32_t i = 0;
  for (; i < kMaxParameters && (const char*)parameters[i] == first + 8 * i; ++i) {
    memcpy(&recorded.parameters[i], parameters[i], 8);
  }
  recorded.count = i;
  return 0;
}

/* A CUDA driver for tests on the CPU: a launch reports itself into the buffer of its first parameter, int64:
   grid, threads, bytes of shared memory, then the 8 bytes of every parameter after the first. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

int parameters = 0;       /* of a launch, after the first; a test sets it */
int status = 0;           /* what a launch returns */
int loads = 0, attributes = 0;
static char kernel_name[256];

const char* kernel(void) { return kernel_name; }
int cuLibraryLoadData(void** library, const void* image, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  *library = memcmp(image, "\177ELF", 4) == 0 ? kernel_name : NULL;
  ++loads;
  return *library ? 0 : 200;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  strncpy(kernel_name, name, sizeof kernel_name - 1);
  *kernel = library;
  return 0;
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) { return ++attributes, 0; }
int cuCtxGetDevice(int* device) { return *device = 0, 0; }
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t bytes, void* stream) {
  memset((void*)address, value, bytes);
  return 0;
}
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** values, void** extra) {
  int64_t* report = *(int64_t**)values[0];
  int64_t launch[] = {gx, gy, gz, bx, shared};
  memcpy(report, launch, sizeof launch);
  for (int i = 0; i < parameters; ++i) report[5 + i] = *(int64_t*)values[1 + i];
  return status;
}
int cuGetErrorName(int status, const char** name) { return *name = "CUDA_ERROR_OF_A_TEST", 0; }

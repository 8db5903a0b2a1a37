// What a call of a few microseconds cannot leave to Python: what its tensors are, and the launch of a compiled kernel.
//
// Tensors are read through torch's DLPack exchange functions, which neither allocate nor synchronise. host.py builds
// this as Triton builds its own launchers.

#define PY_SSIZE_T_CLEAN
#include <ATen/dlpack.h>
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { kMaxWords = 256, kMaxParameters = 48, kInvalidContext = 201 };
static const char kKernelName[] = "jax_sparse_mla_kernel";

typedef int (*LaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                            void** extra);

typedef struct {
  int argument;    // whose address it is, or -1: `value`
  uint64_t value;  // its first bytes
} Parameter;

typedef struct {
  void* function;
  unsigned grid[3], threads, shared_bytes;
  int count;
  Parameter parameters[kMaxParameters];
} Kernel;

static const DLPackExchangeAPI* exchange;
static PyObject *tensor_type, *parameter_type;
static LaunchKernel launch_kernel;

// --- tensors -------------------------------------------------------------------------------------------------------

// False, without an exception, for what is not a plain tensor in memory.
static bool read_tensor(PyObject* object, DLTensor* tensor) {
  PyObject* type = (PyObject*)Py_TYPE(object);
  if (exchange == NULL || (type != tensor_type && type != parameter_type)) return false;
  if (exchange->dltensor_from_py_object_no_sync(object, tensor) == 0) return true;
  PyErr_Clear();
  return false;
}

static uint64_t address_of(const DLTensor* tensor) { return (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset; }

PyDoc_STRVAR(facts_doc,
             "facts(*tensors) -> bytes: dtypes, devices, shapes, strides, and addresses modulo 16, of tensors or Nones; "
             "None if one is neither.");

static PyObject* facts(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  int64_t words[kMaxWords];
  size_t used = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (arguments[i] == Py_None && used < kMaxWords) {
      words[used++] = -1;
      continue;
    }
    DLTensor x;
    if (!read_tensor(arguments[i], &x)) Py_RETURN_NONE;
    const size_t rank = x.ndim;
    if (used + 2 + 2 * rank > kMaxWords) Py_RETURN_NONE;
    words[used++] = (int64_t)x.ndim << 32 | x.dtype.code << 24 | x.dtype.bits << 16 | x.dtype.lanes;
    words[used++] = (int64_t)x.device.device_id << 32 | (int64_t)x.device.device_type << 8 | (address_of(&x) & 15);
    if (rank == 0) continue;
    memcpy(words + used, x.shape, rank * sizeof *words);
    memcpy(words + used + rank, x.strides, rank * sizeof *words);
    used += 2 * rank;
  }
  return PyBytes_FromStringAndSize((const char*)words, used * sizeof *words);
}

// --- kernels -------------------------------------------------------------------------------------------------------

static void free_kernel(PyObject* capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, kKernelName)); }

static bool read_parameter(PyObject* item, Parameter* parameter) {
  *parameter = (Parameter){-1, 0};
  if (PyLong_Check(item)) {
    parameter->argument = (int)PyLong_AsLong(item);
    return !PyErr_Occurred();
  }
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(item, &bytes, &size) < 0) return false;
  if (size > (Py_ssize_t)sizeof parameter->value) {
    PyErr_SetString(PyExc_ValueError, "kernel: a parameter has at most 8 bytes");
    return false;
  }
  memcpy(&parameter->value, bytes, size);
  return true;
}

PyDoc_STRVAR(kernel_doc,
             "kernel(function, grid_x, grid_y, grid_z, threads, shared_bytes, parameters): for `launch`. Each parameter "
             "is the number of the tensor whose address it is, or the bytes of a constant.");

static PyObject* make_kernel(PyObject* module, PyObject* arguments) {
  Kernel kernel = {0};
  unsigned long long function;
  PyObject* parameters;
  if (!PyArg_ParseTuple(arguments, "KIIIIIO!", &function, &kernel.grid[0], &kernel.grid[1], &kernel.grid[2],
                        &kernel.threads, &kernel.shared_bytes, &PyTuple_Type, &parameters)) {
    return NULL;
  }
  kernel.function = (void*)(uintptr_t)function;
  if (PyTuple_GET_SIZE(parameters) > kMaxParameters) {
    return PyErr_Format(PyExc_ValueError, "kernel: at most %d parameters", kMaxParameters);
  }
  kernel.count = (int)PyTuple_GET_SIZE(parameters);
  for (int i = 0; i < kernel.count; ++i) {
    if (!read_parameter(PyTuple_GET_ITEM(parameters, i), &kernel.parameters[i])) return NULL;
  }
  Kernel* kept = PyMem_Malloc(sizeof kernel);
  if (kept == NULL) return PyErr_NoMemory();
  *kept = kernel;
  PyObject* capsule = PyCapsule_New(kept, kKernelName, free_kernel);
  if (capsule == NULL) PyMem_Free(kept);
  return capsule;
}

PyDoc_STRVAR(launch_doc,
             "launch(kernel, *tensors) -> bool: on torch's current stream of the first tensor's device; False if it was "
             "not launched: a tensor is not at a multiple of 16 bytes or not a plain one, or the thread has no context.");

static PyObject* launch(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  if (count < 2 || count - 1 > kMaxParameters) return PyErr_Format(PyExc_TypeError, "launch: a kernel and its tensors");
  const Kernel* kernel = PyCapsule_GetPointer(arguments[0], kKernelName);
  if (kernel == NULL) return NULL;
  uint64_t addresses[kMaxParameters] = {0}, all = 0;
  DLDevice device = {kDLCPU, 0};
  for (Py_ssize_t i = count - 1; i > 0; --i) {
    DLTensor x;
    if (arguments[i] == Py_None) continue;
    if (!read_tensor(arguments[i], &x)) Py_RETURN_FALSE;
    all |= addresses[i - 1] = address_of(&x);
    device = x.device;
  }
  if (all % 16 != 0) Py_RETURN_FALSE;
  void* stream = NULL;
  if (exchange->current_work_stream(device.device_type, device.device_id, &stream) != 0) return NULL;
  uint64_t values[kMaxParameters];
  void* pointers[kMaxParameters];
  for (int i = 0; i < kernel->count; ++i) {
    const Parameter parameter = kernel->parameters[i];
    if (parameter.argument >= count - 1) return PyErr_Format(PyExc_TypeError, "launch: too few tensors");
    values[i] = parameter.argument < 0 ? parameter.value : addresses[parameter.argument];
    pointers[i] = &values[i];
  }
  int status;
  Py_BEGIN_ALLOW_THREADS;  // a full queue waits for the device, which may wait for another thread
  status = launch_kernel(kernel->function, kernel->grid[0], kernel->grid[1], kernel->grid[2], kernel->threads, 1, 1,
                         kernel->shared_bytes, stream, pointers, NULL);
  Py_END_ALLOW_THREADS;
  if (status == kInvalidContext) Py_RETURN_FALSE;
  if (status != 0) return PyErr_Format(PyExc_RuntimeError, "launching a kernel failed with CUDA error %d", status);
  Py_RETURN_TRUE;
}

// --- the module ----------------------------------------------------------------------------------------------------

PyDoc_STRVAR(bind_doc,
             "bind(exchange, tensor_type, parameter_type, launch_kernel): torch's DLPack exchange functions (a capsule), "
             "the types that they read, and the address of cuLaunchKernel, or 0.");

static PyObject* bind(PyObject* module, PyObject* arguments) {
  PyObject *capsule, *tensor, *parameter;
  unsigned long long function;
  if (!PyArg_ParseTuple(arguments, "OOOK", &capsule, &tensor, &parameter, &function)) return NULL;
  const DLPackExchangeAPI* found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (found == NULL) return NULL;
  if (found->header.version.major != DLPACK_MAJOR_VERSION || found->dltensor_from_py_object_no_sync == NULL) {
    return PyErr_Format(PyExc_RuntimeError, "torch's DLPack functions are of version %u", found->header.version.major);
  }
  exchange = found;
  tensor_type = Py_NewRef(tensor);
  parameter_type = Py_NewRef(parameter);
  launch_kernel = (LaunchKernel)(uintptr_t)function;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, bind_doc},
    {"facts", (PyCFunction)(void (*)(void))facts, METH_FASTCALL, facts_doc},
    {"kernel", make_kernel, METH_VARARGS, kernel_doc},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, launch_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "jax_sparse_mla_host", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_jax_sparse_mla_host(void) { return PyModule_Create(&definition); }

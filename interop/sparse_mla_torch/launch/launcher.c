// What a call of a few microseconds cannot leave to Python: what its tensors are, and the launch of a compiled kernel.
//
// Tensors are read through torch's DLPack exchange functions, which neither allocate nor synchronise. launcher.py loads
// this module. Python's limited API: one binary serves CPython 3.11 and later.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <ATen/dlpack.h>
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { kMaxWords = 256, kMaxParameters = 48, kMaxResults = 8, kMaxPlaces = 64, kInvalidContext = 201 };
enum { kAlignment = 32 };  // bytes: as `call_cache.ALIGNMENT`
static const char kKernelName[] = "jax_sparse_mla_kernel";

typedef int (*LaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream, void** parameters,
                            void** extra);
// A library's own launch: what it made when it planned the call, the addresses of the call's tensors, a stream.
typedef int (*Run)(const void* planned, const uint64_t* addresses, void* stream);
typedef int (*StreamIsCapturing)(void* stream, int* status);
typedef int (*ContextDevice)(int* device);

typedef struct {
  int argument;    // whose address it is, or -1: `value`
  uint64_t value;  // its first bytes
} Parameter;

// Results that one thread's launches on one stream write again and again.
typedef struct {
  void* stream;
  unsigned long thread;
  PyObject* results;  // a tuple of tensors and Nones
  uint64_t addresses[kMaxResults];
} Place;

typedef struct {
  void* function;
  unsigned grid[3], threads, shared_bytes;
  unsigned alignment;  // bytes, of which all addresses must be multiples
  Run run;            // instead of launching `function`
  PyObject* owner;    // of the function, or of the plan: kept alive
  const char* plan;   // for `run`
  int num_tensors, count, num_places;
  Parameter parameters[kMaxParameters];
  Place places[kMaxPlaces];
} Kernel;

// The addresses of a launch's tensors.
typedef struct {
  int count;
  uint64_t addresses[kMaxParameters], all;  // `all`: their bits
  DLDevice device;                          // of the last tensor read
} Arguments;

static const DLPackExchangeAPI* exchange;
static PyObject *tensor_type, *parameter_type;
static LaunchKernel launch_kernel;
static StreamIsCapturing stream_is_capturing;
static ContextDevice context_device;

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

static bool is_current(DLDevice device) {
  int current;
  return device.device_type != kDLCUDA || (context_device(&current) == 0 && current == device.device_id);
}

PyDoc_STRVAR(signature_doc,
             "signature(*tensors) -> bytes: dtypes, devices, shapes, strides, and addresses modulo 32, of tensors or Nones; "
             "None if one is neither, or if the first is on a GPU that is not this thread's current one.");

static PyObject* signature(PyObject* module, PyObject* const* arguments, Py_ssize_t count) {
  int64_t words[kMaxWords];
  size_t used = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (arguments[i] == Py_None && used < kMaxWords) {
      words[used++] = -1;
      continue;
    }
    DLTensor x;
    if (!read_tensor(arguments[i], &x) || (i == 0 && !is_current(x.device))) Py_RETURN_NONE;
    const size_t rank = x.ndim;
    if (used + 2 + 2 * rank > kMaxWords) Py_RETURN_NONE;
    words[used++] = (int64_t)x.ndim << 32 | x.dtype.code << 24 | x.dtype.bits << 16 | x.dtype.lanes;
    words[used++] = (int64_t)x.device.device_id << 32 | (int64_t)x.device.device_type << 8 | (address_of(&x) % kAlignment);
    if (rank == 0) continue;
    memcpy(words + used, x.shape, rank * sizeof *words);
    memcpy(words + used + rank, x.strides, rank * sizeof *words);
    used += 2 * rank;
  }
  return PyBytes_FromStringAndSize((const char*)words, used * sizeof *words);
}

// --- kernels -------------------------------------------------------------------------------------------------------

static void forget_places(Kernel* kernel) {
  while (kernel->num_places > 0) Py_DECREF(kernel->places[--kernel->num_places].results);
}

static void free_kernel(PyObject* capsule) {
  Kernel* kernel = PyCapsule_GetPointer(capsule, kKernelName);
  forget_places(kernel);
  Py_XDECREF(kernel->owner);
  PyMem_Free(kernel);
}

static PyObject* keep_kernel(const Kernel* kernel) {
  Kernel* kept = PyMem_Malloc(sizeof *kernel);
  if (kept == NULL) return PyErr_NoMemory();
  *kept = *kernel;
  PyObject* capsule = PyCapsule_New(kept, kKernelName, free_kernel);
  if (capsule == NULL) {
    PyMem_Free(kept);
    return NULL;
  }
  Py_XINCREF(kept->owner);
  return capsule;
}

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
             "kernel(owner, function, grid_x, grid_y, grid_z, threads, shared_bytes, alignment, num_tensors, parameters): "
             "for `launch`, of tensors at multiples of `alignment` bytes. The function is unloaded with its owner. Each "
             "parameter is the number of the tensor whose address it is, or the bytes of a constant.");

static PyObject* make_kernel(PyObject* module, PyObject* arguments) {
  Kernel kernel = {.function = NULL};
  unsigned long long function;
  PyObject* parameters;
  if (!PyArg_ParseTuple(arguments, "OKIIIIIIiO!", &kernel.owner, &function, &kernel.grid[0], &kernel.grid[1],
                        &kernel.grid[2], &kernel.threads, &kernel.shared_bytes, &kernel.alignment, &kernel.num_tensors,
                        &PyTuple_Type, &parameters)) {
    return NULL;
  }
  if (kernel.alignment == 0) return PyErr_Format(PyExc_ValueError, "kernel: alignment");
  kernel.function = (void*)(uintptr_t)function;
  if (PyTuple_Size(parameters) > kMaxParameters) {
    return PyErr_Format(PyExc_ValueError, "kernel: at most %d parameters", kMaxParameters);
  }
  kernel.count = (int)PyTuple_Size(parameters);
  for (int i = 0; i < kernel.count; ++i) {
    if (!read_parameter(PyTuple_GetItem(parameters, i), &kernel.parameters[i])) return NULL;
    if (kernel.parameters[i].argument >= kernel.num_tensors) return PyErr_Format(PyExc_ValueError, "kernel: a tensor");
  }
  return keep_kernel(&kernel);
}

PyDoc_STRVAR(planned_doc,
             "planned(run, planned, num_tensors): for `launch`. `run` is the address of a library's function that takes "
             "the bytes, the tensors' addresses and a stream, and returns CUDA's error.");

static PyObject* make_planned(PyObject* module, PyObject* arguments) {
  Kernel kernel = {.alignment = 1};
  unsigned long long run;
  if (!PyArg_ParseTuple(arguments, "KO!i", &run, &PyBytes_Type, &kernel.owner, &kernel.num_tensors)) return NULL;
  if (kernel.num_tensors > kMaxParameters) {
    return PyErr_Format(PyExc_ValueError, "planned: at most %d tensors", kMaxParameters);
  }
  kernel.run = (Run)(uintptr_t)run;
  kernel.plan = PyBytes_AsString(kernel.owner);
  return keep_kernel(&kernel);
}

// False, without an exception, if a tensor is not a plain one.
static bool read_arguments(PyObject* const* tensors, Py_ssize_t count, Arguments* read) {
  if (count > kMaxParameters - read->count) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    DLTensor x;
    uint64_t* address = &read->addresses[read->count++];
    *address = 0;
    if (tensors[i] == Py_None) continue;
    if (!read_tensor(tensors[i], &x)) return false;
    read->all |= *address = address_of(&x);
    read->device = x.device;
  }
  return true;
}

static int current_stream(const Arguments* arguments, void** stream) {
  return exchange->current_work_stream(arguments->device.device_type, arguments->device.device_id, stream);
}

// True if it was launched; false with an exception or, where the thread has no context, without.
static bool start(const Kernel* kernel, const Arguments* arguments, void* stream) {
  if (arguments->count != kernel->num_tensors) {
    PyErr_Format(PyExc_TypeError, "launch: %d tensors, got %d", kernel->num_tensors, arguments->count);
    return false;
  }
  uint64_t values[kMaxParameters];
  void* pointers[kMaxParameters];
  for (int i = 0; i < kernel->count; ++i) {
    const Parameter parameter = kernel->parameters[i];
    values[i] = parameter.argument < 0 ? parameter.value : arguments->addresses[parameter.argument];
    pointers[i] = &values[i];
  }
  int status;
  Py_BEGIN_ALLOW_THREADS;  // a full queue waits for the device, which may wait for another thread
  if (kernel->run != NULL) {
    status = kernel->run(kernel->plan, arguments->addresses, stream);
  } else {
    status = launch_kernel(kernel->function, kernel->grid[0], kernel->grid[1], kernel->grid[2], kernel->threads, 1, 1,
                           kernel->shared_bytes, stream, pointers, NULL);
  }
  Py_END_ALLOW_THREADS;
  if (status != 0 && (kernel->run != NULL || status != kInvalidContext)) {
    PyErr_Format(PyExc_RuntimeError, "launching a kernel failed with CUDA error %d", status);
  }
  return status == 0;
}

// The kernel, the tensors' addresses and torch's current stream. NULL with an exception or, if a tensor is not a plain
// one, without.
static const Kernel* read_call(const char* function, PyObject* const* items, Py_ssize_t count, Arguments* arguments,
                               void** stream) {
  const Kernel* kernel = count == 0 ? NULL : PyCapsule_GetPointer(items[0], kKernelName);
  if (kernel == NULL) {
    PyErr_Format(PyExc_TypeError, "%s: the first argument must be a kernel", function);
    return NULL;
  }
  if (!read_arguments(items + 1, count - 1, arguments) || current_stream(arguments, stream) != 0) return NULL;
  return kernel;
}

static PyObject* unless_raised(PyObject* result) { return PyErr_Occurred() ? NULL : Py_NewRef(result); }

PyDoc_STRVAR(launch_doc,
             "launch(kernel, *tensors) -> bool: on torch's current stream of the tensors' device; False if it was not "
             "launched: a tensor is not a plain one, or not where the kernel takes it, or the thread has no context.");

static PyObject* launch(PyObject* module, PyObject* const* items, Py_ssize_t count) {
  Arguments arguments = {.count = 0};
  void* stream = NULL;
  const Kernel* kernel = read_call("launch", items, count, &arguments, &stream);
  if (kernel != NULL && arguments.all % kernel->alignment == 0 && start(kernel, &arguments, stream)) Py_RETURN_TRUE;
  return unless_raised(Py_False);
}

PyDoc_STRVAR(keep_doc,
             "keep(kernel, results): lets `launch_again` write the tuple's tensors, on this thread and torch's current "
             "stream of their device.");

static PyObject* keep(PyObject* module, PyObject* items) {
  PyObject *capsule, *results;
  if (!PyArg_ParseTuple(items, "OO!", &capsule, &PyTuple_Type, &results)) return NULL;
  Kernel* kernel = PyCapsule_GetPointer(capsule, kKernelName);
  if (kernel == NULL) return NULL;
  Arguments arguments = {.count = 0};
  const Py_ssize_t count = PyTuple_Size(results);
  if (count > kMaxResults) return PyErr_Format(PyExc_ValueError, "keep: at most %d results", kMaxResults);
  PyObject* tensors[kMaxResults];
  for (Py_ssize_t i = 0; i < count; ++i) tensors[i] = PyTuple_GetItem(results, i);
  if (!read_arguments(tensors, count, &arguments)) {
    return PyErr_Format(PyExc_TypeError, "keep: results must be tensors or None");
  }
  Place place = {.thread = PyThread_get_thread_ident(), .results = results};
  memcpy(place.addresses, arguments.addresses, sizeof place.addresses);
  if (current_stream(&arguments, &place.stream) != 0) return NULL;
  if (kernel->num_places == kMaxPlaces) forget_places(kernel);
  Py_INCREF(results);
  kernel->places[kernel->num_places++] = place;
  Py_RETURN_NONE;
}

static const Place* find_place(const Kernel* kernel, void* stream) {
  const unsigned long thread = PyThread_get_thread_ident();
  for (int i = 0; i < kernel->num_places; ++i) {
    if (kernel->places[i].stream == stream && kernel->places[i].thread == thread) return &kernel->places[i];
  }
  return NULL;
}

PyDoc_STRVAR(launch_again_doc,
             "launch_again(kernel, *tensors): as launch, into the results kept for this thread and stream, which are "
             "returned. None if there are none, if the stream is being captured, or if it was not launched.");

static PyObject* launch_again(PyObject* module, PyObject* const* items, Py_ssize_t count) {
  Arguments arguments = {.count = 0};
  void* stream = NULL;
  const Kernel* kernel = read_call("launch_again", items, count, &arguments, &stream);
  const Place* place = kernel == NULL ? NULL : find_place(kernel, stream);
  int capturing = 0;
  if (place == NULL || stream_is_capturing(stream, &capturing) != 0 || capturing != 0) return unless_raised(Py_None);
  PyObject* results = Py_NewRef(place->results);  // other threads may forget the place
  const Py_ssize_t kept = PyTuple_Size(results);
  if (arguments.count + kept <= kMaxParameters && arguments.all % kernel->alignment == 0) {
    memcpy(arguments.addresses + arguments.count, place->addresses, kept * sizeof *place->addresses);
    arguments.count += (int)kept;
    if (start(kernel, &arguments, stream)) return results;
  }
  Py_DECREF(results);
  return unless_raised(Py_None);
}

// --- the module ----------------------------------------------------------------------------------------------------

PyDoc_STRVAR(bind_doc,
             "bind(exchange, tensor_type, parameter_type, launch_kernel, stream_is_capturing, context_device): torch's "
             "DLPack exchange functions (a capsule), the types that they read, and addresses of the driver's functions.");

static PyObject* bind(PyObject* module, PyObject* arguments) {
  PyObject *capsule, *tensor, *parameter;
  unsigned long long launches, captures, devices;
  if (!PyArg_ParseTuple(arguments, "OOOKKK", &capsule, &tensor, &parameter, &launches, &captures, &devices)) return NULL;
  const DLPackExchangeAPI* found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (found == NULL) return NULL;
  if (found->header.version.major != DLPACK_MAJOR_VERSION || found->dltensor_from_py_object_no_sync == NULL) {
    return PyErr_Format(PyExc_RuntimeError, "torch's DLPack functions are of version %u", found->header.version.major);
  }
  exchange = found;
  tensor_type = Py_NewRef(tensor);
  parameter_type = Py_NewRef(parameter);
  launch_kernel = (LaunchKernel)(uintptr_t)launches;
  stream_is_capturing = (StreamIsCapturing)(uintptr_t)captures;
  context_device = (ContextDevice)(uintptr_t)devices;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"bind", bind, METH_VARARGS, bind_doc},
    {"signature", (PyCFunction)(void (*)(void))signature, METH_FASTCALL, signature_doc},
    {"kernel", make_kernel, METH_VARARGS, kernel_doc},
    {"keep", keep, METH_VARARGS, keep_doc},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, launch_doc},
    {"launch_again", (PyCFunction)(void (*)(void))launch_again, METH_FASTCALL, launch_again_doc},
    {"planned", make_planned, METH_VARARGS, planned_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "sparse_mla_torch_launcher", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_sparse_mla_torch_launcher(void) { return PyModule_Create(&definition); }

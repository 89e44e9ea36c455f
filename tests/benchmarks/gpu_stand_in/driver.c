// A stand-in for the CUDA runtime, its driver and cuBLAS: one H100 that takes every call and computes nothing. Device
// memory is the host's, small copies copy, kernels do not run. build.py adds the functions that need only to succeed.
// It counts launches and copies. A captured graph has a number of kernels, and copies, which are made when it is launched;
// waiting and copies from and to the host are errors while a stream captures.
// With STAND_IN_DELAYS_COPIES, copies and memsets run in order when the host waits for them, or one for each query of an
// event, and the pinned memory that one will write is poisoned before.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MULTIPROCESSORS = 132, MAJOR = 9, MINOR = 0, SHARED_PER_BLOCK = 227 * 1024, HANDLE = 16, LARGE = 1 << 20 };
static const size_t MEMORY = (size_t)80 << 30;

// --- what was launched, since the start ---

long stand_in_launches, stand_in_copies, stand_in_graphs;  // kernels and products, copies and memsets, graphs

enum { MAX_CAPTURED = 4096 };
struct graph {
  long num_kernels, num_copies;
  int is_invalid;  // something was refused
  struct { char *to; const char *from; size_t size; int value; } copies[MAX_CAPTURED];
};
static struct graph *captured;  // by the stream and the thread that capture, or NULL
static cudaStream_t captured_stream;
static pthread_t capturing_thread;
static unsigned long long num_captures;

int stand_in_launch(void) { return captured ? captured->num_kernels++ : stand_in_launches++, 0; }

static int captures(cudaStream_t stream) { return captured && stream == captured_stream; }
static int may_not_wait(void) { return captured && pthread_equal(pthread_self(), capturing_thread); }

static const char *refused = "a stand-in's error";
static cudaError_t refuse(const char *call) {
  return refused = call, captured->is_invalid = 1, cudaErrorStreamCaptureUnsupported;
}
const char *cudaGetErrorString(cudaError_t error) { return refused; }
const char *cudaGetErrorName(cudaError_t error) { return refused; }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  captured = calloc(1, sizeof *captured), captured_stream = stream, capturing_thread = pthread_self(), num_captures++;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  int is_invalid = captured->is_invalid;
  *graph = is_invalid ? NULL : (cudaGraph_t)captured, captured = NULL;
  return is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = captures(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000  // earlier ones have several of this name: there, nothing can be captured
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *num_dependencies) {
  if (id) *id = num_captures;
  if (num_dependencies) *num_dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}
#endif
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  return *count = ((struct graph *)graph)->num_kernels, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *launched, cudaGraph_t graph, unsigned long long flags) {
  return *launched = (cudaGraphExec_t)graph, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t launched, cudaStream_t stream) {
  struct graph *graph = (struct graph *)launched;
  for (long i = 0; i < graph->num_copies; i++) {
    if (!graph->copies[i].from) memset(graph->copies[i].to, graph->copies[i].value, graph->copies[i].size);
    else memcpy(graph->copies[i].to, graph->copies[i].from, graph->copies[i].size);
  }
  return stand_in_graphs++, cudaSuccess;
}
static cudaError_t capture_copy(char *to, const char *from, size_t size, int value) {
  if (captured->num_copies == MAX_CAPTURED) return cudaErrorMemoryAllocation;
  long place = captured->num_copies++;
  captured->copies[place].to = to, captured->copies[place].from = from;
  captured->copies[place].size = size > LARGE ? 0 : size, captured->copies[place].value = value;
  return cudaSuccess;
}

// --- the device ---

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { return *free = *total = MEMORY, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  *properties = (struct cudaDeviceProp){
      .name = "no GPU: a stand-in for NVIDIA H100",
      .totalGlobalMem = MEMORY,
      .major = MAJOR,
      .minor = MINOR,
      .multiProcessorCount = MULTIPROCESSORS,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535},
      .maxThreadsPerMultiProcessor = 2048,
      .maxBlocksPerMultiProcessor = 32,
      .regsPerBlock = 65536,
      .regsPerMultiprocessor = 65536,
      .sharedMemPerBlock = 48 * 1024,
      .sharedMemPerBlockOptin = SHARED_PER_BLOCK,
      .sharedMemPerMultiprocessor = 228 * 1024,
      .l2CacheSize = 50 << 20,
      .memoryBusWidth = 5120,
      .unifiedAddressing = 1,
      .concurrentKernels = 1,
  };
  return cudaSuccess;
}

static int attribute_of(int attribute) {  // numbered alike by runtime and driver
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: return MULTIPROCESSORS;
    case cudaDevAttrComputeCapabilityMajor: return MAJOR;
    case cudaDevAttrComputeCapabilityMinor: return MINOR;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_PER_BLOCK;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * 1024;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    default: return 1;
  }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  return *value = attribute_of(attribute), cudaSuccess;
}


// --- memory ---

static struct { char *start; size_t size; } pinned[1 << 16];
static int num_pinned;
static struct { char *to, *from; size_t size; int value, is_snapshot; } delayed[1 << 20];
static long num_delayed, num_run;  // since the start
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int pin(void *start, size_t size) {
  pthread_mutex_lock(&lock);
  if (num_pinned < 1 << 16) {
    pinned[num_pinned].start = start;
    pinned[num_pinned++].size = size;
  }
  return pthread_mutex_unlock(&lock);
}
static int is_pinned(const char *pointer) {
  for (int i = 0; i < num_pinned; i++)
    if (pointer >= pinned[i].start && pointer < pinned[i].start + pinned[i].size) return 1;
  return 0;
}
cudaError_t cudaMalloc(void **pointer, size_t size) {
  return (*pointer = size > MEMORY ? NULL : malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *pointer) { return free(pointer), cudaSuccess; }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return pin(*pointer = malloc(size), size); }
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) { return pin(pointer, size); }
cudaError_t cudaHostUnregister(void *pointer) {
  for (int i = 0; i < num_pinned; i++)
    if (pinned[i].start == pointer) pinned[i].size = 0;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered};
  if (is_pinned(pointer)) attributes->type = cudaMemoryTypeHost;
  return cudaSuccess;
}

static cudaError_t run_delayed(long count) {
  pthread_mutex_lock(&lock);
  for (; num_run < count; num_run++) {
    if (!delayed[num_run].from) memset(delayed[num_run].to, delayed[num_run].value, delayed[num_run].size);
    else memcpy(delayed[num_run].to, delayed[num_run].from, delayed[num_run].size);
    if (delayed[num_run].is_snapshot) free(delayed[num_run].from);
  }
  return pthread_mutex_unlock(&lock);
}
static cudaError_t delay(char *to, const char *from, size_t size, int value, enum cudaMemcpyKind kind) {
  pthread_mutex_lock(&lock);
  long place = num_delayed++;
  delayed[place].to = to, delayed[place].from = (char *)from, delayed[place].size = size, delayed[place].value = value;
  if ((delayed[place].is_snapshot = kind == cudaMemcpyHostToDevice && !is_pinned(from)))
    delayed[place].from = memcpy(malloc(size), from, size);
  if (kind == cudaMemcpyDeviceToHost) memset(to, 0xff, size);
  pthread_mutex_unlock(&lock);
  return kind == cudaMemcpyDeviceToHost && !is_pinned(to) ? run_delayed(num_delayed) : cudaSuccess;
}
// Large ones would take the host's memory: it gives pages only to what is written.
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  if (may_not_wait()) return refuse("cudaMemcpy while a stream captures");
  stand_in_copies++;
  run_delayed(num_delayed);
  if (size <= LARGE) memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  if (captures(stream))
    return kind == cudaMemcpyDeviceToDevice ? capture_copy(to, from, size, 0) : refuse("a copy of the host is captured");
  return getenv("STAND_IN_DELAYS_COPIES") ? delay(to, from, size, 0, kind) : cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
  if (captures(stream)) return capture_copy(pointer, NULL, size, value);
  stand_in_copies++;
  if (getenv("STAND_IN_DELAYS_COPIES")) return delay(pointer, NULL, size, value, cudaMemcpyDeviceToDevice);
  if (size <= LARGE) memset(pointer, value, size);
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { return *pointer = calloc(1, 1 << 20), cudaSuccess; }

// --- streams, events, kernels ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  static long number = HANDLE;
  return *stream = (cudaStream_t)number++, cudaSuccess;
}
struct event { long num_delayed; struct graph *graph; };  // what is before it
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return *event = calloc(1, sizeof(struct event)), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t recorded, cudaStream_t stream) {
  struct event *event = (struct event *)recorded;
  event->num_delayed = num_delayed, event->graph = captures(stream) ? captured : NULL;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
// A default stream cannot be captured.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (!captured) return cudaSuccess;
  int is_inside = ((struct event *)event)->graph == captured;
  if (is_inside && !captures(stream)) return refuse("a stream outside waits for a captured one");
  return captures(stream) && !is_inside ? refuse("a captured stream waits for one outside") : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return may_not_wait() ? refuse("cudaEventSynchronize while a stream captures")
                        : run_delayed(((struct event *)event)->num_delayed);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (may_not_wait()) return refuse("cudaEventQuery while a stream captures");
  if (((struct event *)event)->num_delayed <= num_run) return cudaSuccess;
  return run_delayed(num_run + 1), cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  // Others may be waited for: torch sets the random generator's state on one of them.
  if (captures(stream)) return refuse("cudaStreamSynchronize of a stream that captures");
  return run_delayed(num_delayed);
}
cudaError_t cudaDeviceSynchronize(void) {
  return may_not_wait() ? refuse("cudaDeviceSynchronize while a stream captures") : run_delayed(num_delayed);
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return *milliseconds = 0, cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  *attributes = (struct cudaFuncAttributes){.ptxVersion = 90, .binaryVersion = 90, .maxThreadsPerBlock = 1024};
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
  return *blocks = 1, cudaSuccess;
}
// sort divides by what this gives.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
  return *blocks = 1, cudaSuccess;
}
int __cudaGetKernel(void **kernel, void *function) { return *kernel = function, 0; }
int __cudaLaunchKernel(void) { return stand_in_launch(); }

// --- the driver ---

// Whatever compiles a kernel does so before.
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  return *module = (CUmodule)HANDLE, captured ? (CUresult)refuse("a kernel is loaded while a stream captures") : 0;
}

CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return *value = attribute_of(attribute), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return *context = (CUcontext)HANDLE, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)HANDLE, CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return *(CUdeviceptr *)data = pointer, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "a stand-in's error", CUDA_SUCCESS; }

static CUresult succeed(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
  void *found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : (void *)succeed;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(
    const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
  return (CUresult)cudaGetDriverEntryPointByVersion(name, function, 0, 0, NULL);
}

// --- cuBLAS ---

int cublasCreate_v2(void **handle) { return *handle = (void *)HANDLE, 0; }
int cublasGetVersion_v2(void *handle, int *version) { return *version = CUDA_VERSION * 10, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
const char *cublasGetStatusString(int status) { return "a stand-in's error"; }
int cublasLtCreate(void **handle) { return *handle = (void *)HANDLE, 0; }
int cublasLtMatmulDescCreate(void **handle) { return *handle = (void *)HANDLE, 0; }
int cublasLtMatrixLayoutCreate(void **handle) { return *handle = (void *)HANDLE, 0; }
int cublasLtMatmulPreferenceCreate(void **handle) { return *handle = (void *)HANDLE, 0; }
size_t cublasLtGetVersion(void) { return CUDA_VERSION * 10; }
const char *cublasLtGetStatusString(int status) { return "a stand-in's error"; }
int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *description, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results,
    int *found) {
  return *found = 1, 0;
}

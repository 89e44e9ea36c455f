// A stand-in for the CUDA runtime, its driver and cuBLAS: one H100 that takes every call and computes nothing. Device
// memory is the host's, small copies copy, kernels do not run. build.py adds the functions that need only to succeed.
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

const char *cudaGetErrorString(cudaError_t error) { return "a stand-in's error"; }
const char *cudaGetErrorName(cudaError_t error) { return "a stand-in's error"; }

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
  run_delayed(num_delayed);
  if (size <= LARGE) memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return getenv("STAND_IN_DELAYS_COPIES") ? delay(to, from, size, 0, kind) : cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
  if (getenv("STAND_IN_DELAYS_COPIES")) return delay(pointer, NULL, size, value, cudaMemcpyDeviceToDevice);
  if (size <= LARGE) memset(pointer, value, size);
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { return *pointer = calloc(1, 1 << 20), cudaSuccess; }

// --- streams, events, kernels ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return *stream = (cudaStream_t)HANDLE, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return *event = calloc(1, sizeof(long)), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return *(long *)event = num_delayed, cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return run_delayed(*(long *)event); }
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (*(long *)event <= num_run) return cudaSuccess;
  return run_delayed(num_run + 1), cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return run_delayed(num_delayed); }
cudaError_t cudaDeviceSynchronize(void) { return run_delayed(num_delayed); }
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
int __cudaLaunchKernel(void) { return 0; }

// --- the driver ---

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

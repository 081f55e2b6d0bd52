/* cuBLAS, cuDNN, NCCL and CUPTI without a GPU: what they tell the host is answered, what they would compute is not.

   - cublasLt finds one algorithm for whatever is asked; cuDNN's graph API has one engine and one plan. Their workspaces are
     EMULATED_CUDA_CUBLASLT_WORKSPACE and EMULATED_CUDA_CUDNN_WORKSPACE bytes: the libraries' own choices are not known here.
   - cuDNN's RNNs have weights in cuDNN's order. Their workspace is of a plausible size, unless it is set; their reserve and
     the state of their dropout are what an H200 asked for.
   - NCCL's calls return at once and are work for their stream. A rank gets its own part; nothing comes from the others.
   - CUPTI is there and silent: the profiler records the CPU's side. */
#include "emulated.h"
#include <cudnn.h>
/* nccl.h includes them for types that it does not use in C; they need C++. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* ---- cuBLAS -------------------------------------------------------------------------------------------------------------- */

enum { CUBLAS = 130000 };
int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetVersion_v2(void *h, int *v) { *v = CUBLAS; return 0; }
const char *cublasGetStatusName(int s) { return "CUBLAS_STATUS"; }
const char *cublasGetStatusString(int s) { return "emulated cuBLAS"; }
size_t cublasLtGetVersion(void) { return CUBLAS; }
/* cublasLtMatmulHeuristicResult_t: its header needs C++. */
struct found { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *preference, int asked, struct found *found, int *count) {
  memset(found, 0, sizeof *found);
  found->workspace = emulated_bytes("CUBLASLT_WORKSPACE", 0);
  *count = 1;
  return 0;
}

/* ---- cuDNN --------------------------------------------------------------------------------------------------------------- */

/* What a handle of ours has behind it where cuDNN is asked for what it was told. */
struct tensor { cudnnDataType_t type; int count, size[CUDNN_DIM_MAX], stride[CUDNN_DIM_MAX]; };
struct filter { cudnnDataType_t type; cudnnTensorFormat_t format; int count, size[CUDNN_DIM_MAX]; };
struct rnn { cudnnRNNMode_t cell; int bias, directions; cudnnDataType_t type; int input, hidden, projected, layers, drops; };
struct sequence { int steps, batch, width; };

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int *v) {
  *v = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
const char *cudnnGetErrorString(cudnnStatus_t s) { return "emulated cuDNN"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) *text = 0; }
cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t *s) { *s = *(cudaStream_t *)h; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) { *(cudaStream_t *)h = s; return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *d) {
  *d = emulated_handle();
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       int64_t asked, int64_t *count, void *out) {
  int64_t workspace = (int64_t)emulated_bytes("CUDNN_WORKSPACE", 0);
  int known = 1, asked_for = out && asked;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: case CUDNN_ATTR_ENGINECFG_ENGINE: break;   /* one, whose handle is the asker's */
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE: if (asked_for) *(int64_t *)out = workspace; break;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX: if (asked_for) *(int64_t *)out = 0; break;
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED: if (asked_for) *(int32_t *)out = 0; break;
    default: known = 0;   /* no notes, no knobs */
  }
  if (count) *count = known;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  return emulated_work(*(cudaStream_t *)h) ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t z,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t b, const cudnnActivationDescriptor_t a, size_t *n) {
  *n = 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t y,
    const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz, const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t b,
    const cudnnActivationDescriptor_t a, size_t *n) {
  *n = 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnActivationDescriptor_t a, const cudnnTensorDescriptor_t x, size_t *n) {
  *n = 0;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t d, cudnnDataType_t type, int count, const int size[], const int stride[]) {
  struct tensor *t = (struct tensor *)d;
  t->type = type;
  t->count = count;
  memcpy(t->size, size, (size_t)count * sizeof(int));
  memcpy(t->stride, stride, (size_t)count * sizeof(int));
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t d, int asked, cudnnDataType_t *type, int *count, int size[], int stride[]) {
  const struct tensor *t = (const struct tensor *)d;
  *type = t->type;
  *count = t->count;
  for (int i = 0; i < asked && i < t->count; i++) { size[i] = t->size[i]; stride[i] = t->stride[i]; }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t d, cudnnDataType_t type, cudnnTensorFormat_t format, int count, const int size[]) {
  struct filter *f = (struct filter *)d;
  f->type = type;
  f->format = format;
  f->count = count;
  memcpy(f->size, size, (size_t)count * sizeof(int));
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetFilterNdDescriptor(const cudnnFilterDescriptor_t d, int asked, cudnnDataType_t *type, cudnnTensorFormat_t *format, int *count, int size[]) {
  const struct filter *f = (const struct filter *)d;
  *type = f->type;
  *format = f->format;
  *count = f->count;
  for (int i = 0; i < asked && i < f->count; i++) size[i] = f->size[i];
  return CUDNN_STATUS_SUCCESS;
}

/* The loss of connectionist temporal classification, whose workspace is a plan's. */
cudnnStatus_t cudnnGetCTCLossWorkspaceSize_v8(cudnnHandle_t h, cudnnCTCLossAlgo_t algo, cudnnCTCLossDescriptor_t d,
                                              const cudnnTensorDescriptor_t p, const cudnnTensorDescriptor_t g, size_t *n) {
  *n = emulated_bytes("CUDNN_WORKSPACE", 0);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetCTCLossWorkspaceSize(cudnnHandle_t h, const cudnnTensorDescriptor_t p, const cudnnTensorDescriptor_t g, const int *labels,
                                           const int *label_lengths, const int *input_lengths, cudnnCTCLossAlgo_t algo,
                                           cudnnCTCLossDescriptor_t d, size_t *n) {
  *n = emulated_bytes("CUDNN_WORKSPACE", 0);
  return CUDNN_STATUS_SUCCESS;
}

/* Recurrent networks. A pseudo-layer is a layer in one direction. */
static size_t item(cudnnDataType_t type) { return type == CUDNN_DATA_DOUBLE ? 8 : type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16 ? 2 : 4; }
static int gates(const struct rnn *r) { return r->cell == CUDNN_LSTM ? 4 : r->cell == CUDNN_GRU ? 3 : 1; }
static int out(const struct rnn *r) { return r->projected && r->projected != r->hidden ? r->projected : r->hidden; }
static int in(const struct rnn *r, int pseudo) { return pseudo < r->directions ? r->input : out(r) * r->directions; }
/* Rows and columns of one of a pseudo-layer's matrices: those of the input, those of the hidden state, the projection. */
static size_t matrix(const struct rnn *r, int pseudo, int which, int *rows, int *columns) {
  int projection = which == 2 * gates(r);
  *rows = projection ? out(r) : r->hidden;
  *columns = projection ? r->hidden : which < gates(r) ? in(r, pseudo) : out(r);
  return (size_t)*rows * (size_t)*columns;
}
static int matrices(const struct rnn *r) { return 2 * gates(r) + (out(r) != r->hidden); }
/* Items of all matrices before one; of all there are with pseudo = layers * directions. */
static size_t before(const struct rnn *r, int pseudo, int which) {
  size_t sum = 0;
  int rows, columns;
  for (int p = 0; p <= pseudo && p < r->layers * r->directions; p++)
    for (int w = 0; w < (p == pseudo ? which : matrices(r)); w++) sum += matrix(r, p, w, &rows, &columns);
  return sum;
}
static size_t biases(const struct rnn *r) { return r->bias ? (size_t)2 * (size_t)gates(r) * (size_t)r->hidden : 0; }

cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t d, cudnnRNNAlgo_t algo, cudnnRNNMode_t cell, cudnnRNNBiasMode_t bias,
                                       cudnnDirectionMode_t direction, cudnnRNNInputMode_t input_mode, cudnnDataType_t type,
                                       cudnnDataType_t math, cudnnMathType_t math_type, int32_t input, int32_t hidden,
                                       int32_t projected, int32_t layers, cudnnDropoutDescriptor_t dropout, uint32_t flags) {
  *(struct rnn *)d = (struct rnn){cell, bias != CUDNN_RNN_NO_BIAS, direction == CUDNN_BIDIRECTIONAL ? 2 : 1, type, input, hidden, projected, layers, *(float *)dropout > 0};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t d, cudnnDataType_t type, cudnnRNNDataLayout_t layout, int steps,
                                        int batch, int width, const int lengths[], void *padding) {
  *(struct sequence *)d = (struct sequence){steps, batch, width};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t h, cudnnRNNDescriptor_t d, size_t *size) {
  const struct rnn *r = (const struct rnn *)d;
  int all = r->layers * r->directions;
  *size = (before(r, all, 0) + (size_t)all * biases(r)) * item(r->type);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t h, cudnnRNNDescriptor_t d, int32_t pseudo, size_t size, const void *space, int32_t which,
                                      cudnnTensorDescriptor_t m, void **m_at, cudnnTensorDescriptor_t b, void **b_at) {
  const struct rnn *r = (const struct rnn *)d;
  int rows, columns, all = r->layers * r->directions;
  matrix(r, pseudo, which, &rows, &columns);
  char *base = (char *)space;
  if (m) {   /* it may be asked for either alone */
    *m_at = base + before(r, pseudo, which) * item(r->type);
    cudnnSetTensorNdDescriptor(m, r->type, 3, (int[]){1, rows, columns}, (int[]){rows * columns, columns, 1});
  }
  if (b) {
    int has = r->bias && which < 2 * gates(r);
    *b_at = has ? base + (before(r, all, 0) + (size_t)pseudo * biases(r) + (size_t)which * (size_t)r->hidden) * item(r->type) : NULL;
    cudnnSetTensorNdDescriptor(b, r->type, has ? 3 : 0, (int[]){1, rows, 1}, (int[]){rows, 1, 1});
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t h, cudnnRNNDescriptor_t d, cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t x,
                                        size_t *work, size_t *reserve) {
  const struct rnn *r = (const struct rnn *)d;
  const struct sequence *s = (const struct sequence *)x;
  size_t cells = (size_t)s->steps * (size_t)s->batch * (size_t)r->directions, hidden = (size_t)r->hidden, layers = (size_t)r->layers;
  if (work) *work = emulated_bytes("CUDNN_WORKSPACE", cells * hidden * item(r->type) * (size_t)gates(r));   /* a layer's gates at all steps */
  /* As cuDNN 9.19 on an H200: 5 values of each cell of an LSTM, 6 of a GRU, 1 of an RNN, and the outputs between layers. */
  size_t output = out(r) == r->hidden ? 0 : (size_t)out(r), between = (layers - 1) * (output ? output * 2 : hidden);
  size_t values = hidden * (r->cell == CUDNN_LSTM ? 5 : r->cell == CUDNN_GRU ? 6 : 1) + (output ? hidden + 2 * output : 0);
  size_t kept = cells * (layers * values + between) * item(r->type);
  if (r->drops) kept += cells * between * (size_t)r->directions / 8;   /* a bit for each value between layers, for each direction */
  if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? 256 + (kept + 31) / 32 * 32 : 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t d, cudnnHandle_t h, float p, void *states, size_t size, unsigned long long seed) {
  *(float *)d = p;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnRestoreDropoutDescriptor(cudnnDropoutDescriptor_t d, cudnnHandle_t h, float p, void *states, size_t size, unsigned long long seed) {
  return cudnnSetDropoutDescriptor(d, h, p, states, size, seed);
}
/* 6,488,064 bytes on an H200, which has 132 multiprocessors. */
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t h, size_t *size) {
  int count = 0, device = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  *size = (size_t)count * 49152;
  return CUDNN_STATUS_SUCCESS;
}

/* ---- NCCL ---------------------------------------------------------------------------------------------------------------- */

struct communicator { int ranks, rank, device; };
static size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}
static ncclResult_t worked(cudaStream_t s) { return emulated_work(s) ? ncclUnhandledCudaError : ncclSuccess; }
static ncclResult_t moved(const void *from, void *to, size_t size, cudaStream_t s) {
  if (to && from != to) emulated_copy(to, from, size);
  return worked(s);
}

ncclResult_t ncclGetVersion(int *v) { *v = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { memset(id, 0, sizeof *id); return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t r) { return r ? "emulated NCCL" : "no error"; }
const char *ncclGetLastError(ncclComm_t c) { return ""; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  struct communicator *new = emulated_handle();
  *new = (struct communicator){ranks, rank, 0};
  cudaGetDevice(&new->device);
  *c = (ncclComm_t)new;
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int ranks, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(c, ranks, id, rank, NULL); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int ranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config) {
  return ncclCommInitRankConfig(c, ranks, *id, rank, config);
}
/* DataParallel's: all ranks are of this process. */
ncclResult_t ncclCommInitAll(ncclComm_t *all, int count, const int *devices) {
  ncclUniqueId id;
  memset(&id, 0, sizeof id);
  for (int i = 0; i < count; i++) {
    ncclCommInitRankConfig(&all[i], count, id, i, NULL);
    ((struct communicator *)all[i])->device = devices ? devices[i] : i;
  }
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *device) { *device = ((struct communicator *)c)->device; return ncclSuccess; }
/* Who else has the same color is not known here: a part has as many ranks as the whole, which only counts. */
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
  struct communicator *new = emulated_handle();
  *new = *(struct communicator *)c;
  *part = (ncclComm_t)new;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) { *n = ((struct communicator *)c)->ranks; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) { *n = ((struct communicator *)c)->rank; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r) { *r = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) { return moved(from, to, n * bytes_of(t), s); }
ncclResult_t ncclReduce(const void *from, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) { return moved(from, to, n * bytes_of(t), s); }
ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) { return moved(from, to, n * bytes_of(t), s); }
ncclResult_t ncclBcast(void *at, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) { return worked(s); }
ncclResult_t ncclAllGather(const void *from, void *to, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  return moved(from, (char *)to + (size_t)((struct communicator *)c)->rank * n * bytes_of(t), n * bytes_of(t), s);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return moved((const char *)from + (size_t)((struct communicator *)c)->rank * n * bytes_of(t), to, n * bytes_of(t), s);
}
ncclResult_t ncclGather(const void *from, void *to, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
  return moved(from, to, n * bytes_of(t), s);
}
ncclResult_t ncclSend(const void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) { return worked(s); }
ncclResult_t ncclRecv(void *at, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) { return worked(s); }
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) { return worked(s); }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t t, ncclScalarResidence_t r, ncclComm_t c) { *op = ncclSum; return ncclSuccess; }
ncclResult_t ncclMemAlloc(void **at, size_t size) { return cudaMalloc(at, size) ? ncclUnhandledCudaError : ncclSuccess; }
ncclResult_t ncclMemFree(void *at) { return cudaFree(at) ? ncclUnhandledCudaError : ncclSuccess; }

/* ---- cuFFT --------------------------------------------------------------------------------------------------------------- */

int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in, long long istride, long long idist, int intype, long long *on,
                        long long ostride, long long odist, int outtype, long long batch, size_t *work, int type) {
  *work = 0;   /* cuFFT's own choice is not known */
  return 0;
}

/* ---- CUPTI --------------------------------------------------------------------------------------------------------------- */

enum { CUPTI_ERROR_MAX_LIMIT_REACHED = 12 };   /* a buffer has no further record */
int cuptiSubscribe(void **subscriber, void *callback, void *data) { *subscriber = emulated_handle(); return 0; }
int cuptiGetVersion(unsigned *v) { *v = CUDART_VERSION * 10 / 10; return 0; }
int cuptiGetResultString(int r, const char **s) { *s = "emulated CUPTI"; return 0; }
int cuptiGetCallbackName(int domain, unsigned id, const char **s) { *s = "emulated"; return 0; }
int cuptiActivityGetNextRecord(void *buffer, size_t size, void **record) { *record = NULL; return CUPTI_ERROR_MAX_LIMIT_REACHED; }
int cuptiActivityGetNumDroppedRecords(void *c, unsigned stream, size_t *n) { *n = 0; return 0; }
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *id) { if (id) *id = 0; return 0; }

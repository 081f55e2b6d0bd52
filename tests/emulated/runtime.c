/* A CUDA runtime, driver and NVML without a GPU.

   It answers what PyTorch's CUDA build asks of libcudart, libcuda and libnvidia-ml, so that PyTorch's own caching allocator,
   autograd engine, profiler, streams and the host side of its CUDA ops run for real on any Linux machine. It is loaded before
   CUDA's own libraries (LD_PRELOAD), whose functions of the same names are then never called. emulation.py compiles it.

   What is emulated
   - Device memory: reserved address space that counts against the device's size. Fresh blocks are zero. Copies and memsets are
     real, so small values that are copied to a device and back are right. A copy of more than EMULATED_CUDA_COPY bytes only
     clears its target where that is the device's.
   - Kernels do nothing, except that fill_ (torch.full, zeros, ones) fills contiguous tensors, since a gradient scaler needs its
     scale, and that a number is added to a contiguous tensor (x += 1, and _foreach_add_ of torch 2.11 and 2.12), since Adam
     divides by what it makes of its count of steps, which may be on the device.
   - Streams and events in order of submission: a piece of work is done at once, after N more pieces of work, or only when
     somebody waits for it. Copies to pinned memory and host callbacks happen when they are done, not before.
   - Stream capture: what may not be called while a stream is captured fails and spoils the capture, as CUDA says.
   - Errors: an allocation beyond the device's size; any call that EMULATED_CUDA_FAIL names; sticky errors.

   Settings are variables of the environment, or emulated_cuda_set("LATE", "sync") from a running process:
     EMULATED_CUDA_DEVICES=1      devices; CUDA_VISIBLE_DEVICES chooses among them and is read once, at the first call
     EMULATED_CUDA_NAME=          what the device is called, else "Emulated GPU"
     EMULATED_CUDA_CC=90          compute capability: 80, 90, 100
     EMULATED_CUDA_SMS=132        multiprocessors
     EMULATED_CUDA_MEMORY=80G     bytes of each device
     EMULATED_CUDA_CONTEXT=500M   bytes that a context takes on each device that is used
     EMULATED_CUDA_LATE=0         0: work is done at once. N: after N more pieces of work or queries. sync: when waited for
     EMULATED_CUDA_FAIL=          calls that fail: FUNCTION@N=ERROR, several with commas. The Nth call of FUNCTION from now on
                                  returns ERROR, a number or one of memory, assert, illegal, launch, notready. FUNCTION@N+
                                  stands for the Nth and all later ones, FUNCTION:TEXT counts launches of kernels with TEXT in
                                  their (mangled) names, * any function. An ERROR! is sticky: each later call returns it.
                                  A sticky error of a launch shows when that work is done, as on a device.
     EMULATED_CUDA_COPY=64M       the largest copy that is carried out
     EMULATED_CUDA_CUDNN_WORKSPACE=0, EMULATED_CUDA_CUBLASLT_WORKSPACE=0
                                  bytes that each plan of cuDNN, and each algorithm of cublasLt, asks for
     EMULATED_CUDA_LOG=           1: name on stderr each function that does nothing, at its first call
   A function that is neither written here or in libraries.c nor listed as harmless in emulation.py ends the process with its name. */
#define _GNU_SOURCE
#include "emulated.h"
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#undef cudaGetDriverEntryPoint
#undef cudaGetDriverEntryPointByVersion

#define OK cudaSuccess
#define DEVICES 16
#define PAGE ((size_t)4096)
#define ALIGNED ((size_t)2 << 20)   /* of the addresses of a device's memory */

/* One lock for all that is below: calls are short. It may be taken again by its holder, for callbacks. */
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static void hold(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

/* ---- settings ------------------------------------------------------------------------------------------------------------ */

static struct setting { char name[32], value[512]; struct setting *next; } *settings;

const char *emulated_setting(const char *name) {
  for (struct setting *s = settings; s; s = s->next) if (!strcmp(s->name, name)) return s->value;
  char variable[64];
  snprintf(variable, sizeof variable, "EMULATED_CUDA_%s", name);
  const char *value = getenv(variable);
  return value ? value : "";
}

size_t emulated_bytes(const char *name, size_t otherwise) {
  const char *text = emulated_setting(name);
  if (!*text) return otherwise;
  char *end;
  double value = strtod(text, &end);
  int shift = *end == 'G' ? 30 : *end == 'M' ? 20 : *end == 'K' ? 10 : 0;
  return (size_t)(value * (double)((size_t)1 << shift));
}

static int number(const char *name, int otherwise) {
  const char *text = emulated_setting(name);
  return *text ? atoi(text) : otherwise;
}

static const char *device_name(void) {
  const char *name = emulated_setting("NAME");
  return *name ? name : "Emulated GPU";
}

static struct {
  int cc, sms, late;   /* late: 0 at once, -1 only when somebody waits, or after so many more pieces of work */
  size_t memory, context, copy;
} is;

static void parse_failures(const char *text);

static int settled;

/* Takes the settings over: at the first call that needs one, again in a forked child, and after each emulated_cuda_set(). */
static void settle(void) {
  settled = 1;
  is.cc = number("CC", 90);
  is.sms = number("SMS", 132);
  is.late = !strcmp(emulated_setting("LATE"), "sync") ? -1 : number("LATE", 0);
  is.memory = emulated_bytes("MEMORY", (size_t)80 << 30);
  is.context = emulated_bytes("CONTEXT", (size_t)500 << 20);
  is.copy = emulated_bytes("COPY", (size_t)64 << 20);
  parse_failures(emulated_setting("FAIL"));
}
static void unsettle(void) { settled = 0; }

static int errors_to = -1;

__attribute__((constructor)) static void begin(void) {
  errors_to = fcntl(2, F_DUPFD_CLOEXEC, 100);
  pthread_atfork(NULL, NULL, unsettle);   /* a forked child may be given other settings before it begins */
}

/* For tests, by ctypes: changes a setting from now on. */
void emulated_cuda_set(const char *name, const char *value) {
  hold();
  struct setting *s = calloc(1, sizeof *s);
  snprintf(s->name, sizeof s->name, "%s", name);
  snprintf(s->value, sizeof s->value, "%s", value);
  s->next = settings;
  settings = s;
  settle();
  release();
}

void *emulated_handle(void) { return calloc(1, 512); }

/* ---- errors -------------------------------------------------------------------------------------------------------------- */

static const struct { int code; const char *shorthand, *name, *text; } errors[] = {
  {0, "none", "cudaSuccess", "no error"},
  {1, "value", "cudaErrorInvalidValue", "invalid argument"},
  {2, "memory", "cudaErrorMemoryAllocation", "out of memory"},
  {100, "nodevice", "cudaErrorNoDevice", "no CUDA-capable device is detected"},
  {101, "device", "cudaErrorInvalidDevice", "invalid device ordinal"},
  {400, "handle", "cudaErrorInvalidResourceHandle", "invalid resource handle"},
  {401, "state", "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
  {600, "notready", "cudaErrorNotReady", "device not ready"},
  {700, "illegal", "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
  {704, "peer", "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
  {710, "assert", "cudaErrorAssert", "device-side assert triggered"},
  {719, "launch", "cudaErrorLaunchFailure", "unspecified launch failure"},
  {801, "support", "cudaErrorNotSupported", "operation not supported"},
  {900, "capture", "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
  {901, "spoiled", "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
  {904, "unjoined", "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
  {905, "isolation", "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
  {906, "implicit", "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
  {907, "captured", "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
};
#define ERRORS (int)(sizeof errors / sizeof *errors)

static __thread cudaError_t last;   /* of this thread, until somebody asks */
static cudaError_t sticky;          /* of the process, for ever: what a context has after a failed kernel */

struct failure { char function[48], kernel[96]; int at, seen, sticky, onward; cudaError_t error; struct failure *next; };
static struct failure *failures;

static cudaError_t error_named(const char *text) {
  for (int i = 0; i < ERRORS; i++)
    if (!strcmp(errors[i].shorthand, text) || !strcmp(errors[i].name, text)) return errors[i].code;
  return atoi(text) ? atoi(text) : cudaErrorUnknown;
}

static void parse_failures(const char *text) {
  failures = NULL;
  char *copy = strdup(text), *rest = copy, *one;
  while ((one = strsep(&rest, ","))) {
    char name[160], error[64];
    struct failure *f = calloc(1, sizeof *f);
    if (sscanf(one, " %159[^@]@%d", name, &f->at) != 2 || !strchr(one, '=')) { free(f); continue; }
    f->onward = strstr(one, "+=") != NULL;
    snprintf(error, sizeof error, "%s", strchr(one, '=') + 1);
    char *mark = strchr(error, '!'), *kernel = strchr(name, ':');
    if (mark) { f->sticky = 1; *mark = 0; }
    if (kernel) { *kernel = 0; snprintf(f->kernel, sizeof f->kernel, "%s", kernel + 1); }
    snprintf(f->function, sizeof f->function, "%s", name);
    f->error = error_named(error);
    f->next = failures;
    failures = f;
  }
  free(copy);
}

/* The failure that is due at this call, if one is. */
static struct failure *due(const char *function, const char *kernel) {
  for (struct failure *f = failures; f; f = f->next) {
    if (*f->kernel ? !kernel || !strstr(kernel, f->kernel) : 0) continue;
    if (strcmp(f->function, "*") && strcmp(f->function, function)) continue;
    int count = ++f->seen;
    if (count == f->at || (f->onward && count > f->at)) return f;
  }
  return NULL;
}

static cudaError_t fail(cudaError_t error) { return last = error; }

/* At the start of each call that can fail. */
static cudaError_t entered(const char *function) {
  if (!settled) { hold(); settle(); release(); }
  if (sticky) return fail(sticky);
  if (!failures) return OK;
  hold();
  struct failure *f = due(function, NULL);
  if (f && f->sticky) sticky = f->error;
  release();
  return f ? fail(f->error) : OK;
}
#define ENTER() do { cudaError_t error_ = entered(__func__); if (error_) return error_; } while (0)
#define DRIVER() do { cudaError_t error_ = entered(__func__); if (error_) return (CUresult)error_; } while (0)

cudaError_t cudaGetLastError(void) {
  cudaError_t e = sticky ? sticky : last;
  last = OK;
  return e;
}
cudaError_t cudaPeekAtLastError(void) { return sticky ? sticky : last; }
const char *cudaGetErrorString(cudaError_t e) {
  for (int i = 0; i < ERRORS; i++) if (errors[i].code == (int)e) return errors[i].text;
  return "emulated error";
}
const char *cudaGetErrorName(cudaError_t e) {
  for (int i = 0; i < ERRORS; i++) if (errors[i].code == (int)e) return errors[i].name;
  return "cudaErrorUnknown";
}

/* A harmless stub can be called often: each name is said once. */
long emulated_harmless(const char *name) {
  if (!*emulated_setting("LOG")) return 0;
  static const char *said[2048];
  static int count;
  hold();
  int known = 0;
  for (int i = 0; i < count && !known; i++) known = said[i] == name;
  if (!known && count < 2048) said[count++] = name;
  release();
  if (!known) fprintf(stderr, "emulated CUDA: %s does nothing\n", name);
  return 0;
}

/* Said where the process began to write its errors: a test runner may have put something else in stderr's place. */
void emulated_missing(const char *name) {
  dprintf(errors_to < 0 ? 2 : errors_to, "emulated CUDA: %s is not emulated. Write it in tests/emulated, or list it as harmless in emulation.py.\n", name);
  abort();
}

/* ---- devices ------------------------------------------------------------------------------------------------------------- */

static __thread int current;
static size_t used[DEVICES];
static int active[DEVICES];   /* whether the device has a context */

/* CUDA_VISIBLE_DEVICES holds as it is at the first call. */
static int device_count(void) {
  static int count = -1;
  hold();
  if (count < 0) {
    settle();
    int all = number("DEVICES", 1);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    count = all;
    if (visible) {
      count = 0;
      for (const char *p = visible; *p; ) {
        char *end;
        long index = strtol(p, &end, 10);
        if (end == p || index < 0 || index >= all) break;
        count++;
        p = *end == ',' ? end + 1 : end;
      }
    }
    if (count > DEVICES) count = DEVICES;
  }
  release();
  return count;
}
static cudaError_t device_problem(int d) { return d < 0 || d >= device_count() ? cudaErrorInvalidDevice : OK; }
/* A device gets its context from the first call that needs one. */
static void use(int d) { active[d] = 1; }
static size_t taken(int d) { return used[d] + (active[d] ? is.context : 0); }

cudaError_t cudaGetDeviceCount(int *n) {
  *n = device_count();
  return *n ? OK : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *d) { *d = current; return OK; }
cudaError_t cudaSetDevice(int d) {
  ENTER();
  if (device_problem(d)) return fail(cudaErrorInvalidDevice);
  current = d;
  use(d);
  return OK;
}
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  ENTER();
  if (device_problem(d)) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", device_name());
  p->uuid.bytes[0] = (char)(d + 1);
  p->totalGlobalMem = is.memory;
  p->major = is.cc / 10;
  p->minor = is.cc % 10;
  p->multiProcessorCount = is.sms;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = is.cc >= 90 ? 232448 : 166912;
  p->sharedMemPerMultiprocessor = is.cc >= 90 ? 233472 : 167936;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = p->canMapHostMemory = 1;
  p->asyncEngineCount = 3;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->pciBusID = d + 1;
  return OK;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  struct cudaDeviceProp p;
  cudaError_t error = cudaGetDeviceProperties(&p, d);
  if (error) return error;
  switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *v = 1024; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrMultiProcessorCount: *v = is.sms; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    case cudaDevAttrClockRate: *v = 1980000; break;
    case cudaDevAttrMemoryClockRate: *v = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = 5120; break;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentKernels: case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
    default: *v = 0; break;   /* not there: features that the emulation lacks */
  }
  return OK;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, (size_t)n, "0000:%02x:00.0", d + 1); return OK; }
cudaError_t cudaDeviceGetLimit(size_t *v, enum cudaLimit l) { *v = 1024; return OK; }
cudaError_t cudaMemGetInfo(size_t *free_, size_t *total) {
  ENTER();
  hold();
  use(current);
  *total = is.memory;
  *free_ = is.memory > taken(current) ? is.memory - taken(current) : 0;
  release();
  return OK;
}

/* ---- blocks of memory ---------------------------------------------------------------------------------------------------- */

enum kind { DEVICE, PINNED, REGISTERED, ADDRESSES };
struct block { char *at; size_t size, counted; int device; enum kind kind; struct block *next; };
static struct block *blocks;

static struct block *find(const void *p) {
  for (struct block *b = blocks; b; b = b->next) if ((const char *)p >= b->at && (const char *)p < b->at + b->size) return b;
  return NULL;
}
static int on_device(const void *p) {
  hold();
  struct block *b = find(p);
  int is_device = b && (b->kind == DEVICE || b->kind == ADDRESSES);
  release();
  return is_device;
}
static void note(char *at, size_t size, size_t counted, int device, enum kind kind) {
  struct block *b = malloc(sizeof *b);
  *b = (struct block){at, size, counted, device, kind, blocks};
  blocks = b;
}
/* Address space whose pages cost nothing until something is written to them; NULL as its place: anywhere. */
static char *pages(char *place, size_t size) {
  size = (size + PAGE - 1) & ~(PAGE - 1);
  char *p = mmap(place, size ? size : PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return NULL;
  madvise(p, size ? size : PAGE, MADV_NOHUGEPAGE);   /* a byte that is written costs a page, not two MiB */
  return p;
}
/* The same for a device. Addresses rise from one call to the next, far from all that Linux places by itself: of free blocks of
   equal size PyTorch takes the lowest, so elsewhere two runs of one program could differ. A real driver says no more than that
   addresses rise mostly, on some machines. */
static char *device_pages(size_t size) {
  static char *next = (char *)0x100000000000;
  char *p = pages(next, size);
  next += (size + ALIGNED - 1) & ~(ALIGNED - 1);
  return p;
}
static void forget(void *p) {
  hold();
  for (struct block **b = &blocks; *b; b = &(*b)->next)
    if ((*b)->at == p) {
      struct block *x = *b;
      *b = x->next;
      used[x->device] -= x->counted;
      if (x->kind != REGISTERED) munmap(x->at, (x->size + PAGE - 1) & ~(PAGE - 1));
      free(x);
      break;
    }
  release();
}

/* Zeros whole pages by giving them back. */
static void clear(char *at, size_t size) {
  char *first = (char *)(((uintptr_t)at + PAGE - 1) & ~(PAGE - 1)), *end = (char *)(((uintptr_t)at + size) & ~(PAGE - 1));
  if (!on_device(at) || end <= first || madvise(first, (size_t)(end - first), MADV_DONTNEED)) { memset(at, 0, size); return; }
  memset(at, 0, (size_t)(first - at));
  memset(end, 0, (size_t)(at + size - end));
}

void emulated_copy(void *to, const void *from, size_t size) {
  if (size <= is.copy) memmove(to, from, size);
  else if (on_device(to)) clear(to, size);
  else memset(to, 0, size);
}

/* ---- streams, events, and when work is done ------------------------------------------------------------------------------ */

struct capture;
/* Something that happens when a stream has come as far as `at`: a late copy, a callback, an error of a kernel. */
struct action { unsigned long long at; cudaHostFn_t call; void *data; char *to; char *bytes; size_t size; cudaError_t error; struct action *next; };
struct wait { unsigned long long at; struct stream *on; unsigned long long upto; struct wait *next; };
struct stream {
  int device, priority;
  unsigned flags;
  unsigned long long last, done;   /* the last piece of work submitted, and up to which all is done */
  struct wait *waits;
  struct action *actions, **tail;
  struct capture *capture;
  unsigned long long captured, joined;   /* while captured: the last work, and up to where another stream waits for it */
  struct stream *next;
};
struct event { struct stream *stream; unsigned long long at; struct timespec time; struct capture *capture; };

static struct stream *streams, *legacy[DEVICES];
static unsigned long long submitted;   /* pieces of work so far: their numbers grow along every dependency */

static struct stream *new_stream(int device, unsigned flags, int priority) {
  struct stream *s = calloc(1, sizeof *s);
  s->device = device;
  s->flags = flags;
  s->priority = priority;
  s->tail = &s->actions;
  hold();
  s->next = streams;
  streams = s;
  release();
  return s;
}
static struct stream *stream_of(cudaStream_t s) {
  if ((uintptr_t)s > 2) return (struct stream *)s;
  hold();
  if (!legacy[current]) legacy[current] = new_stream(current, 0, 0);
  release();
  return legacy[current];
}

/* All of `s` up to `upto` is done, and so is what it has waited for. */
static void complete(struct stream *s, unsigned long long upto) {
  if (s->done >= upto) return;
  s->done = upto;
  for (struct wait **w = &s->waits; *w; ) {
    if ((*w)->at > upto) { w = &(*w)->next; continue; }
    struct wait *x = *w;
    *w = x->next;
    complete(x->on, x->upto);
    free(x);
  }
  while (s->actions && s->actions->at <= upto) {
    struct action *x = s->actions;
    s->actions = x->next;
    if (!s->actions) s->tail = &s->actions;
    if (x->error) sticky = x->error;
    else if (x->call) x->call(x->data);
    else { memcpy(x->to, x->bytes, x->size); free(x->bytes); }
    free(x);
  }
}
/* Whether `s` has come as far as `upto`. To ask takes time, so work gets done by asking often. */
static int is_done(struct stream *s, unsigned long long upto) {
  if (s->done < upto && is.late > 0 && ++submitted - upto >= (unsigned long long)is.late) complete(s, upto);
  return s->done >= upto;
}
static unsigned long long submit(struct stream *s) {
  s->last = ++submitted;
  if (!is.late) complete(s, s->last);
  return s->last;
}
static void add(struct stream *s, struct action new) {
  struct action *x = malloc(sizeof *x);
  *x = new;
  x->next = NULL;
  *s->tail = x;
  s->tail = &x->next;
}
static void complete_device(int device) {
  for (struct stream *s = streams; s; s = s->next) if (s->device == device) complete(s, s->last);
}

/* ---- stream capture ------------------------------------------------------------------------------------------------------ */

struct node { enum { WORK, COPY, SET } what; char *to; const char *from; size_t size; int value; };
struct object { void *data; cudaHostFn_t destroy; };
struct graph { struct node *nodes; size_t count; struct object *objects[256]; int kept; };
struct capture {
  unsigned long long id;
  enum cudaStreamCaptureMode mode;
  pthread_t thread;
  struct stream *origin;
  int spoiled;
  struct graph *graph;
  struct capture *next;
};
static struct capture *captures;
static __thread enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

/* Called by what must not run while a stream is captured: it fails, and the capture is spoiled. */
static cudaError_t unsafe(void) {
  cudaError_t error = OK;
  hold();
  for (struct capture *c = captures; c && capture_mode != cudaStreamCaptureModeRelaxed; c = c->next) {
    int mine = pthread_equal(c->thread, pthread_self());
    if (mine ? c->mode != cudaStreamCaptureModeRelaxed
             : c->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal) {
      c->spoiled = 1;
      error = cudaErrorStreamCaptureUnsupported;
    }
  }
  release();
  return error ? fail(error) : OK;
}
#define UNSAFE() do { cudaError_t error_ = unsafe(); if (error_) return error_; } while (0)

/* Waiting for a stream that is captured, or for the whole device meanwhile, is never allowed. */
static cudaError_t spoil(struct stream *s, cudaError_t error) {
  if (s->capture) { s->capture->spoiled = 1; return fail(error); }
  return OK;
}

/* One piece of work for a stream; a stream that is captured notes it in its graph. */
static cudaError_t work(struct stream *s, struct node node) {
  struct capture *c = s->capture;
  if (!c) { submit(s); return OK; }
  if (c->spoiled) return fail(cudaErrorStreamCaptureInvalidated);
  struct graph *g = c->graph;
  if (!(g->count & (g->count + 1))) g->nodes = realloc(g->nodes, 2 * (g->count + 1) * sizeof *g->nodes);
  g->nodes[g->count++] = node;
  s->captured = ++submitted;
  return OK;
}
cudaError_t emulated_work(cudaStream_t stream) {
  hold();
  cudaError_t error = work(stream_of(stream), (struct node){WORK});
  release();
  return error;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  ENTER();
  if ((uintptr_t)stream <= 2) return fail(cudaErrorStreamCaptureUnsupported);
  static unsigned long long ids;
  hold();
  struct stream *s = stream_of(stream);
  if (s->capture) { release(); return fail(cudaErrorIllegalState); }
  struct capture *c = calloc(1, sizeof *c);
  *c = (struct capture){++ids, mode, pthread_self(), s, 0, calloc(1, sizeof(struct graph)), captures};
  captures = c;
  s->capture = c;
  s->captured = s->joined = submitted;
  release();
  return OK;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  ENTER();
  hold();
  struct stream *s = stream_of(stream);
  struct capture *c = s->capture;
  cudaError_t error = !c || c->origin != s ? cudaErrorIllegalState : OK;
  if (c && !error) {
    if (c->spoiled) error = cudaErrorStreamCaptureInvalidated;
    for (struct stream *other = streams; other; other = other->next)
      if (other->capture == c) {
        if (other != s && other->captured > other->joined && !error) error = cudaErrorStreamCaptureUnjoined;
        other->capture = NULL;
      }
    for (struct capture **p = &captures; *p; p = &(*p)->next) if (*p == c) { *p = c->next; break; }
    *graph = error ? NULL : (cudaGraph_t)c->graph;
    /* Events may still name the capture, so its memory stays. */
  }
  release();
  return error ? fail(error) : OK;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  ENTER();
  hold();
  struct capture *c = stream_of(stream)->capture;
  *status = !c ? cudaStreamCaptureStatusNone : c->spoiled ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  release();
  return OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  cudaError_t error = cudaStreamIsCapturing(stream, status);
  if (error) return error;
  hold();
  struct capture *c = stream_of(stream)->capture;
  if (id) *id = c ? c->id : 0;
  if (graph) *graph = c ? (cudaGraph_t)c->graph : NULL;
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  release();
  return OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return OK;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  ENTER();
  *exec = (cudaGraphExec_t)graph;   /* what is done with a graph after that does not change it */
  return OK;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(exec, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  ENTER();
  hold();
  struct graph *g = (struct graph *)exec;
  cudaError_t error = work(stream_of(stream), (struct node){WORK});
  for (size_t i = 0; i < g->count && !error; i++) {
    struct node *n = &g->nodes[i];
    if (n->what == COPY) emulated_copy(n->to, n->from, n->size);
    else if (n->what == SET && n->size <= is.copy) memset(n->to, n->value, n->size);
  }
  release();
  return error;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  *count = ((struct graph *)graph)->count;
  return OK;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return OK; }   /* the executable one needs it, and is destroyed later */
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  struct graph *g = (struct graph *)exec;
  for (int i = 0; i < g->kept; i++) g->objects[i]->destroy(g->objects[i]->data);
  g->kept = 0;
  return OK;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t *out, void *data, cudaHostFn_t destroy, unsigned count, unsigned flags) {
  struct object *o = malloc(sizeof *o);
  *o = (struct object){data, destroy};
  *out = (cudaUserObject_t)o;
  return OK;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) { return OK; }   /* a graph keeps it */
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
  struct graph *g = (struct graph *)graph;
  if (g->kept < 256) g->objects[g->kept++] = (struct object *)object;
  return OK;
}

/* ---- streams and events, as CUDA has them -------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  ENTER();
  use(current);
  *s = (cudaStream_t)new_stream(current, flags, priority);
  return OK;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return OK; }   /* events may still name it */
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = stream_of(s)->priority; return OK; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER();
  hold();
  struct stream *s = stream_of(stream);
  cudaError_t error = spoil(s, cudaErrorStreamCaptureUnsupported);
  if (!error) error = unsafe();
  if (!error && !is_done(s, s->last)) error = cudaErrorNotReady;
  release();
  return error ? error : sticky ? fail(sticky) : OK;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER();
  hold();
  struct stream *s = stream_of(stream);
  cudaError_t error = spoil(s, cudaErrorStreamCaptureUnsupported);
  if (!error) error = unsafe();
  if (!error) complete(s, s->last);
  release();
  return error ? error : sticky ? fail(sticky) : OK;
}
cudaError_t cudaDeviceSynchronize(void) {
  ENTER();
  cudaError_t error = OK;
  hold();
  for (struct capture *c = captures; c; c = c->next)   /* in whatever mode and thread: the device is more than its streams */
    if (c->origin->device == current) error = spoil(c->origin, cudaErrorStreamCaptureUnsupported);
  if (!error) complete_device(current);
  release();
  return error ? error : sticky ? fail(sticky) : OK;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  ENTER();
  cudaError_t error = OK;
  hold();
  struct stream *s = stream_of(stream);
  struct event *e = (struct event *)event;
  if (e->capture && e->stream && e->stream->capture == e->capture) {
    if (s->capture && s->capture != e->capture) error = cudaErrorStreamCaptureIsolation;
    else if (!s->capture && (uintptr_t)stream <= 2) error = cudaErrorStreamCaptureImplicit;
    else {
      if (!s->capture) { s->capture = e->capture; s->captured = s->joined = 0; }
      if (e->at > e->stream->joined) e->stream->joined = e->at;
    }
  } else if (s->capture && !(flags & cudaEventWaitExternal) && e->stream) error = cudaErrorStreamCaptureIsolation;
  else if (e->stream && e->stream != s && e->stream->done < e->at) {
    submit(s);
    struct wait *w = malloc(sizeof *w);
    *w = (struct wait){s->last, e->stream, e->at, s->waits};
    s->waits = w;
    if (s->done >= s->last) { s->waits = w->next; complete(w->on, w->upto); free(w); }
  }
  if (error && s->capture) s->capture->spoiled = 1;
  release();
  return error ? fail(error) : OK;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  ENTER();
  use(current);
  *e = (cudaEvent_t)calloc(1, sizeof(struct event));
  return OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { ENTER(); free(e); return OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  ENTER();
  hold();
  struct event *e = (struct event *)event;
  struct stream *s = stream_of(stream);
  e->stream = s;
  e->capture = s->capture;
  e->at = s->capture ? s->captured : s->last;
  clock_gettime(CLOCK_MONOTONIC, &e->time);
  release();
  return OK;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
static cudaError_t event_problem(struct event *e) {
  if (e->capture && e->stream->capture == e->capture) { e->capture->spoiled = 1; return fail(cudaErrorCapturedEvent); }
  return unsafe();
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER();
  hold();
  struct event *e = (struct event *)event;
  cudaError_t error = event_problem(e);
  if (!error && e->stream && !is_done(e->stream, e->at)) error = cudaErrorNotReady;
  release();
  return error ? error : sticky ? fail(sticky) : OK;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER();
  hold();
  struct event *e = (struct event *)event;
  cudaError_t error = event_problem(e);
  if (!error && e->stream) complete(e->stream, e->at);
  release();
  return error ? error : sticky ? fail(sticky) : OK;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  ENTER();
  struct event *a = (struct event *)from, *b = (struct event *)to;
  if ((a->stream && a->stream->done < a->at) || (b->stream && b->stream->done < b->at)) return fail(cudaErrorNotReady);
  *ms = (float)((double)(b->time.tv_sec - a->time.tv_sec) * 1e3 + (double)(b->time.tv_nsec - a->time.tv_nsec) / 1e6);
  return OK;
}
struct told { cudaStreamCallback_t call; void *data; cudaStream_t stream; };
static void tell(void *data) {
  struct told *t = data;
  t->call(t->stream, sticky, t->data);
  free(t);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data);
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
  struct told *t = malloc(sizeof *t);
  *t = (struct told){call, data, stream};
  return cudaLaunchHostFunc(stream, tell, t);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
  ENTER();
  hold();
  struct stream *s = stream_of(stream);
  cudaError_t error = OK;
  if (s->capture) error = work(s, (struct node){WORK});
  else {
    add(s, (struct action){.at = submitted + 1, .call = call, .data = data});
    submit(s);
  }
  release();
  return error;
}

/* ---- memory, as CUDA has it ---------------------------------------------------------------------------------------------- */

/* The driver hands out pages of 2 MiB; smaller requests share one. */
static size_t counted(size_t size) {
  size_t unit = size >= 1 << 20 ? 2 << 20 : 512;
  return (size + unit - 1) / unit * unit;
}
static cudaError_t allocate(void **p, size_t size) {
  *p = NULL;
  hold();
  use(current);
  size_t count = counted(size);
  char *at = taken(current) + count > is.memory ? NULL : device_pages(size);
  if (at) {
    used[current] += count;
    note(at, size ? size : 1, count, current, DEVICE);
    *p = at;
  }
  release();
  return at ? OK : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMalloc(void **p, size_t size) {
  ENTER();
  UNSAFE();
  return allocate(p, size);
}
cudaError_t cudaFree(void *p) {
  ENTER();
  if (!p) { use(current); return OK; }
  UNSAFE();
  hold();
  struct block *b = find(p);
  int device = b ? b->device : current;
  complete_device(device);   /* as CUDA does before it takes memory back */
  release();
  forget(p);
  return sticky ? fail(sticky) : OK;
}
cudaError_t cudaMallocManaged(void **p, size_t size, unsigned flags) { ENTER(); UNSAFE(); return allocate(p, size); }
cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { ENTER(); return allocate(p, size); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { ENTER(); if (p) forget(p); return OK; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int d) {
  static void *pools[DEVICES];
  if (!pools[d]) pools[d] = emulated_handle();
  *pool = pools[d];
  return OK;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
  for (int d = 0; d < device_count(); d++) {
    cudaMemPool_t its;
    cudaDeviceGetDefaultMemPool(&its, d);
    if (its == pool) *(uint64_t *)value = used[d];
  }
  return OK;
}
cudaError_t cudaDeviceGetGraphMemAttribute(int d, enum cudaGraphMemAttributeType which, void *value) { *(uint64_t *)value = 0; return OK; }
static cudaError_t pinned(void **p, size_t size) {
  UNSAFE();
  hold();
  use(current);
  char *at = pages(NULL, size);
  if (at) note(at, size ? size : 1, 0, current, PINNED);
  release();
  *p = at;
  return at ? OK : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { ENTER(); return pinned(p, size); }
cudaError_t cudaMallocHost(void **p, size_t size) { ENTER(); return pinned(p, size); }
cudaError_t cudaFreeHost(void *p) {
  ENTER();
  UNSAFE();
  for (int d = 0; d < device_count(); d++) { hold(); complete_device(d); release(); }   /* a late copy may still write to it */
  if (p) forget(p);
  return OK;
}
cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) {
  ENTER();
  hold();
  note(p, size, 0, current, REGISTERED);
  release();
  return OK;
}
cudaError_t cudaHostUnregister(void *p) { ENTER(); forget(p); return OK; }
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned flags) { *d = h; return OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  ENTER();
  memset(a, 0, sizeof *a);
  hold();
  struct block *b = find(p);
  int host = b && (b->kind == PINNED || b->kind == REGISTERED);
  a->type = !b ? cudaMemoryTypeUnregistered : host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = b ? b->device : -1;
  if (b) a->devicePointer = (void *)p;
  if (host) a->hostPointer = (void *)p;
  release();
  return OK;
}

/* A copy that a stream makes. To pinned memory it arrives when the stream has come so far; to pageable memory CUDA waits. */
static cudaError_t copy(void *to, const void *from, size_t size, cudaStream_t stream) {
  hold();
  struct stream *s = stream_of(stream);
  struct block *b = find(to);
  cudaError_t error = OK;
  if (s->capture || !is.late || (b && (b->kind == DEVICE || b->kind == ADDRESSES)) || size > is.copy) {
    error = work(s, (struct node){COPY, to, from, size, 0});
    if (!error && !s->capture) emulated_copy(to, from, size);
  } else if (b) {
    char *bytes = malloc(size ? size : 1);
    memcpy(bytes, from, size);
    add(s, (struct action){.at = submitted + 1, .to = to, .bytes = bytes, .size = size});
    submit(s);
  } else {
    submit(s);
    if (!find(from)) memmove(to, from, size);
    else { complete(s, s->last); emulated_copy(to, from, size); }
  }
  release();
  return error ? error : sticky ? fail(sticky) : OK;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER();
  return copy(to, from, size, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  ENTER();
  UNSAFE();
  hold();
  struct stream *s = stream_of(NULL);
  submit(s);
  complete(s, s->last);
  release();
  emulated_copy(to, from, size);
  return sticky ? fail(sticky) : OK;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t stream) {
  ENTER();
  return copy(to, from, size, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t other, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
  ENTER();
  for (size_t row = 0; row < height; row++) {
    cudaError_t error = copy((char *)to + row * pitch, (const char *)from + row * other, width, stream);
    if (error) return error;
  }
  return OK;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
  ENTER();
  hold();
  struct stream *s = stream_of(stream);
  cudaError_t error = work(s, (struct node){SET, at, NULL, size, value});
  if (!error && !s->capture) {
    if (!value) clear(at, size);
    else if (size <= is.copy) memset(at, value, size);
  }
  release();
  return error;
}
cudaError_t cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size, NULL); }

/* ---- kernels ------------------------------------------------------------------------------------------------------------- */

struct kernel { const void *address; const char *name; };
static struct kernel *kernels;
static size_t kernel_count, kernel_room;
static int kernels_sorted;

static int by_address(const void *a, const void *b) {
  const struct kernel *x = a, *y = b;
  return x->address < y->address ? -1 : x->address > y->address;
}
static const char *name_of(const void *address) {
  if (!kernels_sorted) {
    qsort(kernels, kernel_count, sizeof *kernels, by_address);
    kernels_sorted = 1;
  }
  struct kernel key = {address, NULL}, *found = bsearch(&key, kernels, kernel_count, sizeof key, by_address);
  return found ? found->name : NULL;
}

static void *fatbin[1];
void **__cudaRegisterFatBinary(void *f) { return fatbin; }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
void __cudaRegisterFunction(void **h, const char *f, char *df, const char *name, int tl, uint3 *t, uint3 *b, dim3 *bd, dim3 *gd, int *w) {
  hold();
  if (kernel_count == kernel_room) {
    kernel_room = kernel_room ? 2 * kernel_room : 1 << 16;
    kernels = realloc(kernels, kernel_room * sizeof *kernels);
  }
  kernels[kernel_count++] = (struct kernel){f, name};
  kernels_sorted = 0;
  release();
}
void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {}
void __cudaRegisterManagedVar(void **h, void **v, char *a, const char *n, int e, size_t s, int c, int g) {}
char __cudaInitModule(void **h) { return 0; }

/* fill_ of a contiguous tensor: (int count, FillFunctor<T> value, array<char *, 1> data). */
static void fill(const char *name, void **arguments) {
  const char *functor = strstr(name, "11FillFunctorI");
  if (!functor || !arguments || !strstr(name, "elementwise_kernel") || strstr(name, "elementwise_kernelILi128")) return;
  functor += strlen("11FillFunctorI");
  size_t item;
  switch (*functor) {
    case 'f': case 'i': case 'j': item = 4; break;
    case 'd': case 'l': case 'm': item = 8; break;
    case 's': case 't': item = 2; break;
    case 'b': case 'a': case 'h': item = 1; break;
    case 'N': {
      int half = !strncmp(functor, "N3c104HalfE", 11) || !strncmp(functor, "N3c108BFloat16E", 15);
      if (!half) return;
      item = 2;
      break;
    }
    default: return;
  }
  size_t count = (size_t)*(int *)arguments[0];
  const char *value = arguments[1];
  char *data = *(char **)arguments[2];
  int zero = 1;
  for (size_t i = 0; i < item; i++) zero &= !value[i];
  if (zero) clear(data, count * item);
  else if (count * item <= is.copy)
    for (size_t i = 0; i < count; i++) memcpy(data + i * item, value, item);
}

static void plus(char type, void *to, const void *from, size_t count, const void *number, const void *times) {
#define PLUS(letter, T) \
  if (type == letter) \
    for (size_t i = 0; i < count; i++) ((T *)to)[i] = ((const T *)from)[i] + *(const T *)number * (times ? *(const T *)times : (T)1);
  PLUS('f', float) PLUS('d', double) PLUS('i', int) PLUS('l', int64_t)
#undef PLUS
}

/* x + number, contiguous: (int count, CUDAFunctorOnSelf_add<T> {number, times}, array<char *, 2> {to, from}). */
static void add_number(const char *name, void **arguments) {
  const char *functor = strstr(name, "21CUDAFunctorOnSelf_addI");
  if (!functor || !arguments || !strstr(name, "elementwise_kernel") || strstr(name, "elementwise_kernelILi128")) return;
  if (strstr(name, "LoadWithCast")) return;
  char type = functor[strlen("21CUDAFunctorOnSelf_addI")];
  size_t item = type == 'f' || type == 'i' ? 4 : 8, count = (size_t)*(int *)arguments[0];
  char **data = arguments[2];
  if (count * item <= is.copy) plus(type, data[0], data[1], count, arguments[1], (char *)arguments[1] + item);
}

/* The same for a list of tensors, in place: (TensorListMetadata<1>, functor, plus, number). emulation.py says how large its parts are
   in this torch; from 2.14 on they are others, and Adam's counts are on the host. */
static void add_number_to_each(const char *name, void **arguments, unsigned blocks) {
#ifdef TENSORS_OF_A_LAUNCH
  struct list { char *at[TENSORS_OF_A_LAUNCH]; int64_t count[TENSORS_OF_A_LAUNCH]; TENSOR_OF_A_BLOCK tensor[BLOCKS_OF_A_LAUNCH]; int chunk[BLOCKS_OF_A_LAUNCH]; };
  enum { CHUNK = 65536 };
  if (!arguments || !strstr(name, "18TensorListMetadataILi1E") || !strstr(name, "21BinaryOpScalarFunctorIfLi1ELi1ELi0E") || !strstr(name, "4plusIf")) return;
  const struct list *l = arguments[0];
  for (unsigned b = 0; b < blocks && b < BLOCKS_OF_A_LAUNCH; b++) {
    int64_t first = (int64_t)l->chunk[b] * CHUNK, left = l->count[l->tensor[b]] - first;
    char *at = l->at[l->tensor[b]] + first * 4;
    if (left > 0) plus('f', at, at, (size_t)(left < CHUNK ? left : CHUNK), arguments[3], NULL);
  }
#endif
}

static cudaError_t launch(const char *function, const void *kernel, dim3 grid, void **arguments, cudaStream_t stream) {
  if (sticky) return fail(sticky);
  hold();
  struct stream *s = stream_of(stream);
  const char *name = name_of(kernel);
  struct failure *f = failures ? due(function, name) : NULL;
  cudaError_t error = OK;
  if (f && f->sticky) add(s, (struct action){.at = submitted + 1, .error = f->error});   /* shows when the work is done */
  else if (f) error = f->error;
  if (!error) error = work(s, (struct node){WORK});
  if (!error && !s->capture && name) {
    fill(name, arguments);
    add_number(name, arguments);
    add_number_to_each(name, arguments, grid.x);
  }
  release();
  return error ? fail(error) : OK;
}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  call.grid = grid;
  call.block = block;
  call.shared = shared;
  call.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = call.grid;
  *block = call.block;
  *shared = call.shared;
  *(void **)stream = call.stream;
  return OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return OK; }
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return launch(__func__, f, g, a, st); }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return launch("cudaLaunchKernel", k, g, a, st); }
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return launch("cudaLaunchKernel", k, g, a, st); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launch("cudaLaunchKernel", f, c->gridDim, a, c->stream); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return launch("cudaLaunchKernel", f, g, a, st); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = is.cc;
  a->maxDynamicSharedSizeBytes = 49152;
  return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t s) {
  *n = threads && threads < 2048 ? 2048 / threads : 1;
  return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int threads, size_t s, unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, threads, s);
}
cudaError_t cudaGetSymbolAddress(void **p, const void *s) { static char room[1 << 20]; *p = room; return OK; }
cudaError_t cudaGetFuncBySymbol(cudaFunction_t *f, const void *s) { *f = (cudaFunction_t)s; return OK; }
cudaError_t cudaLibraryLoadData(cudaLibrary_t *l, const void *code, enum cudaJitOption *a, void **b, unsigned c, enum cudaLibraryOption *d, void **e, unsigned n) {
  *l = emulated_handle();
  return OK;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *name) { *k = emulated_handle(); return OK; }

/* ---- the driver ---------------------------------------------------------------------------------------------------------- */

static char contexts[DEVICES];   /* a context's handle is the address of its device's place */

CUresult cuInit(unsigned flags) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *v) { *v = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = device_count(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int ordinal) { *d = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int size, CUdevice d) { snprintf(name, (size_t)size, "%s", device_name()); return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid(CUuuid *u, CUdevice d) { memset(u, 0, sizeof *u); u->bytes[0] = (char)(d + 1); return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t *size, CUdevice d) { *size = is.memory; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  if (a == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) { *v = 1; return CUDA_SUCCESS; }
  return (CUresult)cudaDeviceGetAttribute(v, (enum cudaDeviceAttr)a, d);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *is_active) { *flags = 0; *is_active = active[d]; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { use(d); *c = (CUcontext)&contexts[d]; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice d) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = active[current] ? (CUcontext)&contexts[current] : NULL; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { if (c) current = (int)((char *)c - contexts); return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext c) { return cuCtxSetCurrent(c); }
CUresult cuCtxPopCurrent(CUcontext *c) { return cuCtxGetCurrent(c); }
CUresult cuCtxGetDevice(CUdevice *d) { *d = current; return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return (CUresult)cudaDeviceSynchronize(); }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 1024; return CUDA_SUCCESS; }
CUresult cuMemGetInfo(size_t *free_, size_t *total) { return (CUresult)cudaMemGetInfo(free_, total); }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = cudaGetErrorString((cudaError_t)e); return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult e, const char **s) { *s = cudaGetErrorName((cudaError_t)e); return CUDA_SUCCESS; }
CUresult cuGetExportTable(const void **t, const CUuuid *id) { return CUDA_ERROR_NOT_SUPPORTED; }   /* anything else, and CUPTI asks for ever */
CUresult cuMulticastCreate(CUmemGenericAllocationHandle *h, const CUmulticastObjectProp *p) { return CUDA_ERROR_NOT_SUPPORTED; }

/* Virtual memory: what expandable segments are made of. Physical memory counts; an unmapped range is zero when mapped again. */
struct physical { size_t size; int device; };
CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *g = 2 << 20; return CUDA_SUCCESS; }
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  DRIVER();
  hold();
  char *at = device_pages(size);
  if (!at) { release(); return CUDA_ERROR_OUT_OF_MEMORY; }
  note(at, size, 0, current, ADDRESSES);
  release();
  *p = (CUdeviceptr)at;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t size) { forget((void *)p); return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t size, const CUmemAllocationProp *p, unsigned long long flags) {
  DRIVER();
  int d = p->location.id;
  if (p->location.type != CU_MEM_LOCATION_TYPE_DEVICE || device_problem(d)) return CUDA_ERROR_INVALID_VALUE;
  hold();
  use(d);
  int fits = taken(d) + size <= is.memory;
  if (fits) used[d] += size;
  release();
  if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
  struct physical *x = malloc(sizeof *x);
  *x = (struct physical){size, d};
  *h = (CUmemGenericAllocationHandle)x;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  struct physical *x = (void *)h;
  hold();
  used[x->device] -= x->size;
  release();
  free(x);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr p, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags) {
  DRIVER();
  hold();
  struct block *b = find((void *)p);
  if (b) b->device = ((struct physical *)h)->device;
  release();
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t size) { madvise((void *)p, size, MADV_DONTNEED); return CUDA_SUCCESS; }
CUresult cuMemSetAccess(CUdeviceptr p, size_t size, const CUmemAccessDesc *d, size_t count) { return CUDA_SUCCESS; }
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
  hold();
  struct block *b = find((void *)p);
  if (b && base) *base = (CUdeviceptr)b->at;
  if (b && size) *size = b->size;
  release();
  return b ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr p) {
  hold();
  struct block *b = find((void *)p);
  release();
  if (!b) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = p; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = b->device; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = b->kind == PINNED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    default: memset(data, 0, 4); break;
  }
  return CUDA_SUCCESS;
}

/* Kernels that were compiled while the program runs: by triton, or by NVRTC, which both work without a GPU. */
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = emulated_handle(); return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *o, void **v) { *m = emulated_handle(); return CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *m, const char *path) { *m = emulated_handle(); return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) {
  char *named = emulated_handle();
  snprintf(named, 512, "%s", name);
  *f = (CUfunction)named;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int threads, size_t s) { *n = threads && threads < 2048 ? 2048 / threads : 1; return CUDA_SUCCESS; }
static CUresult launched(CUfunction f, CUstream stream) {
  if (sticky) return (CUresult)sticky;
  hold();
  struct stream *s = stream_of((cudaStream_t)stream);
  struct failure *due_ = failures ? due("cudaLaunchKernel", (const char *)f) : NULL;
  if (due_) add(s, (struct action){.at = submitted + 1, .error = due_->error});
  cudaError_t error = work(s, (struct node){WORK});
  release();
  return (CUresult)error;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void **a, void **e) { return launched(f, s); }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **a, void **e) { return launched(f, c->hStream); }
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void **a) { return launched(f, s); }

/* The driver's functions by name. Many have a number: cuda.h says which of cuMemGetInfo's versions is meant. */
static void *driver(const char *name) {
  static const char *versions[] = {"_v4", "_v3", "_v2", ""};
  char numbered[96];
  for (int i = 0; i < 4; i++) {
    snprintf(numbered, sizeof numbered, "%s%s", name, versions[i]);
    void *found = dlsym(RTLD_DEFAULT, numbered);
    Dl_info where, here;
    if (found && dladdr(found, &where) && dladdr((void *)driver, &here) && where.dli_fbase == here.dli_fbase) return found;
  }
  return NULL;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags, enum cudaDriverEntryPointQueryResult *r) {
  *f = driver(name);
  if (r) *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return OK;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, enum cudaDriverEntryPointQueryResult *r) {
  return cudaGetDriverEntryPoint(name, f, flags, r);
}
CUresult cuGetProcAddress(const char *name, void **f, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *r) {
  *f = driver(name);
  if (r) *r = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* ---- NVML ---------------------------------------------------------------------------------------------------------------- */

/* Its devices are those of the machine: CUDA_VISIBLE_DEVICES does not hold, and no context is made. A handle is an index + 1. */
enum { NVML_OK = 0, NVML_NOT_SUPPORTED = 3 };
int nvmlInit(void) { return NVML_OK; }
int nvmlInit_v2(void) { return NVML_OK; }
int nvmlInitWithFlags(unsigned flags) { return NVML_OK; }
int nvmlShutdown(void) { return NVML_OK; }
const char *nvmlErrorString(int e) { return e ? "not supported by the emulation" : "no error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = (unsigned)number("DEVICES", 1); return NVML_OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(uintptr_t)(i + 1); return NVML_OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **h) {
  unsigned bus = 1;
  sscanf(id, "%*x:%x", &bus);
  *h = (void *)(uintptr_t)bus;
  return NVML_OK;
}
int nvmlDeviceGetUUID(void *h, char *text, unsigned size) {
  snprintf(text, size, "GPU-%02x000000-0000-0000-0000-000000000000", (unsigned)(uintptr_t)h);
  return NVML_OK;
}
int nvmlDeviceGetHandleByUUID(const char *text, void **h) {
  unsigned first = 0;
  sscanf(text, "GPU-%2x", &first);
  *h = (void *)(uintptr_t)first;
  return first ? NVML_OK : NVML_NOT_SUPPORTED;
}
/* This process alone, with its context. */
struct process { unsigned pid; unsigned long long used; unsigned gpu, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, struct process *found) {
  int d = (int)(uintptr_t)h - 1;
  if (d < 0 || d >= DEVICES) return NVML_NOT_SUPPORTED;
  unsigned room = *count;
  *count = active[d] ? 1 : 0;
  if (*count > room || (*count && !found)) return 7;   /* too small: ask again with more room */
  if (*count) *found = (struct process){(unsigned)getpid(), taken(d), 0xffffffff, 0xffffffff};
  return NVML_OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *count, struct process *found) { return nvmlDeviceGetComputeRunningProcesses_v3(h, count, found); }
int nvmlDeviceGetComputeRunningProcesses_v2(void *h, unsigned *count, struct process *found) { return nvmlDeviceGetComputeRunningProcesses_v3(h, count, found); }
struct memory_of_device { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *h, struct memory_of_device *m) {
  int d = (int)(uintptr_t)h - 1;
  if (d < 0 || d >= DEVICES) return NVML_NOT_SUPPORTED;
  if (!settled) { hold(); settle(); release(); }
  *m = (struct memory_of_device){is.memory, is.memory - taken(d), taken(d)};
  return NVML_OK;
}
struct memory_of_device_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *h, struct memory_of_device_v2 *m) {
  struct memory_of_device first;
  int error = nvmlDeviceGetMemoryInfo(h, &first);
  if (!error) { m->total = first.total; m->reserved = 0; m->free = first.free; m->used = first.used; }
  return error;
}
int nvmlDeviceGetUtilizationRates(void *h, unsigned *rates) { rates[0] = rates[1] = 0; return NVML_OK; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *degrees) { *degrees = 40; return NVML_OK; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *milliwatts) { *milliwatts = 100000; return NVML_OK; }
int nvmlDeviceGetClockInfo(void *h, int which, unsigned *mhz) { *mhz = 1980; return NVML_OK; }
int nvmlDeviceGetName(void *h, char *name, unsigned size) { snprintf(name, size, "%s", device_name()); return NVML_OK; }
int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) { snprintf(name, size, "python"); return NVML_OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }
/* Success with a state of 0, "not supported": torch 2.13 takes nothing but success. Behind the version there are 28 bytes. */
int nvmlDeviceGetGpuFabricInfoV(void *device, unsigned *info) { memset(info + 1, 0, 28); return 0; }
int nvmlDeviceGetP2PStatus(void) { return NVML_NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = CUDA_VERSION; return NVML_OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.00"); return NVML_OK; }

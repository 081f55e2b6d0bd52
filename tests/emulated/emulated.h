/* What runtime.c offers to libraries.c and to the generated stubs. runtime.c says what all of it is for. */
#include <stddef.h>
#include <cuda_runtime_api.h>

/* A setting, such as "DEVICES": what emulated_cuda_set() was given, or else the variable EMULATED_CUDA_DEVICES. */
const char *emulated_setting(const char *name);
/* The same as bytes: a whole number, and K, M or G after it. */
size_t emulated_bytes(const char *name, size_t otherwise);
/* A handle that is nobody else's, with 512 bytes of zeros behind it. */
void *emulated_handle(void);
/* One piece of work for a stream, which a kernel or a library's call would be. */
cudaError_t emulated_work(cudaStream_t stream);
/* What a stub does: one that is harmless says its name where EMULATED_CUDA_LOG is set; any other ends the process. */
long emulated_harmless(const char *name);
void emulated_missing(const char *name) __attribute__((noreturn));
/* Copies bytes between blocks, of which large ones cost memory only where something was written. */
void emulated_copy(void *to, const void *from, size_t size);

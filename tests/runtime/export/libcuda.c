/* A driver of NVIDIA's in name: each function of it is a pointer that a test sets. Without one it fails. */
#include <stdint.h>
#include <stddef.h>

#define PLAYED(name, parameters, given) \
  int (*played_##name) parameters; \
  int name parameters { return played_##name ? played_##name given : 999; }

PLAYED(cuInit, (unsigned a), (a))
PLAYED(cuDriverGetVersion, (int *a), (a))
PLAYED(cuDeviceGetCount, (int *a), (a))
PLAYED(cuDeviceGet, (int *a, int b), (a, b))
PLAYED(cuDeviceGetAttribute, (int *a, int b, int c), (a, b, c))
PLAYED(cuDevicePrimaryCtxRetain, (void **a, int b), (a, b))
PLAYED(cuDevicePrimaryCtxRelease_v2, (int a), (a))
PLAYED(cuCtxPushCurrent_v2, (void *a), (a))
PLAYED(cuCtxPopCurrent_v2, (void **a), (a))
PLAYED(cuCtxSynchronize, (void), ())
PLAYED(cuModuleLoadData, (void **a, const void *b), (a, b))
PLAYED(cuModuleUnload, (void *a), (a))
PLAYED(cuModuleGetFunction, (void **a, void *b, const char *c), (a, b, c))
PLAYED(cuFuncSetAttribute, (void *a, int b, int c), (a, b, c))
PLAYED(cuMemAlloc_v2, (uint64_t *a, size_t b), (a, b))
PLAYED(cuMemFree_v2, (uint64_t a), (a))
PLAYED(cuMemAllocAsync, (uint64_t *a, size_t b, void *c), (a, b, c))
PLAYED(cuMemFreeAsync, (uint64_t a, void *b), (a, b))
PLAYED(cuMemcpyHtoD_v2, (uint64_t a, const void *b, size_t c), (a, b, c))
PLAYED(cuMemcpyDtoDAsync_v2, (uint64_t a, uint64_t b, size_t c, void *d), (a, b, c, d))
PLAYED(cuMemcpyHtoDAsync_v2, (uint64_t a, const void *b, size_t c, void *d), (a, b, c, d))
PLAYED(cuStreamCreate, (void **a, unsigned b), (a, b))
PLAYED(cuStreamDestroy_v2, (void *a), (a))
PLAYED(cuStreamSynchronize, (void *a), (a))
PLAYED(cuGetErrorString, (int a, const char **b), (a, b))
PLAYED(cuLaunchKernel, (void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h,
                        void *s, void **p, void **x), (f, a, b, c, d, e, g, h, s, p, x))
PLAYED(cuLaunchKernelEx, (const void *c, void *f, void **p, void **x), (c, f, p, x))

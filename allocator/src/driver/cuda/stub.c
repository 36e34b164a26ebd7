// A driver library for tests: it counts its calls, checks what it is passed, and answers plausible values.
//
// Prototypes and structs are written out from cuda.h, so that a wrong argument order or layout on the Rust side shows here.
// Settings: INIT (cuInit's answer), VERSION, RDMA, VMM, POSIX_FD, WORDS2, WORDS1, COMPUTE_MODE, MPS, OLD (leave CUDA 12 functions out),
// SHARING (pools, IPC, dma-buf: kinds of handle that pools have), MEETS (sees whether two threads are in such calls at once), FIRST_WORDS (leave the _v2 stream memory operations out), DEVICES, PEER.
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef VERSION
#define VERSION 12080
#endif
#ifndef RDMA
#define RDMA 1
#endif
#ifndef VMM
#define VMM 1
#endif
#ifndef POSIX_FD
#define POSIX_FD 1
#endif
#ifndef WORDS2
#define WORDS2 1
#endif
#ifndef WORDS1
#define WORDS1 0
#endif
#ifndef COMPUTE_MODE
#define COMPUTE_MODE 0
#endif
#ifndef MPS
#define MPS 0
#endif
#ifndef DEVICES
#define DEVICES 2
#endif
#ifndef PEER
#define PEER 1
#endif

typedef unsigned long long u64;
typedef int CUresult;
typedef int CUdevice;
typedef struct ctx *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_READY = 600, NOT_REGISTERED = 713, CAPTURE = 900 };

// What tests read.
struct counts { u64 calls, pushes, pops, retains, ids, waits, last_value; int writes_v2, grants, last_id, import_fd; } counts;
u64 stub_size(int which) { return which == 0 ? sizeof(CUmemAllocationProp) : which == 1 ? sizeof(CUmemAccessDesc) : sizeof(CUmemLocation); }
struct counts *stub_counts(void) { return &counts; }

static __thread CUcontext stack[8];
static __thread int depth;
static __thread int mode; // 0 is global, as in a thread that never exchanged it.
int stub_depth(void) { return depth; }
int stub_mode(void) { return mode; }
void stub_push(u64 ctx) { stack[depth++] = (CUcontext)ctx; }
void stub_pop(void) { depth--; }

#define CALL counts.calls++
#define PRIMARY ((CUcontext)0xc0)
#define NEEDS_CONTEXT do { CALL; if (!depth || stack[depth - 1] != PRIMARY) return INVALID_CONTEXT; } while (0)
// What a capture of another thread prohibits, and would be broken by.
#define UNSAFE do { if (mode != 2) return CAPTURE; } while (0)

CUresult cuInit(unsigned flags) { CALL; return flags ? INVALID_VALUE : INIT; }
CUresult cuDriverGetVersion(int *v) { CALL; *v = VERSION; return 0; }
CUresult cuGetErrorName(CUresult r, const char **s) { CALL; *s = "CUDA_ERROR_OF_THE_FUTURE"; return r ? 0 : 1; }
CUresult cuDeviceGetCount(int *n) { CALL; *n = DEVICES; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { CALL; if (i >= DEVICES) return 101; *d = i; return 0; }
CUresult cuDeviceGetName(char *s, int n, CUdevice d) { CALL; strncpy(s, d ? "Stub B" : "Stub A", n); return 0; }
CUresult cuDeviceGetUuid(char *b, CUdevice d) { CALL; memset(b, 0xa0 + d, 16); return 0; }
CUresult cuDeviceGetUuid_v2(char *b, CUdevice d) { CALL; memset(b, 0xb0 + d, 16); return 0; }
CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) { CALL; *n = (size_t)80 << 30; return d >= DEVICES; }
CUresult cuDeviceGetAttribute(int *v, int a, CUdevice d) {
    CALL;
    switch (a) {
    case 20: *v = COMPUTE_MODE; return 0;
    case 93: *v = WORDS1; return 0;
    case 102: *v = VMM; return 0;
    case 103: *v = POSIX_FD; return 0;
    case 110: *v = RDMA; return 0;
#ifdef SHARING
    case 119: *v = SHARING; return 0;
    case 124: *v = SHARING & 1; return 0;
#endif
    case 122: *v = WORDS2; return 0;
    case 133: *v = MPS; return 0;
    default: return d >= DEVICES ? 101 : INVALID_VALUE;
    }
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice d, CUdevice p) { CALL; *can = PEER && d != p; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { CALL; counts.retains++; *c = PRIMARY; return d; }
CUresult cuCtxGetCurrent(CUcontext *c) { CALL; *c = depth ? stack[depth - 1] : 0; return 0; }
CUresult cuCtxPushCurrent_v2(CUcontext c) { CALL; counts.pushes++; stack[depth++] = c; return 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *c) { CALL; counts.pops++; if (!depth) return INVALID_CONTEXT; *c = stack[--depth]; return 0; }
CUresult cuThreadExchangeStreamCaptureMode(int *m) { CALL; int old = mode; mode = *m; *m = old; return 0; }
CUresult cuMemGetInfo_v2(size_t *f, size_t *t) { NEEDS_CONTEXT; *f = 7, *t = 9; return 0; }

static int right(const CUmemAllocationProp *p) {
    return p->type == 1 && p->requestedHandleTypes == 1 && p->location.type == 1 && p->location.id < DEVICES && !p->win32HandleMetaData
        && !p->allocFlags.compressionType && p->allocFlags.gpuDirectRDMACapable == RDMA && !p->allocFlags.usage;
}
CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, int option) {
    CALL; *g = 2 << 20; return right(p) && option == 0 ? 0 : INVALID_VALUE;
}
#ifndef WITHOUT_CREATE
CUresult cuMemCreate(u64 *h, size_t n, const CUmemAllocationProp *p, u64 flags) {
    static u64 next = 0x100; CALL; UNSAFE; if (!right(p) || !n || n % (2 << 20) || flags) return INVALID_VALUE; *h = next++; return 0;
}
#endif
CUresult cuMemExportToShareableHandle(void *out, u64 h, int kind, u64 flags) {
    CALL; if (h < 0x100 || kind != 1 || flags) return INVALID_VALUE; *(int *)out = open("/dev/null", O_RDWR); return 0;
}
CUresult cuMemImportFromShareableHandle(u64 *h, void *os, int kind) {
    CALL; counts.import_fd = (int)(size_t)os; if (fcntl((int)(size_t)os, F_GETFD) < 0 || kind != 1) return INVALID_VALUE; *h = 0x999; return 0;
}
CUresult cuMemRelease(u64 h) { CALL; return h < 0x100 ? INVALID_VALUE : 0; }
CUresult cuMemAddressReserve(u64 *a, size_t n, size_t align, u64 hint, u64 flags) {
    CALL; if (!n || align != 2 << 20 || flags) return INVALID_VALUE; *a = hint ? hint : 0x700000000000; return 0;
}
CUresult cuMemAddressFree(u64 a, size_t n) { CALL; return a && n ? 0 : INVALID_VALUE; }
CUresult cuMemMap(u64 a, size_t n, size_t offset, u64 h, u64 flags) { CALL; return !a || !n || offset || h < 0x100 || flags ? INVALID_VALUE : 0; }
CUresult cuMemUnmap(u64 a, size_t n) { CALL; return a && n ? 0 : INVALID_VALUE; }
CUresult cuMemSetAccess(u64 a, size_t n, const CUmemAccessDesc *d, size_t count) {
    CALL;
    for (size_t i = 0; i < count; i++) {
        if (d[i].location.type != 1 || (d[i].flags != 1 && d[i].flags != 3)) return INVALID_VALUE;
        counts.last_id = d[i].location.id;
    }
    counts.grants = (int)count;
    return a && n ? 0 : INVALID_VALUE;
}
CUresult cuMemGetAddressRange_v2(u64 *base, size_t *n, u64 a) { NEEDS_CONTEXT; if (a < 0x1000) return 500; *base = a & ~0xfffull; *n = 0x1000; return 0; }

CUresult cuStreamCreate(CUstream *s, unsigned flags) { NEEDS_CONTEXT; *s = (CUstream)0x51; return flags == 1 ? 0 : INVALID_VALUE; }
CUresult cuStreamDestroy_v2(CUstream s) { NEEDS_CONTEXT; return s == (CUstream)0x51 ? 0 : INVALID_VALUE; }
#ifndef OLD
// As measured: who a created stream is, and whether it captures, is told with any context current, and with none.
#define NAMES_ONE(s) if ((size_t)(s) <= 2) NEEDS_CONTEXT; else CALL
CUresult cuStreamGetId(CUstream s, u64 *id) { NAMES_ONE(s); counts.ids++; *id = (u64)s + 1000; return 0; }
CUresult cuCtxRecordEvent(CUcontext c, CUevent e) { NEEDS_CONTEXT; UNSAFE; return c == PRIMARY && e == (CUevent)0xe1 ? 0 : INVALID_VALUE; }
#endif
CUresult cuStreamGetCtx(CUstream s, CUcontext *c) { CALL; *c = s == (CUstream)0x52 ? 0 : PRIMARY; return 0; }
CUresult cuStreamSynchronize(CUstream s) { NEEDS_CONTEXT; UNSAFE; 
#ifdef SHARING
    return 0;
#endif
    return s == (CUstream)0x51 ? 987 : 0; }
CUresult cuStreamQuery(CUstream s) { NEEDS_CONTEXT; UNSAFE; return s == (CUstream)0x51 ? NOT_READY : 0; }
CUresult cuStreamIsCapturing(CUstream s, int *status) { if ((size_t)s <= 2) NEEDS_CONTEXT; else CALL; *status = (int)(size_t)s % 3; return 0; }
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned flags) { NEEDS_CONTEXT; return s == (CUstream)0x51 && e == (CUevent)0xe1 && !flags ? 0 : INVALID_VALUE; }
CUresult cuMemcpyAsync(u64 dst, u64 src, size_t n, CUstream s) { NEEDS_CONTEXT; return dst == 0x2000 && src == 0x3000 && n == 5 && s == (CUstream)0x51 ? 0 : INVALID_VALUE; }
CUresult cuMemsetD8Async(u64 dst, unsigned char b, size_t n, CUstream s) { NEEDS_CONTEXT; return dst == 0x2000 && b == 0xee && n == 5 && s == (CUstream)0x51 ? 0 : INVALID_VALUE; }
CUresult cuEventCreate(CUevent *e, unsigned flags) { NEEDS_CONTEXT; *e = (CUevent)0xe1; return flags == 2 ? 0 : INVALID_VALUE; }
CUresult cuEventDestroy_v2(CUevent e) { NEEDS_CONTEXT; return e == (CUevent)0xe1 ? 0 : INVALID_VALUE; }
CUresult cuEventRecord(CUevent e, CUstream s) { NEEDS_CONTEXT; return e == (CUevent)0xe1 && s == (CUstream)0x51 ? 0 : INVALID_VALUE; }
CUresult cuEventQuery(CUevent e) { NEEDS_CONTEXT; UNSAFE; return e == (CUevent)0xe1 ? NOT_READY : e == (CUevent)0xe2 ? 700 : 0; }
CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags) { NEEDS_CONTEXT; UNSAFE; return (size_t)p % 4096 || !n || flags != 3 ? INVALID_VALUE : 0; }
CUresult cuMemHostUnregister(void *p) { NEEDS_CONTEXT; return (size_t)p % 4096 ? NOT_REGISTERED : 0; }
CUresult cuMemHostGetDevicePointer_v2(u64 *a, void *p, unsigned flags) { NEEDS_CONTEXT; *a = (u64)p + 0x10000; return flags; }

static CUresult word(CUstream s, u64 a, u64 v, unsigned flags, int second) {
    NEEDS_CONTEXT; counts.waits++; counts.last_value = v; counts.writes_v2 = second; return s == (CUstream)0x51 && a == 0x4000 && !flags ? 0 : INVALID_VALUE;
}
CUresult cuStreamWriteValue64(CUstream s, u64 a, u64 v, unsigned flags) { return word(s, a, v, flags, 0); }
CUresult cuStreamWaitValue64(CUstream s, u64 a, u64 v, unsigned flags) { return word(s, a, v, flags, 0); }
#ifndef FIRST_WORDS
CUresult cuStreamWriteValue64_v2(CUstream s, u64 a, u64 v, unsigned flags) { return word(s, a, v, flags, 1); }
CUresult cuStreamWaitValue64_v2(CUstream s, u64 a, u64 v, unsigned flags) { return word(s, a, v, flags, 1); }
#endif

// Memory of others' making: only with -DSHARING, as all of it is optional.
#ifdef SHARING
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { int allocType, handleTypes; CUmemLocation location; void *win32; size_t maxSize; unsigned short usage; unsigned char reserved[54]; } CUmemPoolProps;
typedef struct pool *CUmemoryPool;
#define POOL ((CUmemoryPool)0xb001)
static int exported; // The pool's handle goes first, else every pointer is refused.
// With -DMEETS: two threads in these calls at once, and a pool's pointer that is mapped twice, are counted; a call takes a moment.
static int inside, mapped;
struct meetings { int calls, met, twice; } meetings;
struct meetings *stub_meetings(void) { return &meetings; }
#ifdef MEETS
static void meet(void) {
    meetings.calls++;
    if (__atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST) > 1) __atomic_add_fetch(&meetings.met, 1, __ATOMIC_SEQ_CST);
    usleep(50);
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
}
#else
static void meet(void) {}
#endif
CUresult cuPointerGetAttribute(void *out, int a, u64 p) {
    NEEDS_CONTEXT; if (p < 0x1000) return INVALID_VALUE;
    switch (a) {
    case 11: *(u64 *)out = p & ~0xfffull; return 0;
    case 12: *(u64 *)out = 0x3000; return 0;
    case 17: *(void **)out = p == 0x9000 ? POOL : 0; return 0;
    default: return INVALID_VALUE;
    }
}
CUresult cuIpcGetMemHandle(CUipcMemHandle *h, u64 p) { meet(); NEEDS_CONTEXT; UNSAFE; if (p != 0x8000) return INVALID_VALUE; memset(h, 0x8f, 64); return 0; }
CUresult cuIpcOpenMemHandle_v2(u64 *p, CUipcMemHandle h, unsigned flags) {
    meet(); NEEDS_CONTEXT; UNSAFE; for (int i = 0; i < 64; i++) if ((unsigned char)h.reserved[i] != 0x8f) return INVALID_VALUE;
    *p = 0xa000; return flags == 1 ? 0 : INVALID_VALUE;
}
CUresult cuIpcCloseMemHandle(u64 p) { meet(); NEEDS_CONTEXT; UNSAFE; return p == 0xa000 ? 0 : INVALID_VALUE; }
CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *p) {
    CALL; UNSAFE; *pool = POOL; if (sizeof *p != 88 || p->allocType != 1 || p->handleTypes != 1 || p->location.type != 1 || p->win32 || p->maxSize) return INVALID_VALUE;
    for (int i = 0; i < 54; i++) if (p->reserved[i] || p->usage) return INVALID_VALUE;
    return 0;
}
CUresult cuDeviceSetMemPool(CUdevice d, CUmemoryPool p) { CALL; return d == 0 && p == POOL ? 0 : INVALID_VALUE; }
CUresult cuMemPoolSetAttribute(CUmemoryPool p, int a, void *v) {
    CALL; if (p != POOL || a < 1 || a > 4) return INVALID_VALUE; return a == 4 ? (*(u64 *)v == ~0ull ? 0 : INVALID_VALUE) : *(int *)v == 1 ? 0 : INVALID_VALUE;
}
CUresult cuMemPoolGetAttribute(CUmemoryPool p, int a, void *v) { CALL; if (p != POOL || a < 5 || a > 8) return INVALID_VALUE; *(u64 *)v = a * 10; return 0; }
CUresult cuMemPoolSetAccess(CUmemoryPool p, const CUmemAccessDesc *d, size_t n) { CALL; counts.grants = (int)n; counts.last_id = d->location.id; return p == POOL && d->flags == 3 ? 0 : INVALID_VALUE; }
CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool p, int kind, u64 flags) {
    meet(); CALL; UNSAFE; if (p != POOL || kind != 1 || flags) return INVALID_VALUE; exported = 1; *(int *)out = open("/dev/null", O_RDWR); return 0;
}
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *p, void *os, int kind, u64 flags) {
    meet(); NEEDS_CONTEXT; counts.import_fd = (int)(size_t)os; *p = POOL; return kind == 1 && !flags ? 0 : INVALID_VALUE;
}
CUresult cuMemPoolExportPointer(void *data, u64 p) { meet(); NEEDS_CONTEXT; if (p != 0x9000 || !exported) return INVALID_VALUE; memset(data, 0x9f, 64); return 0; }
CUresult cuMemPoolImportPointer(u64 *p, CUmemoryPool pool, void *data) { meet(); NEEDS_CONTEXT; *p = 0xc000; meetings.twice += mapped++ > 0; return pool == POOL && *(unsigned char *)data == 0x9f ? 0 : INVALID_VALUE; }
CUresult cuMemFreeAsync(u64 p, CUstream s) { meet(); NEEDS_CONTEXT; mapped--; return p == 0xc000 && s == (CUstream)0x51 ? 0 : INVALID_VALUE; }
CUresult cuMemGetHandleForAddressRange(void *out, u64 p, size_t n, int kind, u64 flags) {
    NEEDS_CONTEXT; UNSAFE; if (!p || !n || kind != 1 || flags) return INVALID_VALUE; *(int *)out = open("/dev/null", O_RDWR); return 0;
}
#endif

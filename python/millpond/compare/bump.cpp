// The floor: a pluggable allocator that only moves a pointer. The first GiB is device memory; behind it come 32 TiB of addresses
// that nothing stands behind, for blocks that are never touched. It goes round there: a lap is
// far longer than what is alive at a time.
#include <dlfcn.h>
#include <sys/mman.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <mutex>
static char* real;
static char* bare;
static std::atomic<uint64_t> offset;
static std::once_flag once;
static const uint64_t REAL = 1ull << 30, BARE = 32ull << 40;
static void reserve() {
  // torch has loaded the runtime library already; its major version is not known here.
  for (auto name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}) {
    void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) continue;
    auto allocate = (int (*)(void**, size_t))dlsym(library, "cudaMalloc");
    if (allocate && allocate((void**)&real, REAL) == 0) break;
  }
  void* found = mmap(nullptr, BARE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  bare = found == MAP_FAILED ? nullptr : (char*)found;
  if (!real || !bare) abort();
}
extern "C" void* bump_malloc(size_t bytes, int, void*) {
  std::call_once(once, reserve);
  bytes = (bytes + 511) & ~511ull;
  uint64_t at = offset.load(std::memory_order_relaxed), start;
  do {
    start = at;
    if (start < REAL ? start + bytes > REAL : start + bytes > REAL + BARE) start = REAL;
  } while (!offset.compare_exchange_weak(at, start + bytes, std::memory_order_relaxed));
  return start < REAL ? real + start : bare + (start - REAL);
}
extern "C" void bump_free(void*, size_t, int, void*) {}

// The floor: a pluggable allocator that only moves a pointer round and round, and never frees.
#include <dlfcn.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <mutex>
static char* base;
static std::atomic<uint64_t> offset;
static std::once_flag once;
static const uint64_t CAPACITY = 8ull << 30;
static void reserve() {
  // torch has loaded the runtime library already; its major version is not known here.
  for (auto name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}) {
    void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) continue;
    auto allocate = (int (*)(void**, size_t))dlsym(library, "cudaMalloc");
    if (allocate && allocate((void**)&base, CAPACITY) == 0) return;
  }
}
extern "C" void* bump_malloc(size_t bytes, int, void*) {
  std::call_once(once, reserve);
  bytes = (bytes + 511) & ~511ull;
  uint64_t at = offset.fetch_add(bytes) % CAPACITY;
  if (at + bytes > CAPACITY) at = 0;
  return base + at;
}
extern "C" void bump_free(void*, size_t, int, void*) {}

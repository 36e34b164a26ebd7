// Replays a trace through one allocator, each call timed by itself. It knows nothing of torch: it is handed two functions.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif
using Clock = std::chrono::steady_clock;

// Ticks of the cheapest clock. The fences keep what is timed between two of them.
static inline uint64_t now() {
#if defined(__x86_64__)
  _mm_lfence();
  uint64_t at = __rdtsc();
  _mm_lfence();
  return at;
#else
  return (uint64_t)Clock::now().time_since_epoch().count();
#endif
}

// Nanoseconds of a tick, and of the clock itself: the median of a thousand intervals with nothing in them.
extern "C" void replay_clock(double* tick, double* cost) {
  auto start = Clock::now();
  uint64_t first = now();
  std::vector<uint64_t> nothing(1001);
  for (auto& n : nothing) { uint64_t at = now(); n = now() - at; }
  while (Clock::now() - start < std::chrono::milliseconds(20)) {}
  *tick = std::chrono::duration<double, std::nano>(Clock::now() - start).count() / double(now() - first);
  std::nth_element(nothing.begin(), nothing.begin() + 500, nothing.end());
  *cost = double(nothing[500]) * *tick;
}

struct Event { uint64_t bytes, stream, block, frees; };  // the stream: its place in Job::streams
enum Outcome : uint8_t { DONE, FAILED, NOT_TRIED };
struct Job {
  const Event* events;
  size_t count;
  const uint64_t* streams;
  size_t blocks;
  void* (*allocate)(size_t bytes, int device, void* stream);
  void (*free)(void* pointer, size_t bytes, int device, void* stream);
  uint64_t (*reserved)();  // all bytes that were ever reserved; null: nobody asks. Asked after calls of `slow` ticks: growth is no faster.
  uint64_t slow;
  uint32_t* ticks;  // of each event, as the rest
  uint64_t* grew;
  uint8_t* outcome;
  int32_t device;
};

extern "C" void replay_run(const Job* job) {
  std::vector<void*> blocks(job->blocks);
  for (size_t i = 0; i < job->count; i++) job->ticks[i] = 0, job->grew[i] = 0, job->outcome[i] = DONE;  // no page fault later
  uint64_t before = job->reserved ? job->reserved() : 0;
  for (size_t i = 0; i < job->count; i++) {
    const Event& e = job->events[i];
    auto stream = (void*)job->streams[e.stream];
    void*& block = blocks[e.block];
    uint64_t start, end;
    if (e.frees) {
      if (!block) { job->outcome[i] = NOT_TRIED; continue; }
      start = now();
      job->free(block, e.bytes, job->device, stream);
      end = now();
      block = nullptr;
    } else {
      start = now();
      block = job->allocate(e.bytes, job->device, stream);
      end = now();
      if (!block) job->outcome[i] = FAILED;
    }
    job->ticks[i] = (uint32_t)std::min<uint64_t>(end - start, UINT32_MAX);
    if (job->reserved && end - start >= job->slow) {
      uint64_t after = job->reserved();
      job->grew[i] = after > before ? after - before : 0;
      before = after;
    }
  }
  for (void* block : blocks)
    if (block) job->free(block, 0, job->device, nullptr);
}

// The library's own calls, where torch is not between.
static uint64_t (*own_allocate)(int32_t device, uint64_t bytes, uint64_t stream);
static int32_t (*own_free)(uint64_t address);
extern "C" void replay_own(decltype(own_allocate) a, decltype(own_free) f) { own_allocate = a, own_free = f; }
extern "C" void* replay_own_malloc(size_t bytes, int device, void* stream) { return (void*)own_allocate(device, bytes, (uint64_t)stream); }
extern "C" void replay_own_free(void* pointer, size_t, int, void*) { own_free((uint64_t)pointer); }

// Allocator calls alone, through torch's C++ interface; loaded with ctypes after torch.
#include <c10/cuda/CUDACachingAllocator.h>
#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <vector>
using Clock = std::chrono::steady_clock;
static double ns(Clock::time_point start) { return std::chrono::duration<double, std::nano>(Clock::now() - start).count(); }
static c10::cuda::CUDACachingAllocator::CUDAAllocator* allocator() { return c10::cuda::CUDACachingAllocator::get(); }

extern "C" double bench_pair(size_t bytes, int count) {
  auto* a = allocator();
  for (int i = 0; i < 100; i++) a->raw_delete(a->raw_alloc(bytes));
  auto start = Clock::now();
  for (int i = 0; i < count; i++) a->raw_delete(a->raw_alloc(bytes));
  return ns(start) / count;
}

// Live blocks from 512 B to 4 MiB, made by `alloc`: one is freed, another is made.
template <class Alloc>
static double churn(int live, int count, uint64_t seed, Alloc alloc) {
  auto* a = allocator();
  std::vector<void*> blocks(live);
  uint64_t s = 88172645463325252ull + seed;
  auto random = [&] { s ^= s << 13; s ^= s >> 7; s ^= s << 17; return s; };
  auto fresh = [&] { return alloc(512 + random() % (4 << 20)); };
  for (auto& p : blocks) p = fresh();
  auto start = Clock::now();
  for (int i = 0; i < count; i++) {
    auto& p = blocks[random() % live];
    a->raw_delete(p);
    p = fresh();
  }
  double result = ns(start);
  for (auto p : blocks) a->raw_delete(p);
  return result;
}

extern "C" double bench_mixed(int live, int count) {
  return churn(live, count, 0, [a = allocator()](size_t bytes) { return a->raw_alloc(bytes); }) / count;
}

// Each thread on its own stream: `work` does `count` operations there and says how long they took. The mean as each thread sees it.
template <class Work>
static double spread(const uint64_t* streams, int threads, int count, Work work) {
  std::vector<std::thread> running;
  std::vector<double> took(threads);
  for (int t = 0; t < threads; t++)
    running.emplace_back([=, &took] { took[t] = work((cudaStream_t)streams[t], t) / count; });
  double sum = 0;
  for (int t = 0; t < threads; t++) { running[t].join(); sum += took[t]; }
  return sum / threads;
}

extern "C" double bench_threads(size_t bytes, int count, const uint64_t* streams, int threads) {
  return spread(streams, threads, count, [=](cudaStream_t stream, int) {
    auto* a = allocator();
    for (int i = 0; i < 100; i++) a->raw_delete(a->raw_alloc_with_stream(bytes, stream));
    auto start = Clock::now();
    for (int i = 0; i < count; i++) a->raw_delete(a->raw_alloc_with_stream(bytes, stream));
    return ns(start);
  });
}

// So many live blocks in each thread.
extern "C" double bench_mixed_threads(int live, int count, const uint64_t* streams, int threads) {
  return spread(streams, threads, count, [=](cudaStream_t stream, int thread) {
    return churn(live, count, thread, [=, a = allocator()](size_t bytes) { return a->raw_alloc_with_stream(bytes, stream); });
  });
}

// For replaybench.cpp: the calls as functions that do not throw; what was thrown last is kept.
static std::string thrown;
extern "C" void* torch_malloc(size_t bytes, int, void* stream) {
  try {
    return allocator()->raw_alloc_with_stream(bytes, (cudaStream_t)stream);
  } catch (const std::exception& e) {
    thrown = e.what();
  } catch (...) {
    thrown = "something was thrown that is no std::exception";
  }
  return nullptr;
}
extern "C" void torch_free(void* pointer, size_t, int, void*) { allocator()->raw_delete(pointer); }
extern "C" const char* torch_thrown() { return thrown.c_str(); }

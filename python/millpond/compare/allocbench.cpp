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

// 1,000 live blocks from 512 B to 4 MiB: one is freed, another is made.
extern "C" double bench_mixed(int live, int count) {
  auto* a = allocator();
  std::vector<void*> blocks(live);
  uint64_t s = 88172645463325252ull;
  auto random = [&] { s ^= s << 13; s ^= s >> 7; s ^= s << 17; return s; };
  for (auto& p : blocks) p = a->raw_alloc(512 + random() % (4 << 20));
  auto start = Clock::now();
  for (int i = 0; i < count; i++) {
    auto& p = blocks[random() % live];
    a->raw_delete(p);
    p = a->raw_alloc(512 + random() % (4 << 20));
  }
  double result = ns(start) / count;
  for (auto p : blocks) a->raw_delete(p);
  return result;
}

// Each thread on its own stream; the mean of a pair as each thread sees it.
extern "C" double bench_threads(size_t bytes, int count, const uint64_t* streams, int threads) {
  auto* a = allocator();
  std::vector<std::thread> running;
  std::vector<double> took(threads);
  for (int t = 0; t < threads; t++)
    running.emplace_back([=, &took] {
      auto stream = (cudaStream_t)streams[t];
      for (int i = 0; i < 100; i++) a->raw_delete(a->raw_alloc_with_stream(bytes, stream));
      auto start = Clock::now();
      for (int i = 0; i < count; i++) a->raw_delete(a->raw_alloc_with_stream(bytes, stream));
      took[t] = ns(start) / count;
    });
  double sum = 0;
  for (int t = 0; t < threads; t++) { running[t].join(); sum += took[t]; }
  return sum / threads;
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

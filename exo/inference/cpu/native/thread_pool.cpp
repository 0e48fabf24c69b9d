#include "thread_pool.hpp"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace exo {

namespace {

constexpr int kSpins = 3000;          // some 30 to 100 microseconds
constexpr int kSpinsToYield = 20000;  // a worker that holds an index may have lost its processor

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool& thread_pool() {
  // Never destroyed: at exit a thread of Python may still be in a step.
  static ThreadPool* const pool = new ThreadPool;
  return *pool;
}

void ThreadPool::set_threads(int count) {
  std::lock_guard lock(one_job_);
  stop();
  threads_ = std::max(1, count);
  stopping_ = false;
  for (int i = 1; i < threads_; i++) workers_.emplace_back([this] { serve(); });
}

void ThreadPool::stop() {
  stopping_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::share(int64_t count, Call call, const void* context) {
  std::lock_guard lock(one_job_);
  const uint32_t generation = generation_.load() + 1;
  // Closed while it changes: a late worker of the job before must not claim with the new count.
  ticket_.store(static_cast<uint64_t>(generation) << 32 | 0xffffffff, std::memory_order_seq_cst);
  call_ = call;
  context_ = context;
  count_.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<uint64_t>(generation) << 32, std::memory_order_release);
  generation_.store(generation);
  if (sleepers_.load() > 0) generation_.notify_all();
  claim(generation);
  for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
    spins < kSpinsToYield ? relax() : std::this_thread::yield();
  }
}

void ThreadPool::claim(uint32_t generation) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  // While the generation is this one the job cannot end without its last index being counted in
  // `done_`, so `call_`, `context_` and `count_` are those of this job once an index is claimed.
  for (;;) {
    if (ticket >> 32 != generation) return;
    const int64_t index = static_cast<int64_t>(ticket & 0xffffffff);
    if (index >= count_.load(std::memory_order_relaxed)) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    call_(context_, index);
    done_.fetch_add(1, std::memory_order_acq_rel);
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

void ThreadPool::serve() {
  uint32_t seen = generation_.load();
  while (!stopping_) {
    claim(seen);
    int spins = 0;
    while (generation_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        relax();
        continue;
      }
      sleepers_.fetch_add(1);
      generation_.wait(seen);
      sleepers_.fetch_sub(1);
    }
    seen = generation_.load();
  }
}

}  // namespace exo

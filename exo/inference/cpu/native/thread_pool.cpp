#include "thread_pool.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace exo {

namespace {

// How long a worker looks for the next job before it sleeps. Within a step jobs follow each other
// in microseconds; between two steps of an answer lie some hundred, and to be woken costs as much,
// in a virtual machine more. It yields its processor after the first moments, so that another
// process that wants it gets it.
constexpr int kPauses = 2000;
constexpr std::chrono::microseconds kYielding{500};

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
  tickets_ = std::vector<Ticket>(static_cast<size_t>(threads_));
  stopping_ = false;
  for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { serve(i); });
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
  const uint64_t generation = generation_.load() + 1;
  // Closed while it changes: a late worker of the job before must not claim with the new count.
  for (Ticket& ticket : tickets_) {
    ticket.value.store(generation << 32 | 0xffffffff, std::memory_order_seq_cst);
  }
  call_ = call;
  context_ = context;
  count_.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  for (int i = 0; i < threads_; i++) {
    const uint64_t begin = static_cast<uint64_t>(share_begin(count, i));
    tickets_[static_cast<size_t>(i)].value.store(generation << 32 | begin,
                                                 std::memory_order_release);
  }
  generation_.store(static_cast<uint32_t>(generation));
  if (sleepers_.load() > 0) generation_.notify_all();
  claim(0, static_cast<uint32_t>(generation));
  // A worker that holds an index may have lost its processor.
  for (int pauses = 0; done_.load(std::memory_order_acquire) < count; pauses++) {
    pauses < 10 * kPauses ? relax() : std::this_thread::yield();
  }
}

void ThreadPool::claim(int index, uint32_t generation) {
  for (int i = 0; i < threads_; i++) claim_from((index + i) % threads_, generation);
}

void ThreadPool::claim_from(int owner, uint32_t generation) {
  std::atomic<uint64_t>& shared = tickets_[static_cast<size_t>(owner)].value;
  uint64_t ticket = shared.load(std::memory_order_acquire);
  // While the generation is this one the job cannot end without its last index being counted in
  // `done_`, so `call_`, `context_` and `count_` are those of this job once an index is claimed.
  for (;;) {
    if (ticket >> 32 != generation) return;
    const int64_t index = static_cast<int64_t>(ticket & 0xffffffff);
    if (index >= share_begin(count_.load(std::memory_order_relaxed), owner + 1)) return;
    if (!shared.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    call_(context_, index);
    done_.fetch_add(1, std::memory_order_acq_rel);
    ticket = shared.load(std::memory_order_acquire);
  }
}

void ThreadPool::serve(int index) {
  uint32_t seen = generation_.load();
  while (!stopping_) {
    claim(index, seen);
    const auto changed = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    for (int i = 0; i < kPauses && !changed(); i++) relax();
    const auto enough = std::chrono::steady_clock::now() + kYielding;
    while (!changed() && std::chrono::steady_clock::now() < enough) std::this_thread::yield();
    while (!changed()) {
      sleepers_.fetch_add(1);
      generation_.wait(seen);
      sleepers_.fetch_sub(1);
    }
    seen = generation_.load();
  }
}

uint64_t read_all(const uint8_t* data, int64_t size) {
  constexpr int64_t kPiece = 1 << 22, kLine = 64;
  std::atomic<uint64_t> total{0};
  thread_pool().run((size + kPiece - 1) / kPiece, [&](int64_t piece) {
    const int64_t end = std::min(size, (piece + 1) * kPiece);
    // One word of each line: memory comes a line at a time.
    uint64_t sum[4] = {};
    for (int64_t at = piece * kPiece; at + 4 * kLine <= end; at += 4 * kLine) {
      for (int i = 0; i < 4; i++) {
        uint64_t word;
        std::memcpy(&word, data + at + i * kLine, 8);
        sum[i] += word;
      }
    }
    total += sum[0] + sum[1] + sum[2] + sum[3];
  });
  return total;
}

}  // namespace exo

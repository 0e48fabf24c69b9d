// Threads that share the blocks of one job after another.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace exo {

// Each thread, the caller too, claims the indices of its own share of a job in order, so what it
// reads is one stream that the processor fetches ahead, and then those left in the shares of
// others, so a worker that the system has not scheduled yet costs nothing. Between jobs a worker
// looks for the next one for half a millisecond and then sleeps, so an idle process uses no
// processor. Jobs of different callers run one after the other.
class ThreadPool {
 public:
  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The caller counts as one thread.
  void set_threads(int count);
  int threads() const { return threads_; }
  // Whether `index` of a job of `count` is the first of a thread's share.
  bool begins_share(int64_t count, int64_t index) const {
    const int64_t owner = (index * threads_ + count - 1) / count;
    return share_begin(count, owner) == index;
  }

  // work(i) for i in [0, count), in any order, on any thread; returns when all are done.
  // `work` must not throw and must not call `run`.
  template <typename Work>
  void run(int64_t count, const Work& work) {
    if (threads_ == 1 || count <= 1) {
      for (int64_t i = 0; i < count; i++) work(i);
      return;
    }
    share(
        count, [](const void* context, int64_t i) { (*static_cast<const Work*>(context))(i); },
        &work);
  }

 private:
  using Call = void (*)(const void*, int64_t);

  void share(int64_t count, Call call, const void* context);
  void serve(int index);
  void claim(int index, uint32_t generation);
  void claim_from(int owner, uint32_t generation);
  void stop();
  int64_t share_begin(int64_t count, int64_t owner) const { return count * owner / threads_; }

  std::mutex one_job_;
  std::vector<std::thread> workers_;
  std::atomic<int> threads_{1};

  // The job. A ticket holds its generation and the next index to claim of a thread's share, so a
  // worker that wakes late cannot take an index of a job it did not see.
  struct alignas(64) Ticket {
    std::atomic<uint64_t> value{0};
  };
  std::vector<Ticket> tickets_ = std::vector<Ticket>(1);
  Call call_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<int64_t> count_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

// The pool of this process.
ThreadPool& thread_pool();

// A checksum of memory read on every thread of the pool: what a benchmark of bandwidth calls.
uint64_t read_all(const uint8_t* data, int64_t size);

}  // namespace exo

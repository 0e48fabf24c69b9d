// Which of two ways to the same results is quicker on this processor: each is timed for some
// hundred microseconds, once. A table of processors would say it only of those somebody measured.
#pragma once

#include <atomic>
#include <cstdint>

#include "../../kernels.hpp"

namespace exo::EXO_ISA {

class Quicker {
 public:
  bool is_untried() const { return way_.load(std::memory_order_relaxed) == kUntried; }

  // The second way, or where none was tried what is `usual`.
  bool is_second(bool usual) const {
    const uint8_t way = way_.load(std::memory_order_relaxed);
    return way == kUntried ? usual : way == kSecond;
  }

  // What is usual stays where the other is not clearly quicker. Where threads try at once the first
  // one's answer holds.
  template <typename First, typename Second>
  void try_both(const First& first, const Second& second, bool usual) {
    constexpr int kTurns = 12;  // the best of which other processes did not disturb
    int64_t best[2] = {INT64_MAX, INT64_MAX};
    const auto time = [&](int way, const auto& run) {
      const int64_t started = nanoseconds();
      run();
      const int64_t taken = nanoseconds() - started;
      if (taken < best[way]) best[way] = taken;
    };
    for (int turn = 0; turn < kTurns; turn++) {
      time(0, first);
      time(1, second);
    }
    // 3 % of a doubt.
    const bool is_second =
        usual ? best[1] <= best[0] + best[0] / 32 : best[1] < best[0] - best[0] / 32;
    uint8_t untried = kUntried;
    way_.compare_exchange_strong(untried, is_second ? kSecond : kFirst);
  }

 private:
  enum : uint8_t { kUntried, kFirst, kSecond };
  std::atomic<uint8_t> way_{kUntried};
};

}  // namespace exo::EXO_ISA

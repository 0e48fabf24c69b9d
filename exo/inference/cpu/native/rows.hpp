// Work on the rows of a step, and the buffers they stand in.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lines.hpp"
#include "thread_pool.hpp"

namespace exo {

// A row at a time costs less than waking a thread until there are some.
inline constexpr int64_t kRowsToShare = 8;

template <typename Work>
void each_row(int64_t rows, const Work& work) {
  if (rows < kRowsToShare) {
    for (int64_t i = 0; i < rows; i++) work(i);
    return;
  }
  const int64_t share = std::max<int64_t>(1, rows / (thread_pool().threads() * 4));
  thread_pool().run((rows + share - 1) / share, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * share);
    for (int64_t i = task * share; i < end; i++) work(i);
  });
}

inline size_t at_least(int64_t count) { return static_cast<size_t>(count); }

// Vectors only grow: a step's buffers are those of the largest step so far.
inline void grow(Lines<float>& v, int64_t count) {
  if (v.size() < at_least(count)) v.resize(at_least(count));
}

}  // namespace exo

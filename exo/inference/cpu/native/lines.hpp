// Vectors whose memory begins with a cache line: where it begins between two, as large ones of the
// C library do, every load of a line touches two of them.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace exo {

template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}

  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAllocator&) const = default;
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

}  // namespace exo

// Linear layers of super-blocks, half of all kernels: compiled beside table.cpp, for each
// instruction set.
#include EXO_OPS

#include "int8.hpp"

namespace exo::EXO_ISA {

void linear_super(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin, int64_t end,
                  float* out, int64_t stride, Upcoming next) {
  with_coding(w.coding(), [&](auto coding) {
    if constexpr (may_be_super(coding.value)) {
      linear_coded<coding.value, Layout::kSuper>(w, x, rows, begin, end, out, stride, next);
    }
  });
}

}  // namespace exo::EXO_ISA

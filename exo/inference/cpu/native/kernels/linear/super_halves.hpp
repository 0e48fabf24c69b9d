// Units of super-blocks whose two halves, of 16 columns, have codes of their own: the sums of both
// are 16 bits of one lane (kernels.hpp, QuantizedSuper), so one instruction multiplies them by
// code * multiple, adds them and adds that to the total. A result has one sum where it had two, and
// two multiplications where it had three.
#pragma once

#include "super.hpp"

namespace exo::EXO_ISA {

// Whether there are such units. Whose zero is neither 0 nor stored begins with more additions than
// this saves.
template <Coding C, typename O = Ops>
constexpr bool multiplies_halves() {
  constexpr int kZero = super_form(C).zero;
  static_assert(QuantizedSuper::kMostOfHalf * QuantizedSuper::kHalfZero <= INT16_MAX);
  return C.table == Table::kNone && SuperTraits<C>::kHalves == 2 &&
         (kZero == 0 || kZero == QuantizedSuper::kHalfZero) && requires { O::end_second; };
}

// Adds unit `u` of a super-block of B blocks, `apart` bytes from one to the next, to the totals
// [B * M].
template <Coding C, int M, int B, typename O = Ops>
EXO_INLINE void add_packed_halves(const SuperAt<C>& at, int64_t apart, int u,
                                  const SuperActivations& x, typename O::Int* total) {
  static constexpr int32_t kBias = QuantizedSuper::kBias;
  constexpr bool kHasZero = super_form(C).zero > 0;
  typename O::Int codes[B], sum[B][M];
  for (int b = 0; b < B; b++) {
    const SuperHeader<C> own(at.header + b * apart);
    codes[b] = O::pair_codes(own.code(2 * u + 1), own.code(2 * u));
  }
  const auto row_of = [&](int m) __attribute__((always_inline)) -> const QuantizedSuper& {
    return x.x[m * x.supers];
  };
  for (int m = 0; m < M; m++) {
    for (int b = 0; b < B; b++) {
      sum[b][m] = kHasZero ? O::same_int(row_of(m).half_less[2 * u]) : O::zero_int();
    }
  }
  const int8_t* values = x.values + u * kUnitCols;
  decode_units<C, B>(
      at.unit(u), apart,
      [&](int slab, const typename O::Bytes(&weights)[B]) __attribute__((always_inline)) {
        for (int m = 0; m < M; m++) {
          const int8_t* four = values + m * x.stride + 4 * slab;
          for (int b = 0; b < B; b++) {
            if (slab == kSlabs / 2) {
              O::begin_second(sum[b][m], kHasZero ? row_of(m).second_less[u] : kBias);
            }
            sum[b][m] = O::template dot<weight_bits<C>()>(sum[b][m], weights[b], four);
          }
        }
      });
  for (int m = 0; m < M; m++) {
    int32_t twice;
    std::memcpy(&twice, row_of(m).half_multiples + 2 * u, sizeof twice);
    for (int b = 0; b < B; b++) {
      O::end_second(sum[b][m]);
      O::add_products_of_16(total[b * M + m], sum[b][m], O::times_16(codes[b], twice));
    }
  }
}

}  // namespace exo::EXO_ISA

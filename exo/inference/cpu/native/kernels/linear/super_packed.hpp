// Tiles of few rows, or of some rows by two blocks, straight from the packed super-blocks.
#pragma once

#include "super_halves.hpp"

namespace exo::EXO_ISA {

// B blocks for `rows` rows, up to M: see block_from_packed.
template <Coding C, int M, int B = 1>
void super_block_from_packed(const Matrix& w, const QuantizedRows& x, const FineGroup* fine,
                             int64_t row, int64_t rows, int64_t block, float* out, int64_t stride,
                             Ahead ahead) {
  using T = SuperTraits<C>;
  constexpr int kUnits = QuantizedSuper::kUnits;
  constexpr bool kOne = M * B == 1;  // whose weights are decoded once for both parts
  constexpr bool kByHalves = M > 2 && B > 1 && multiplies_halves<C>();
  constexpr SuperOffsets kOffsets = left_to_finish(super_offsets<C>());
  alignas(64) uint8_t pairs[64 * T::kPairs];
  const int64_t supers = w.cols / kSuperCols, apart = w.block_bytes();
  SuperAt<C> at{w.block(block)};
  PartSums<B * M> sums(w.parts, supers);
  for (int64_t s = 0; s < supers; s++, sums.next(), at.next()) {
    if constexpr (B == 1) prefetch<M, at.kHeaderLines>(at.header);
    const SuperHeader<C> header(at.header);
    const SuperActivations coarse(x, x.coarse, row, s), left(x, x.fine, row, s);
    Ops::Int total[B * M], of_left[B * M];
    for (auto& sum : total) sum = Ops::zero_int();
    for (auto& sum : of_left) sum = Ops::zero_int();
    const int64_t end = (s + 1) * kUnits;
    const bool some_fine = fine->index < end;
    if constexpr (kByHalves) {
      for (int u = 0; u < kUnits; u++) {
        ahead.fetch();
        add_packed_halves<C, M, B>(at, apart, u, coarse, total);
      }
    }
    for (int u = 0; !kByHalves && u < kUnits; u++) {
      const uint8_t* p = at.unit(u);
      if constexpr (B > 1) {
        ahead.fetch();
      } else {
        prefetch<M, C.bits>(p);
      }
      if (kOne && s * kUnits + u == fine->index) {
        add_packed_unit<C, M, 2, B>(p, header, apart, u, {&coarse, &left}, {total, of_left});
        fine++;
      } else {
        add_packed_unit<C, M, 1, B>(p, header, apart, u, {&coarse}, {total});
      }
    }
    for (; !kOne && fine->index < end; fine++) {
      const int u = fine->index % kUnits;
      const uint8_t* unit = at.unit(u);
      with_fine_rows<M, B>(
          *fine, of_left,
          [&](auto some, int first, int distance, Ops::Int* of) __attribute__((always_inline)) {
            const SuperActivations rows = left.of_rows(first, distance);
            add_packed_unit<C, some.value, 1, B>(unit, header, apart, u, {&rows}, {of});
          });
    }
    Ops::Float* y = sums.now();
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) {
      const SuperHeader<C> own(header.header + b * apart);
      if constexpr (kOffsets.are_any()) own.store_pairs(pairs);
      const Ops::Float d = own.d(), factor = own.factor();
      const auto finish = [&](const Ops::Int* sums, const SuperActivations& of,
                              bool begins) __attribute__((always_inline)) {
        finish_super<T::kHalves, M>(y + b * M, sums + b * M, of.x, of.supers, d, factor, pairs,
                                    kOffsets, begins);
      };
      finish(total, coarse, sums.begins());
      if (some_fine) finish(of_left, left, false);
    }
  }
  for (int b = 0; b < B; b++) {
    for (int m = 0; m < rows; m++) {
      finish(w, block + b, sums.total(b * M + m), out + (row + m) * stride);
    }
  }
}

}  // namespace exo::EXO_ISA

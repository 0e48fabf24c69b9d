// Tiles of one block of super-blocks by many rows, for processors that shift where they multiply
// (kernels.hpp, Vendor): a unit is decoded into eight registers, which row after row takes. So it
// is decoded for twice as many rows as in tiles of two blocks, and of sums only each row's total
// stays. Where sums of a few slabs fit 16 bits, one instruction multiplies them by code * multiple
// and adds them to the total: of two multiplications of lanes, at two operations each, and as many
// additions none is left.
#pragma once

#include "super.hpp"

namespace exo::EXO_ISA {

// Whether there are such tiles, and the most rows they have.
template <Coding C, typename O = Ops>
constexpr bool takes_row_after_row() {
  return C.table == Table::kNone && requires { O::add_products_of_16; };
}
inline constexpr int kRowsInTurn = most_rows(12);
static_assert(kRowsInTurn <= kMostRows);

// Slabs of one group whose sum fits (kernels.hpp, QuantizedSuper).
template <Coding C>
struct SlabsIn16Bits {
  static constexpr int kZero = C.bits == 6 ? QuantizedSuper::kHalfZero : 0;  // taken from sums
  static constexpr int kMost = C.bits == 6 ? kZero : (1 << C.bits) - 1;      // of a value
  static constexpr int kFit = INT16_MAX / (QuantizedSuper::kMostOfHalf * kMost);
  static constexpr int kCount = kFit >= 2 && SuperTraits<C>::kHalves == 1 ? 8 : 4;
  static_assert(kFit >= 1);
  // What a super-block's end takes.
  static constexpr SuperOffsets kLeft{super_offsets<C>().has_factor,
                                      kZero > 0 ? -1 : super_offsets<C>().zero_shift};
};

// A unit, decoded, and its groups' codes in the lower halves of their lanes.
template <Coding C, typename O = Ops>
struct HeldUnit {
  static constexpr int kHalves = SuperTraits<C>::kHalves;
  static constexpr SuperOffsets kOffsets = SlabsIn16Bits<C>::kLeft;  // what its end takes
  typename O::Bytes slabs[kSlabs];
  typename O::Int codes[kHalves];

  EXO_INLINE HeldUnit(const SuperAt<C>& at, int u) {
    const SuperHeader<C> header(at.header);
    for (int h = 0; h < kHalves; h++) {
      codes[h] = header.code(u * kHalves + h);
      if constexpr (header.kKind == SuperKind::kCodes) codes[h] = O::lower_16(codes[h]);
    }
    const auto hold = [&](int slab, typename O::Bytes weights)
                          __attribute__((always_inline)) { slabs[slab] = weights; };
    decode_unit<C>(at.unit(u), hold);
  }

  // Adds one row's products, of its values for this unit, `u` of its super-block.
  EXO_INLINE void add_to(typename O::Int& total, const int8_t* values, const QuantizedSuper& x,
                         int u) const {
    using Fit = SlabsIn16Bits<C>;
    typename O::Int times[kHalves];
    for (int h = 0; h < kHalves; h++) times[h] = O::times_16(codes[h], x.multiples[u]);
#pragma GCC unroll 4
    for (int i = 0; i < kSlabs; i += Fit::kCount) {
      typename O::Int sum = O::zero_int();
      if constexpr (Fit::kZero > 0) sum = O::same_int(x.half_less[2 * u + i / 4]);
#pragma GCC unroll 8
      for (int s = i; s < i + Fit::kCount; s++) O::add_dot(sum, slabs[s], values + 4 * s);
      O::add_products_of_16(total, sum, times[i * kHalves / kSlabs]);
    }
  }
};

// The totals of M rows over one super-block. By itself, as gcc 12 finds registers for all of it
// only then.
template <Coding C, int M>
__attribute__((noinline)) void add_row_after_row(const SuperAt<C>& at, const SuperActivations& x,
                                                 Ahead ahead, Ops::Int* totals) {
  const SuperAt<C> super = at;
  const SuperActivations rows = x;
  if constexpr (M <= 2) prefetch<M, SuperAt<C>::kHeaderLines>(super.header);
  Ops::Int total[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) total[m] = Ops::zero_int();
#pragma GCC unroll 1
  for (int u = 0; u < QuantizedSuper::kUnits; u++) {
    if constexpr (M <= 2) {
      prefetch<M, C.bits>(super.unit(u));
    } else {
      ahead.fetch();
    }
    const HeldUnit<C> unit(super, u);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      unit.add_to(total[m], rows.values + m * rows.stride + u * kUnitCols, rows.x[m * rows.supers],
                  u);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) Ops::store_int(totals + m, total[m]);
}

// Adds what is left over of those units of super-block `super` that are fine to the rows y; returns
// the next one's.
template <Coding C>
__attribute__((noinline)) const FineGroup* add_fine_units(const SuperAt<C>& at,
                                                          const SuperActivations& x,
                                                          const FineGroup* fine, int64_t super,
                                                          Ops::Float* y) {
  using T = SuperTraits<C>;
  constexpr int kUnits = QuantizedSuper::kUnits;
  constexpr SuperOffsets kLeft = SlabsIn16Bits<C>::kLeft;
  const SuperHeader<C> header(at.header);
  alignas(64) uint8_t totals[64 * kMostRows], pairs[64 * T::kPairs];
  uint32_t rows = 0;  // that have a total
  for (; fine->index < (super + 1) * kUnits; fine++) {
    const int u = fine->index % kUnits;
    const HeldUnit<C> unit(at, u);
    for (uint32_t left = fine->rows; left != 0; left &= left - 1) {
      const int m = __builtin_ctz(left);
      Ops::Int total = Ops::zero_int();
      if (rows >> m & 1) total = Ops::load_int(totals + 64 * m);
      unit.add_to(total, x.values + m * x.stride + u * kUnitCols, x.x[m * x.supers], u);
      Ops::store_int(totals + 64 * m, total);
    }
    rows |= fine->rows;
  }
  if constexpr (kLeft.are_any()) header.store_pairs(pairs);
  const Ops::Float d = header.d(), factor = header.factor();
  for (; rows != 0; rows &= rows - 1) {
    const int m = __builtin_ctz(rows);
    const Ops::Int total = Ops::load_int(totals + 64 * m);
    finish_super<T::kHalves, 1>(y + m, &total, x.x + m * x.supers, 0, d, factor, pairs, kLeft,
                                false);
  }
  return fine;
}

// One block for `rows` rows, up to M: see block_from_packed.
template <Coding C, int M>
void super_block_row_after_row(const Matrix& w, const QuantizedRows& x, const FineGroup* fine,
                               int64_t row, int64_t rows, int64_t block, float* out, int64_t stride,
                               Ahead ahead) {
  using T = SuperTraits<C>;
  constexpr int kUnits = QuantizedSuper::kUnits;
  constexpr SuperOffsets kLeft = SlabsIn16Bits<C>::kLeft;
  alignas(64) uint8_t pairs[64 * T::kPairs];
  const int64_t supers = w.cols / kSuperCols;
  SuperAt<C> at{w.block(block)};
  PartSums<M> sums(w.parts, supers);
  for (int64_t s = 0; s < supers; s++, sums.next(), at.next()) {
    const SuperHeader<C> header(at.header);
    const SuperActivations coarse(x, x.coarse, row, s);
    Ops::Int totals[M];
    add_row_after_row<C, M>(at, coarse, ahead, totals);
    ahead.at += kUnits * 64 * ahead.lines;
    if constexpr (kLeft.are_any()) header.store_pairs(pairs);
    finish_super<T::kHalves, M>(sums.now(), totals, coarse.x, coarse.supers, header.d(),
                                header.factor(), pairs, kLeft, sums.begins());
    if (fine->index < (s + 1) * kUnits) {
      const SuperActivations left(x, x.fine, row, s);
      fine = add_fine_units<C>(at, left, fine, s, sums.now());
    }
  }
  for (int m = 0; m < rows; m++) finish(w, block, sums.total(m), out + (row + m) * stride);
}

}  // namespace exo::EXO_ISA

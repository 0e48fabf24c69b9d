// Super-blocks (linear/super.hpp) that are decoded once for many rows: a whole block, or one at a
// time for a few tiles.
#pragma once

#include "super.hpp"

namespace exo::EXO_ISA {

// The scales of one super-block in a panel: d and factor as floats, the codes of its groups and the
// pairs of its offset codes.
template <int HALVES>
struct SuperScales {
  static constexpr int kGroups = QuantizedSuper::kUnits * HALVES;
  static constexpr int64_t kBytes = 128 + 64 * kGroups + 32 * kGroups;
  uint8_t* at;

  EXO_INLINE float* d() const { return reinterpret_cast<float*>(at); }
  EXO_INLINE float* factor() const { return reinterpret_cast<float*>(at) + kBlockRows; }
  EXO_INLINE uint8_t* code(int group) const { return at + 128 + 64 * group; }
  EXO_INLINE uint8_t* pairs() const { return code(kGroups); }
};

template <Coding C>
EXO_INLINE void decode_super(const SuperAt<C>& at, uint8_t* slabs,
                             SuperScales<SuperTraits<C>::kHalves> out) {
  const SuperHeader<C> header(at.header);
  Ops::store(out.d(), header.d());
  Ops::store(out.factor(), header.factor());
  for (int g = 0; g < out.kGroups; g++) Ops::store_int(out.code(g), header.code(g));
  header.store_pairs(out.pairs());
  for (int u = 0; u < QuantizedSuper::kUnits; u++, slabs += 512) {
    decode_unit<C>(at.unit(u), [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
      Ops::store_bytes(slabs + 64 * slab, weights);
    });
  }
}

template <Coding C>
void decode_super_block(const Matrix& w, int64_t block, const Panel& panel) {
  using Scales = SuperScales<SuperTraits<C>::kHalves>;
  SuperAt<C> at{w.block(block)};
  Scales scales{reinterpret_cast<uint8_t*>(panel.scales)};
  for (int64_t s = 0; s < w.cols / kSuperCols; s++, at.next(), scales.at += Scales::kBytes) {
    decode_super<C>(at, panel.slabs + s * kSuperCols * kBlockRows, scales);
  }
}

// The same with a scale and an offset for each group, as other blocks have them.
template <Coding C>
void decode_super_to_groups(const Matrix& w, int64_t block, const Panel& panel) {
  using T = SuperTraits<C>;
  alignas(64) uint8_t memory[SuperScales<T::kHalves>::kBytes];
  const SuperScales<T::kHalves> decoded{memory};
  SuperAt<C> at{w.block(block)};
  float* scales = panel.scales;
  for (int64_t s = 0; s < w.cols / kSuperCols; s++, at.next()) {
    const SuperHeader<C> header(at.header);
    decode_super<C>(at, panel.slabs + s * kSuperCols * kBlockRows, decoded);
    for (int g = 0; g < T::kGroups; g++, scales += 2 * kBlockRows) {
      for (int lane = 0; lane < kBlockRows; lane++) {
        const float scale = decoded.d()[lane] * static_cast<float>(header.code_of(g, lane));
        float offset = scale * -static_cast<float>(T::kForm.zero);
        if constexpr (T::kHasFactor) {
          offset = decoded.factor()[lane] * static_cast<float>(header.min_of(g, lane));
        }
        scales[lane] = scale;
        scales[kBlockRows + lane] = offset;
      }
    }
  }
}

// One super-block in a panel.
template <int HALVES>
struct SuperPanel {
  const uint8_t* slabs;
  SuperScales<HALVES> scales;
};

// Adds all units, or those of super-block `super` that are fine, to M outputs.
template <int BITS, int HALVES, SuperOffsets OFFSETS, int M, bool ALL>
__attribute__((noinline)) void add_super(const SuperPanel<HALVES>& panel, const SuperActivations& x,
                                         const FineGroup* fine, int64_t super, Ahead ahead,
                                         Ops::Float* y, bool begins) {
  Ops::Int total[M];
  for (auto& sum : total) sum = Ops::zero_int();
  constexpr int kUnits = QuantizedSuper::kUnits;
  for (int u = 0; ALL ? u < kUnits : fine->index < (super + 1) * kUnits; u++, fine++) {
    if constexpr (!ALL) u = fine->index % kUnits;
    ahead.fetch();
    const int8_t* values = x.values + kUnitCols * u;
    Ops::Int codes[1][HALVES];
    for (int h = 0; h < HALVES; h++) codes[0][h] = Ops::load_int(panel.scales.code(u * HALVES + h));
    UnitSums<BITS, HALVES, M> sums;
    if constexpr (OFFSETS.zero_shift >= 0) {
      sums.begin_less(x.x, x.supers, u, OFFSETS.zero_shift);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const Ops::Bytes weights[1] = {Ops::load(panel.slabs + 512 * u + 64 * i)};
      sums.add(i, weights, values + 4 * i, x.stride, codes);
    }
    for (int m = 0; m < M; m++) {
      const int32_t multiple = x.x[m * x.supers].multiples[u];
      total[m] = sums.added(0, m, total[m], codes, multiple);
    }
  }
  const SuperScales<HALVES> scales = panel.scales;
  const Ops::Float d = Ops::from_f32(scales.d()), factor = Ops::from_f32(scales.factor());
  finish_super<HALVES, M>(y, total, x.x, x.supers, d, factor, scales.pairs(),
                          left_to_finish(OFFSETS), begins);
}

// Adds one super-block, the coarse and the fine part, to a tile of M rows from `row` on; the fine
// groups of the next one are what it returns.
template <int BITS, int HALVES, SuperOffsets OFFSETS, int M>
const FineGroup* add_both_parts(const SuperPanel<HALVES>& panel, const QuantizedRows& x,
                                const FineGroup* fine, int64_t row, int64_t super, Ahead ahead,
                                Ops::Float* y, bool begins) {
  const SuperActivations coarse(x, x.coarse, row, super);
  add_super<BITS, HALVES, OFFSETS, M, true>(panel, coarse, fine, super, ahead, y, begins);
  const int64_t end = (super + 1) * QuantizedSuper::kUnits;
  if (fine->index >= end) return fine;
  const SuperActivations left(x, x.fine, row, super);
  add_super<BITS, HALVES, OFFSETS, M, false>(panel, left, fine, super, {}, y, false);
  while (fine->index < end) fine++;
  return fine;
}

template <int BITS, int HALVES, SuperOffsets OFFSETS, int M>
void super_block_from_panel(const Matrix& w, const Panel& panel, const QuantizedRows& x,
                            const FineGroup* fine, Ahead ahead, int64_t row, int64_t rows,
                            int64_t block, float* out, int64_t stride) {
  const int64_t supers = w.cols / kSuperCols;
  PartSums<M> sums(w.parts, supers);
  SuperPanel<HALVES> at{panel.slabs, {reinterpret_cast<uint8_t*>(panel.scales)}};
  for (int64_t s = 0; s < supers; s++, sums.next()) {
    fine = add_both_parts<BITS, HALVES, OFFSETS, M>(at, x, fine, row, s, ahead, sums.now(),
                                                    sums.begins());
    ahead.at += QuantizedSuper::kUnits * ahead.lines * 64;
    at.slabs += kSuperCols * kBlockRows;
    at.scales.at += SuperScales<HALVES>::kBytes;
  }
  for (int m = 0; m < rows; m++) finish(w, block, sums.total(m), out + (row + m) * stride);
}

template <Coding C>
struct AddParts {
  static constexpr int kHalves = SuperTraits<C>::kHalves;
  using Tile = const FineGroup* (*)(const SuperPanel<kHalves>&, const QuantizedRows&,
                                    const FineGroup*, int64_t, int64_t, Ahead, Ops::Float*, bool);
  template <int M>
  static constexpr Tile of_rows() {
    if constexpr (M <= Ops::kMaxRows) {
      return add_both_parts<weight_bits<C>(), kHalves, super_offsets<C>(), M>;
    }
    return nullptr;
  }
  static constexpr Tile kTiles[] = {nullptr, of_rows<1>(), of_rows<2>(), of_rows<3>(),
                                    of_rows<4>()};
};

// One block for a few tiles of rows, each super-block decoded once for them: up to kFewRows rows.
inline constexpr int64_t kFewRows = 32;
template <Coding C>
void super_block_for_few(const Matrix& w, const QuantizedRows& x, const FineGroup* fine,
                         int64_t first, int64_t rows, int64_t block, float* out, int64_t stride) {
  constexpr int kHalves = SuperTraits<C>::kHalves, kRows = Ops::kMaxRows;
  alignas(64) uint8_t slabs[kSuperCols * kBlockRows];
  alignas(64) uint8_t memory[SuperScales<kHalves>::kBytes];
  const int64_t supers = w.cols / kSuperCols, listed = w.cols / kUnitCols + 1;
  const int64_t tiles = (rows + kRows - 1) / kRows;
  Ops::Float parts[kFewRows / kRows][kMostParts][kRows];
  const FineGroup* left[kFewRows / kRows];
  for (int64_t t = 0; t < tiles; t++) {
    left[t] = fine + t * listed;
    for (int i = 0; i < w.parts; i++) {
      for (auto& sum : parts[t][i]) sum = Ops::zero_float();
    }
  }
  const auto size_of = [&](int64_t t) {
    return rows - t * kRows < kRows ? rows - t * kRows : kRows;
  };
  SuperAt<C> at{w.block(block)};
  for (int64_t s = 0; s < supers; s++) {
    decode_super<C>(at, slabs, {memory});
    at.next();
    Ahead ahead{at.header, C.bits + 1};
    const int64_t part = s * w.parts / supers;
    for (int64_t t = 0; t < tiles; t++, ahead = {}) {
      left[t] = AddParts<C>::kTiles[size_of(t)]({slabs, {memory}}, x, left[t], first + t * kRows, s,
                                                ahead, parts[t][part], false);
    }
  }
  for (int64_t t = 0; t < tiles; t++) {
    for (int m = 0; m < size_of(t); m++) {
      const auto of = [&](int i) { return parts[t][i][m]; };
      finish(w, block, joined(w.parts, of), out + (first + t * kRows + m) * stride);
    }
  }
}

}  // namespace exo::EXO_ISA

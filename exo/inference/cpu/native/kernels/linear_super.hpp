// The same for super-blocks (matrix.hpp): groups of 16 or 32 columns, their scales products of a
// float16 for 256 columns and a small integer, which float32 holds exactly.
#pragma once

#include "linear_blocks.hpp"

namespace exo::EXO_ISA {

// Scales and offsets of the groups of one super-block.
template <Coding C>
struct SuperScales {
  static constexpr SuperForm kForm = super_form(C);
  static constexpr int kGroups = kSuperCols / kForm.group;
  static constexpr int kGroupsInUnit = kUnitCols / kForm.group;

  Ops::Float d, factor;
  const uint8_t* codes;

  EXO_INLINE explicit SuperScales(const uint8_t* header)
      : d(Ops::from_f16(reinterpret_cast<const uint16_t*>(header))),
        factor(kForm.kind == SuperKind::kCodes
                   ? d
                   : Ops::from_f16(reinterpret_cast<const uint16_t*>(header) + kBlockRows)),
        codes(header + kForm.codes_at) {
    if constexpr (kForm.unit != 1.f) d = Ops::mul(d, Ops::from_one(kForm.unit));
  }

  EXO_INLINE void of(int group, Ops::Float& scale, Ops::Float& offset) const {
    const uint8_t* at = codes + kBlockRows * group;
    if constexpr (kForm.kind == SuperKind::kCodes) {
      scale = Ops::mul(d, Ops::from_i8(at));
      offset = Ops::mul(scale, Ops::from_one(-static_cast<float>(kForm.zero)));
    } else if constexpr (kForm.kind == SuperKind::kNibbles) {
      scale = Ops::mul(d, Ops::from_u4(at, 0));
      offset = Ops::mul(factor, Ops::from_u4(at, 4));
    } else {
      scale = Ops::mul(d, Ops::from_u8(at));
      offset = Ops::mul(factor, Ops::from_u8(at + kBlockRows * kGroups));
    }
  }
};

// Adds the groups of one unit, number `u` of its super-block, to M outputs; `x` is the first of
// them.
template <Coding C, int M, int N>
EXO_INLINE void add_super_unit(const Matrix& w, const uint8_t* p, const SuperScales<C>& scales,
                               int u, const GroupParts<N>& x, Ops::Float* y) {
  constexpr int kGroups = SuperScales<C>::kGroupsInUnit, kSlabs = 8 / kGroups;
  constexpr int kSums = sums_of_few(M) / kGroups > 1 ? sums_of_few(M) / kGroups : 1;
  SlabSums<weight_bits<C>(), M, kSums, kSlabs> sums[N][kGroups];
  prefetch<M, C.bits>(p);
  decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
    for (int n = 0; n < N; n++) {
      sums[n][slab / kSlabs].add(slab % kSlabs, weights, x.part[n].values + 4 * slab, w.cols);
    }
  });
  Ops::Float scale[kGroups], offset[kGroups];
  for (int g = 0; g < kGroups; g++) scales.of(u * kGroups + g, scale[g], offset[g]);
  for (int n = 0; n < N; n++) {
    for (int g = 0; g < kGroups; g++) {
      sums[n][g].finish_group(x.part[n].from(g), w.groups(), scale[g], offset[g], y);
    }
  }
}

template <Coding C, int M>
__attribute__((noinline)) void add_fine_apart(const Matrix& w, const uint8_t* p,
                                              const SuperScales<C>& scales, int u,
                                              const QuantizedRows& x, int64_t index,
                                              Ops::Float* y) {
  for (const QuantizedPart* part : {&x.coarse, &x.fine}) {
    add_super_unit<C, M>(w, p, scales, u, GroupParts<1>{{part->from(index, w.group)}}, y);
  }
}
template <Coding C, int M>
EXO_INLINE void add_fine_unit(const Matrix& w, const uint8_t* p, const SuperScales<C>& scales,
                              int u, const QuantizedRows& x, int64_t index, Ops::Float* y) {
  if constexpr (M == 1) {
    const GroupParts<2> both{{x.coarse.from(index, w.group), x.fine.from(index, w.group)}};
    add_super_unit<C, M>(w, p, scales, u, both, y);
  } else {
    add_fine_apart<C, M>(w, p, scales, u, x, index, y);
  }
}

template <Coding C, int M>
void super_block_from_packed(const Matrix& w, const QuantizedRows& x, const uint8_t* any_fine,
                             int64_t row, int64_t block, float* out, int64_t stride) {
  using Scales = SuperScales<C>;
  constexpr int kGroups = Scales::kGroupsInUnit;
  const uint8_t* p = w.block(block);
  const int64_t supers = w.cols / kSuperCols;
  PartSums<M> sums(w.parts, supers);
  int64_t index = row * w.groups();
  for (int64_t s = 0; s < supers; s++, sums.next()) {
    prefetch<M, kSuperHeader / 64>(p);
    const Scales scales(p);
    p += kSuperHeader;
    for (int u = 0; u < kSuperCols / kUnitCols; u++, p += 64 * C.bits) {
      if (any_fine[0] | any_fine[kGroups - 1]) {
        add_fine_unit<C, M>(w, p, scales, u, x, index, sums.now());
      } else {
        const GroupParts<1> coarse{{x.coarse.from(index, w.group)}};
        add_super_unit<C, M>(w, p, scales, u, coarse, sums.now());
      }
      any_fine += kGroups;
      index += kGroups;
    }
  }
  for (int m = 0; m < M; m++) finish(w, block, sums.total(m), out + (row + m) * stride);
}

template <Coding C>
void decode_super_block(const Matrix& w, int64_t block, const Panel& panel) {
  using Scales = SuperScales<C>;
  const uint8_t* p = w.block(block);
  uint8_t* slabs = panel.slabs;
  float* out = panel.scales;
  for (int64_t s = 0; s < w.cols / kSuperCols; s++) {
    const Scales scales(p);
    for (int g = 0; g < Scales::kGroups; g++, out += 2 * kBlockRows) {
      Ops::Float scale, offset;
      scales.of(g, scale, offset);
      Ops::store(out, scale);
      Ops::store(out + kBlockRows, offset);
    }
    p += kSuperHeader;
    for (int u = 0; u < kSuperCols / kUnitCols; u++, p += 64 * C.bits, slabs += 512) {
      decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
        Ops::store_bytes(slabs + 64 * slab, weights);
      });
    }
  }
}

}  // namespace exo::EXO_ISA

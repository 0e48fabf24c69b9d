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

// Adds the groups of one unit, number `u` of super-block `s`, to M outputs.
template <Coding C, int M, bool FINE>
EXO_INLINE void add_super_unit(const Matrix& w, const uint8_t* p, const SuperScales<C>& scales,
                               int u, const QuantizedRows& x, int64_t row, int64_t s,
                               Ops::Float* y) {
  using Scales = SuperScales<C>;
  constexpr int kParts = Scales::kGroupsInUnit, kSlabs = 8 / kParts;
  constexpr int kSums = sums_of_few(M) / kParts > 1 ? sums_of_few(M) / kParts : 1;
  SlabSums<weight_bits<C>(), M, kSums, kSlabs> coarse[kParts], fine[kParts];
  const int64_t value = row * w.cols + s * kSuperCols + u * kUnitCols;
  prefetch<M, C.bits>(p);
  for_passes<weight_bits<C>()>([&](auto pass) __attribute__((always_inline)) {
    decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
      const int part = slab / kSlabs, i = slab % kSlabs;
      const int64_t four = value + 4 * slab;
      coarse[part].template add<pass>(i, weights, x.coarse.values + four, w.cols);
      if constexpr (FINE) fine[part].template add<pass>(i, weights, x.fine.values + four, w.cols);
    });
  });
  const int64_t groups = w.groups();
  for (int part = 0; part < kParts; part++) {
    const int group = u * kParts + part;
    const int64_t at = row * groups + s * Scales::kGroups + group;
    Ops::Float scale, offset;
    scales.of(group, scale, offset);
    const auto finish = [&](const auto& sums,
                            const QuantizedPart& of) __attribute__((always_inline)) {
      sums.finish_group(of.scales + at, of.sums + at, groups, scale, offset, y);
    };
    finish(coarse[part], x.coarse);
    if constexpr (FINE) finish(fine[part], x.fine);
  }
}

template <Coding C, int M>
void super_block_from_packed(const Matrix& w, const QuantizedRows& x, const uint8_t* any_fine,
                             int64_t row, int64_t block, float* out, int64_t stride) {
  using Scales = SuperScales<C>;
  constexpr int kParts = Scales::kGroupsInUnit;
  const uint8_t* p = w.block(block);
  const int64_t supers = w.cols / kSuperCols;
  PartSums<M> sums(w.parts, supers);
  for (int64_t s = 0; s < supers; s++, sums.next()) {
    prefetch<M, kSuperHeader / 64>(p);
    const Scales scales(p);
    p += kSuperHeader;
    for (int u = 0; u < kSuperCols / kUnitCols; u++, p += 64 * C.bits, any_fine += kParts) {
      if (any_fine[0] | any_fine[kParts - 1]) {
        add_super_unit<C, M, true>(w, p, scales, u, x, row, s, sums.now());
      } else {
        add_super_unit<C, M, false>(w, p, scales, u, x, row, s, sums.now());
      }
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

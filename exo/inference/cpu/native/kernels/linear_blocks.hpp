// One block of y = W x for affine weights and int8 activations: integer products, one float step
// per group.
//
// For each group g of columns, in order, and every output n:
//   y[n] = fma(scale[n][g] * x_scale[g], sum of q[n][k] * xq[k], y[n])
//   y[n] = fma(offset[n][g], x_sum[g], y[n])
// and, where the group is fine in some row of the tile, the same again from what is left over; in a
// row where it is not fine, scale and sum are 0 there, which changes nothing.
// `Ops` brings the instruction set: 16 outputs at a time, see ops_portable.hpp for what it must
// have.
#pragma once

#include "vector.hpp"

namespace exo::EXO_ISA {

// Calls use(slab, Bytes) for the 8 slabs of a unit (matrix.hpp).
template <Coding C, typename Use>
EXO_INLINE void decode_unit(const uint8_t* unit, const Use& use) {
  using Bytes = Ops::Bytes;
  constexpr int BITS = C.bits;
  if constexpr (BITS == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) use(i, Ops::load(unit + 64 * i));
  } else if constexpr (BITS >= 4) {
    Bytes high = Ops::load(unit + (BITS == 4 ? 0 : 256));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const Bytes line = Ops::load(unit + 64 * i);
      Bytes even = Ops::and_mask(line, 15);
      Bytes odd = Ops::and_mask(Ops::shift_right(line, 4), 15);
      if constexpr (BITS == 5) {
        even = Ops::or_left(even, Ops::and_mask(Ops::shift_right(high, 2 * i), 1), 4);
        odd = Ops::or_left(odd, Ops::and_mask(Ops::shift_right(high, 2 * i + 1), 1), 4);
      }
      if constexpr (BITS == 6) {
        if (i == 2) high = Ops::load(unit + 256 + 64);
        even = Ops::or_left(even, Ops::and_mask(Ops::shift_right(high, 4 * (i % 2)), 3), 4);
        odd = Ops::or_left(odd, Ops::and_mask(Ops::shift_right(high, 4 * (i % 2) + 2), 3), 4);
      }
      if constexpr (C.table != Table::kNone) {
        even = Ops::entries(values_of(C.table), even);
        odd = Ops::entries(values_of(C.table), odd);
      }
      use(2 * i, even);
      use(2 * i + 1, odd);
    }
  } else {
    const Bytes high = Ops::load(unit + (BITS == 2 ? 0 : 128));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const Bytes line = Ops::load(unit + 64 * (i / 4));
      Bytes slab = Ops::and_mask(Ops::shift_right(line, 2 * (i % 4)), 3);
      if constexpr (BITS == 3) {
        slab = Ops::or_left(slab, Ops::and_mask(Ops::shift_right(high, i), 1), 2);
      }
      use(i, slab);
    }
  }
}

EXO_INLINE Ops::Float load_scales(const uint8_t* p, DType dtype, int half) {
  if (dtype == DType::kFloat16)
    return Ops::from_f16(reinterpret_cast<const uint16_t*>(p) + 16 * half);
  if (dtype == DType::kBFloat16)
    return Ops::from_bf16(reinterpret_cast<const uint16_t*>(p) + 16 * half);
  return Ops::from_f32(reinterpret_cast<const float*>(p) + 16 * half);
}

// Adds the bias and writes the outputs of a block that exist.
EXO_INLINE void finish(const Matrix& w, int64_t block, Ops::Float y, float* row) {
  alignas(64) float lanes[kBlockRows];
  if (!w.bias.empty()) y = Ops::add(y, Ops::from_f32(w.bias.data() + block * kBlockRows));
  const int64_t left = w.rows - block * kBlockRows;
  if (left >= kBlockRows) return Ops::store(row + block * kBlockRows, y);
  Ops::store(lanes, y);
  std::memcpy(row + block * kBlockRows, lanes, static_cast<size_t>(left) * 4);
}

// Fetches lines ahead in the stream of weights, for the next rows or, where `kWeightsPassBy`, past
// the shared cache.
template <int M, int LINES>
EXO_INLINE void prefetch(const uint8_t* p) {
#pragma GCC unroll 8
  for (int line = 0; line < LINES; line++) {
    if (M <= 2 && kWeightsPassBy) {
      __builtin_prefetch(p + 4096 + 64 * line, 0, 0);
    } else {
      __builtin_prefetch(p + 2048 + 64 * line);
    }
  }
}

// any[g]: whether group g is fine in one of a tile's rows.
inline void find_fine_groups(const QuantizedRows& x, int64_t row, int64_t rows, uint8_t* any) {
  const int64_t groups = x.cols / x.group;
  std::memcpy(any, x.is_fine + row * groups, static_cast<size_t>(groups));
  for (int64_t m = row + 1; m < row + rows; m++) {
    for (int64_t g = 0; g < groups; g++) any[g] = any[g] | x.is_fine[m * groups + g];
  }
}

// The float steps of one group for M outputs, from `S` integer sums each.
template <int M, int S>
EXO_INLINE void add_sums(const QuantizedPart& x, int64_t at, int64_t groups, Ops::Float scale,
                         Ops::Float offset, Ops::Int (*sum)[S], Ops::Float* y) {
  for (int m = 0; m < M; m++) {
    Ops::Int total = sum[m][0];
    for (int s = 1; s < S; s++) total = Ops::add_int(total, sum[m][s]);
    y[m] = Ops::add_group(y[m], scale, x.scales[at + m * groups], total, offset,
                          x.sums[at + m * groups]);
  }
}

// Into how many bits the weights of a coding fit, as the dot products of this instruction set tell
// them apart.
template <Coding C>
constexpr int weight_bits() {
  const bool wide = C.table == Table::kIq4 || C.table == Table::kIq3 || C.table == Table::kIq2;
  if (C.bits == 8 || wide || Ops::kWeightBits == 8) return 8;
  return C.bits == 6 ? 6 : 5;
}

// The dot products of four slabs, as one where an instruction set gains by that.
template <int BITS, typename O = Ops>
EXO_INLINE typename O::Int dot_four(typename O::Int sum, const typename O::Bytes* weights,
                                    const int8_t* sixteen) {
  if constexpr (requires { O::template dot_four<BITS>(sum, weights, sixteen); }) {
    return O::template dot_four<BITS>(sum, weights, sixteen);
  } else {
    for (int i = 0; i < 4; i++) {
      sum = O::template dot<BITS>(sum, weights[i], sixteen + 4 * i);
    }
    return sum;
  }
}

// Adds one group to M outputs, from the packed weights at `p`.
template <Coding C, int M, bool FINE>
EXO_INLINE void add_packed_group(const Matrix& w, const uint8_t* p, const QuantizedRows& x,
                                 int64_t row, int64_t g, Ops::Float* y) {
  // The latency of a dot product is hidden by several sums a row when there are few rows.
  constexpr int kSums = M == 1 ? 4 : M <= 3 ? 2 : 1;
  const int64_t value = row * w.cols + g * w.group;
  const int8_t* coarse = x.coarse.values + value;
  const int8_t* fine = x.fine.values + value;
  Ops::Int sum[M][kSums], fine_sum[M][kSums];
  for (int m = 0; m < M; m++) {
    for (int s = 0; s < kSums; s++) sum[m][s] = fine_sum[m][s] = Ops::zero_int();
  }
  for (int u = 0; u < w.group / kUnitCols; u++, p += 64 * C.bits) {
    prefetch<M, C.bits>(p);
    if constexpr (M > 1 && !FINE && weight_bits<C>() < 8) {
      Ops::Bytes slabs[8];
      decode_unit<C>(p, [&](int slab, Ops::Bytes weights)
                            __attribute__((always_inline)) { slabs[slab] = weights; });
      for (int m = 0; m < M; m++) {
        const int8_t* columns = coarse + m * w.cols + u * kUnitCols;
        sum[m][0] = dot_four<weight_bits<C>()>(sum[m][0], slabs, columns);
        sum[m][0] = dot_four<weight_bits<C>()>(sum[m][0], slabs + 4, columns + 16);
      }
      continue;
    }
    decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
      for (int m = 0; m < M; m++) {
        const int64_t at = m * w.cols + u * kUnitCols + 4 * slab;
        Ops::Int& s = sum[m][slab % kSums];
        s = Ops::dot<weight_bits<C>()>(s, weights, coarse + at);
        if constexpr (FINE) {
          Ops::Int& f = fine_sum[m][slab % kSums];
          f = Ops::dot<weight_bits<C>()>(f, weights, fine + at);
        }
      }
    });
  }
  prefetch<M, 1>(p);
  const Ops::Float scale = load_scales(p, w.dtype, 0), offset = load_scales(p, w.dtype, 1);
  const int64_t groups = w.groups(), at = row * groups + g;
  add_sums<M, kSums>(x.coarse, at, groups, scale, offset, sum, y);
  if constexpr (FINE) add_sums<M, kSums>(x.fine, at, groups, scale, offset, fine_sum, y);
}

// One block for M rows, straight from the packed weights.
template <Coding C, int M>
void block_from_packed(const Matrix& w, const QuantizedRows& x, const uint8_t* any_fine,
                       int64_t row, int64_t block, float* out, int64_t stride) {
  const uint8_t* p = w.block(block);
  const int64_t group_bytes = w.group_bytes();
  Ops::Float y[M];
  for (int m = 0; m < M; m++) y[m] = Ops::zero_float();
  for (int64_t g = 0; g < w.groups(); g++, p += group_bytes) {
    if (any_fine[g]) {
      add_packed_group<C, M, true>(w, p, x, row, g, y);
    } else {
      add_packed_group<C, M, false>(w, p, x, row, g, y);
    }
  }
  for (int m = 0; m < M; m++) finish(w, block, y[m], out + (row + m) * stride);
}

// A block decoded once for many rows: slabs as bytes, scales and offsets as floats.
struct Panel {
  uint8_t* slabs;  // [cols / 4][64]
  float* scales;   // [groups][2][16]
};

template <Coding C>
void decode_block(const Matrix& w, int64_t block, const Panel& panel) {
  const uint8_t* p = w.block(block);
  uint8_t* slabs = panel.slabs;
  for (int64_t g = 0; g < w.groups(); g++) {
    for (int u = 0; u < w.group / kUnitCols; u++, p += 64 * C.bits, slabs += 512) {
      decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
        Ops::store_bytes(slabs + 64 * slab, weights);
      });
    }
    Ops::store(panel.scales + 32 * g, load_scales(p, w.dtype, 0));
    Ops::store(panel.scales + 32 * g + 16, load_scales(p, w.dtype, 1));
    p += 2 * kBlockRows * size_of(w.dtype);
  }
}

template <int BITS, int M>
EXO_INLINE void add_panel_group(const Matrix& w, const Panel& panel, const QuantizedPart& x,
                                int64_t row, int64_t g, Ops::Float* y) {
  const int8_t* a = x.values + row * w.cols + g * w.group;
  const uint8_t* slabs = panel.slabs + g * w.group * kBlockRows;
  constexpr int kCols = 16;  // the smallest group
  Ops::Int sum[M][1];
  for (int m = 0; m < M; m++) sum[m][0] = Ops::zero_int();
  for (int k = 0; k < w.group; k += kCols, slabs += kCols * kBlockRows, a += kCols) {
    Ops::Bytes weights[kCols / 4];
#pragma GCC unroll 4
    for (int i = 0; i < kCols / 4; i++) weights[i] = Ops::load(slabs + 64 * i);
    for (int m = 0; m < M; m++) {
      sum[m][0] = dot_four<BITS>(sum[m][0], weights, a + m * w.cols);
    }
  }
  const Ops::Float scale = Ops::from_f32(panel.scales + 32 * g);
  const Ops::Float offset = Ops::from_f32(panel.scales + 32 * g + 16);
  const int64_t groups = w.groups();
  add_sums<M, 1>(x, row * groups + g, groups, scale, offset, sum, y);
}

template <int BITS, int M>
void block_from_panel(const Matrix& w, const Panel& panel, const QuantizedRows& x,
                      const uint8_t* any_fine, int64_t row, int64_t block, float* out,
                      int64_t stride) {
  Ops::Float y[M];
  for (int m = 0; m < M; m++) y[m] = Ops::zero_float();
  for (int64_t g = 0; g < w.groups(); g++) {
    add_panel_group<BITS, M>(w, panel, x.coarse, row, g, y);
    if (any_fine[g]) add_panel_group<BITS, M>(w, panel, x.fine, row, g, y);
  }
  for (int m = 0; m < M; m++) finish(w, block, y[m], out + (row + m) * stride);
}

}  // namespace exo::EXO_ISA

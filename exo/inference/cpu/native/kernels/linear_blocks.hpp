// One block of y = W x for affine weights and int8 activations: integer products, one float step
// per group.
//
// For each group g of a part of the columns (matrix.hpp), in order, and every output n:
//   y[n] = fma(scale[n][g] * x_scale[g], sum of q[n][k] * xq[k], y[n])
//   y[n] = fma(offset[n][g], x_sum[g], y[n])
// and, where the group is fine in some row of the tile, the same again from what is left over,
// after all groups of its unit; in a row where it is not fine, scale and sum are 0 there, which
// changes nothing.
//
// `Ops` brings the instruction set: 16 outputs at a time, see ops_portable.hpp for what it must
// have.
#pragma once

#include <type_traits>

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

// Offsets of the group whose scales are at `p`.
EXO_INLINE Ops::Float load_offsets(const Matrix& w, const uint8_t* p, Ops::Float scale) {
  if (w.zero == 0) return load_scales(p, w.dtype, 1);
  return Ops::mul(scale, Ops::from_one(-static_cast<float>(w.zero)));
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

// The sum of a row's parts (matrix.hpp).
template <typename Part>
EXO_INLINE Ops::Float joined(int parts, const Part& part) {
  const auto pair = [&](int i) { return Ops::add(part(i), part(i + 1)); };
  if (parts == 1) return part(0);
  if (parts == 2) return pair(0);
  if (parts == 4) return Ops::add(pair(0), pair(2));
  return Ops::add(Ops::add(pair(0), pair(2)), Ops::add(pair(4), pair(6)));
}

// The sums of M rows over each part of the columns.
template <int M>
class PartSums {
 public:
  // `steps`: groups, super-blocks or other equal pieces that all parts consist of.
  EXO_INLINE PartSums(int parts, int64_t steps)
      : parts_(parts), steps_(steps / parts), left_(steps_), now_(part_[0]) {
    for (int i = 0; i < parts; i++) {
      for (int m = 0; m < M; m++) part_[i][m] = Ops::zero_float();
    }
  }

  // Where the piece at hand is added: [M].
  EXO_INLINE Ops::Float* now() { return now_; }

  // To the next piece. Without a branch: parts are short, and one that is not foreseen costs more
  // than all that is done here.
  EXO_INLINE void next() {
    const int64_t ends = -static_cast<int64_t>(--left_ == 0);
    left_ += steps_ & ends;
    now_ += M & ends;
  }

  // The same where y held what was added.
  EXO_INLINE void close(Ops::Float* y) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      now_[m] = y[m];
      y[m] = Ops::zero_float();
    }
    next();
  }

  // Row m's whole sum.
  EXO_INLINE Ops::Float total(int m) const {
    return joined(parts_, [&](int i) { return part_[i][m]; });
  }

 private:
  Ops::Float part_[kMostParts][M];
  int parts_;
  int64_t steps_, left_;
  Ops::Float* now_;
};

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
  const int64_t groups = x.cols / x.flag_cols();
  std::memcpy(any, x.is_fine + row * groups, static_cast<size_t>(groups));
  for (int64_t m = row + 1; m < row + rows; m++) {
    for (int64_t g = 0; g < groups; g++) any[g] = any[g] | x.is_fine[m * groups + g];
  }
}

// Into how many bits the weights of a coding fit, as the dot products of this instruction set tell
// them apart.
template <Coding C>
constexpr int weight_bits() {
  if (C.bits == 8 || C.table == Table::kIq4 || Ops::kWeightBits == 8) return 8;
  if (C.table == Table::kIq3 || C.table == Table::kIq2) return 7;
  if (C.bits == 6) return 6;
  return C.bits <= 4 && C.table == Table::kNone ? 4 : 5;
}

// Whether dot products of 8 bits take 128 from each weight.
template <typename O = Ops>
constexpr bool slabs_less_128() {
  return requires { O::add_to_all; };
}

// Of how many slabs an instruction set adds products before they are widened; 1: it has no such
// sums.
template <int BITS, typename O = Ops>
constexpr int slabs_at_once() {
  if constexpr (requires { O::slabs_in_16_bits(BITS); }) {
    return O::slabs_in_16_bits(BITS);
  } else {
    return 1;
  }
}

// The latency of a dot product is hidden by several sums a row where there are few rows.
constexpr int sums_of_few(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// Integer sums of M rows and B blocks over SLABS slabs, which come one after the other. Where
// products are not added in 16 bits, S sums a row hide the latency of a dot product.
template <int BITS, int M, int S, int SLABS, int B = 1, typename O = Ops>
struct SlabSums {
  static constexpr int kMost = slabs_at_once<BITS>(), kFew = kMost < SLABS ? kMost : SLABS;

  typename O::Int total[B][M][S], few[B][M];

  EXO_INLINE SlabSums() {
    for (auto& block : total) {
      for (auto& row : block) {
        for (auto& sum : row) sum = O::zero_int();
      }
    }
  }

  // Slab `i` of each block; row m has its four columns at four + m * stride.
  EXO_INLINE void add(int i, const typename O::Bytes (&weights)[B], const int8_t* four,
                      int64_t stride) {
    for (int m = 0; m < M; m++, four += stride) {
      for (int b = 0; b < B; b++) {
        if constexpr (kFew > 1) {
          few[b][m] = i % kFew == 0 ? O::template products<BITS>(weights[b], four)
                                    : O::template add_products<BITS>(few[b][m], weights[b], four);
          if (i % kFew == kFew - 1) total[b][m][0] = O::add_few(total[b][m][0], few[b][m]);
        } else {
          total[b][m][i % S] = O::template dot<BITS>(total[b][m][i % S], weights[b], four);
        }
      }
    }
  }

  // The float steps of a group of block `b`, the first one of `x`.
  EXO_INLINE void finish_group(int b, QuantizedPart x, int64_t groups, typename O::Float scale,
                               typename O::Float offset, typename O::Float* y) const {
    for (int m = 0; m < M; m++, x = x.from(groups)) {
      typename O::Int sum = total[b][m][0];
      for (int s = 1; s < S && kFew == 1; s++) sum = O::add_int(sum, total[b][m][s]);
      if constexpr (BITS == 8 && slabs_less_128<O>()) {
        sum = O::add_to_all(sum, 128 * x.groups->total);
      }
      y[m] = O::add_group(y[m], scale, x.groups->scale, sum, offset, x.groups->sum);
    }
  }
};

// The first row's group of the activations' N parts that are added. No std::array: its functions
// are not in this namespace (vector.hpp).
template <int N>
struct GroupParts {
  QuantizedPart part[N];
  int64_t stride;  // of values
};

// Adds one group to M outputs, from the packed weights at `p`.
template <Coding C, int M, int N>
EXO_INLINE void add_packed_group(const Matrix& w, const uint8_t* p, const uint8_t* scales,
                                 const GroupParts<N>& x, Ops::Float* y) {
  SlabSums<weight_bits<C>(), M, sums_of_few(M), 8> sums[N];
  int64_t at = 0;
  for (int u = 0; u < w.group / kUnitCols; u++, p += 64 * C.bits, at += kUnitCols) {
    prefetch<M, C.bits>(p);
    decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
      for (int n = 0; n < N; n++) {
        sums[n].add(slab, {weights}, x.part[n].values + at + 4 * slab, x.stride);
      }
    });
  }
  prefetch<M, 1>(p);
  const Ops::Float scale = load_scales(scales, w.dtype, 0);
  const Ops::Float offset = load_offsets(w, scales, scale);
  for (int n = 0; n < N; n++) sums[n].finish_group(0, x.part[n], w.groups(), scale, offset, y);
}

// Groups that have a fine part: those of several rows are apart from the loop over the others,
// which they would slow.
template <Coding C, int M>
__attribute__((noinline)) void add_fine_apart(const Matrix& w, const uint8_t* p,
                                              const uint8_t* scales, const GroupParts<2>& x,
                                              Ops::Float* y) {
  for (const QuantizedPart& part : x.part) {
    add_packed_group<C, M>(w, p, scales, GroupParts<1>{{part}, x.stride}, y);
  }
}
template <Coding C, int M>
EXO_INLINE void add_fine_group(const Matrix& w, const uint8_t* p, const uint8_t* scales,
                               const GroupParts<2>& x, Ops::Float* y) {
  if constexpr (M == 1) {
    add_packed_group<C, M>(w, p, scales, x, y);
  } else {
    add_fine_apart<C, M>(w, p, scales, x, y);
  }
}

// One block for M rows, straight from the packed weights.
template <Coding C, int M>
void block_from_packed(const Matrix& w, const QuantizedRows& x, const uint8_t* any_fine,
                       int64_t row, int64_t block, float* out, int64_t stride) {
  // From a group to the next one, and to its scales: in turns, as the scales of two groups may
  // come after both.
  int64_t step = w.group_at(1), to_scales = w.scales_at(0);
  const int64_t both_steps = w.group_at(2);
  const int64_t both_to_scales = to_scales + w.scales_at(1) - w.group_at(1);
  const uint8_t* p = w.block(block);
  PartSums<M> sums(w.parts, w.groups());
  const QuantizedPart coarse = x.from_row(x.coarse, row), fine = x.from_row(x.fine, row);
  for (int64_t g = 0; g < w.groups(); g++, sums.next()) {
    const QuantizedPart part = coarse.from(g, w.group);
    const uint8_t* scales = p + to_scales;
    if (any_fine[g]) {
      add_fine_group<C, M>(w, p, scales, {{part, fine.from(g, w.group)}, x.stride}, sums.now());
    } else {
      add_packed_group<C, M>(w, p, scales, GroupParts<1>{{part}, x.stride}, sums.now());
    }
    p += step;
    step = both_steps - step, to_scales = both_to_scales - to_scales;
  }
  for (int m = 0; m < M; m++) finish(w, block, sums.total(m), out + (row + m) * stride);
}

// A block decoded once for many rows: slabs as bytes, scales and offsets as floats.
struct Panel {
  uint8_t* slabs;  // [cols / 4][64]
  float* scales;   // [groups][2][16]; of super-blocks see SuperScales
  int64_t apart;   // bytes to the next block's

  template <typename T>
  EXO_INLINE T* of(int b, T* p) const {
    return p + b * (apart / static_cast<int64_t>(sizeof(T)));
  }
};

template <Coding C>
void decode_block(const Matrix& w, int64_t block, const Panel& panel) {
  const uint8_t* start = w.block(block);
  uint8_t* slabs = panel.slabs;
  for (int64_t g = 0; g < w.groups(); g++) {
    const uint8_t* p = start + w.group_at(g);
    for (int u = 0; u < w.group / kUnitCols; u++, p += 64 * C.bits, slabs += 512) {
      decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
        Ops::store_bytes(slabs + 64 * slab, weights);
      });
    }
    const uint8_t* scales = start + w.scales_at(g);
    const Ops::Float scale = load_scales(scales, w.dtype, 0);
    Ops::store(panel.scales + 32 * g, scale);
    Ops::store(panel.scales + 32 * g + 16, load_offsets(w, scales, scale));
  }
}

// Calls add(g, part) for what a tile of rows adds up of groups [begin, end), in order: the coarse
// part of the groups of a unit (or of one that is longer), then the fine part of those that have
// one.
template <typename Add>
EXO_INLINE void for_steps(const QuantizedRows& x, const uint8_t* any_fine, int64_t begin,
                          int64_t end, const Add& add) {
  const int64_t together = x.group < kUnitCols ? kUnitCols / x.group : 1;
  for (int64_t first = begin; first < end; first += together) {
    for (int64_t g = first; g < first + together; g++) add(g, x.coarse);
    for (int64_t g = first; g < first + together; g++) {
      if (any_fine[g]) add(g, x.fine);
    }
  }
}

// What a tile of rows adds up, the parts of its sums one after the other. A list, so that all
// blocks meet the same few branches in the same order.
struct PanelStep {
  QuantizedPart x;  // the first row's group; the next one's comes a row later
  int64_t group;
};
struct PanelSteps {
  PanelStep* steps;
  int64_t stride;  // of values
  int64_t ends[kMostParts];
};
__attribute__((noinline)) inline void list_steps(const Matrix& w, const QuantizedRows& x,
                                                 int64_t row, const uint8_t* any_fine,
                                                 PanelSteps& out) {
  const int64_t in_part = w.groups() / w.parts;
  PanelStep* step = out.steps;
  for (int64_t part = 0; part < w.parts; part++) {
    for_steps(x, any_fine, part * in_part, (part + 1) * in_part,
              [&](int64_t g, const QuantizedPart& of) {
                *step++ = {x.from_row(of, row).from(g, w.group), g};
              });
    out.ends[part] = step - out.steps;
  }
}

template <int BITS, int M, int SLABS, int B>
EXO_INLINE void add_panel_group(const Matrix& w, const Panel& panel, const PanelStep& step,
                                int64_t stride, Ops::Float* y) {
  const int8_t* a = step.x.values;
  const uint8_t* slabs = panel.slabs + step.group * w.group * kBlockRows;
  SlabSums<BITS, M, 1, SLABS, B> sums;
  for (int k = 0; k < w.group; k += 4 * SLABS, slabs += 64 * SLABS, a += 4 * SLABS) {
#pragma GCC unroll 8
    for (int i = 0; i < SLABS; i++) {
      Ops::Bytes weights[B];
      for (int b = 0; b < B; b++) weights[b] = Ops::load(panel.of(b, slabs) + 64 * i);
      sums.add(i, weights, a + 4 * i, stride);
    }
  }
  for (int b = 0; b < B; b++) {
    const float* scales = panel.of(b, panel.scales) + 32 * step.group;
    const Ops::Float scale = Ops::from_f32(scales), offset = Ops::from_f32(scales + 16);
    sums.finish_group(b, step.x, w.groups(), scale, offset, y + b * M);
  }
}

template <int BITS, int M, int SLABS, int B>
EXO_INLINE void add_panel(const Matrix& w, const Panel& panel, const PanelSteps& todo,
                          PartSums<B * M>& sums) {
  const PanelStep* step = todo.steps;
  for (int part = 0; part < w.parts; part++) {
    Ops::Float y[B * M];
    for (auto& sum : y) sum = Ops::zero_float();
    for (const PanelStep* end = todo.steps + todo.ends[part]; step < end; step++) {
      add_panel_group<BITS, M, SLABS, B>(w, panel, *step, todo.stride, y);
    }
    sums.close(y);
  }
}

// B blocks from `block` on for `rows` rows, up to kMaxRows. Rows past the last are computed from
// whatever the buffer holds and dropped: fewer sizes of tile to compile.
template <int BITS, int B>
void block_from_panel(const Matrix& w, const Panel& panel, const PanelSteps& todo, int64_t row,
                      int64_t rows, int64_t block, float* out, int64_t stride) {
  constexpr int M = Ops::kMaxRows;
  PartSums<B * M> sums(w.parts, w.parts);
  // Slabs of the smallest group, and what pays where groups are larger.
  constexpr int kSmallest = 4, kMost = SlabSums<BITS, M, 1, 8>::kMost;
  constexpr int kSlabs = B > 1 || kMost > kSmallest ? 8 : kSmallest;
  if (kSlabs > kSmallest && w.group % kUnitCols == 0) {
    add_panel<BITS, M, kSlabs, B>(w, panel, todo, sums);
  } else {
    add_panel<BITS, M, kSmallest, B>(w, panel, todo, sums);
  }
  for (int b = 0; b < B; b++) {
    for (int m = 0; m < rows; m++) {
      finish(w, block + b, sums.total(b * M + m), out + (row + m) * stride);
    }
  }
}

}  // namespace exo::EXO_ISA

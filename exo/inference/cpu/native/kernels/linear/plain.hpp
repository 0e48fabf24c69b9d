// One block of y = W x for affine weights and int8 activations: integer products, one float step
// per group.
//
// For each group g of a part of the columns (matrix.hpp), in order, and every output n:
//   y[n] = fma(scale[n][g] * x_scale[g], sum of q[n][k] * xq[k], y[n])
//   y[n] = fma(offset[n][g], x_sum[g], y[n])
// or, where values stand for q - zero and there are no offsets,
//   y[n] = fma(scale[n][g] * x_scale[g], sum of (q[n][k] - zero) * xq[k], y[n])
// What is left over of the part's fine groups is summed up in the same way by itself, and the two
// sums added: so the loop over all groups has no branches. A row's groups that are not fine add 0,
// which changes nothing.
#pragma once

#include "blocks.hpp"

namespace exo::EXO_ISA {

// Integer sums of M rows and B blocks over a group, whose slabs come one after the other. Where
// products are not added in 16 bits, S sums a row hide the latency of a dot product. Values stand
// for what is 2^ZERO less; ZERO < 0: there are offsets instead.
template <int BITS, int ZERO, int M, int S, int B = 1, typename O = Ops>
struct SlabSums {
  static constexpr int kFew = slabs_at_once<BITS>();
  static constexpr bool kBegins = ZERO >= 0 && begins_less<O>();
  // How often the activations' `less` is added to a sum.
  static constexpr int kTaken = BITS == 8 && slabs_less_128<O>() ? 128 : 0;
  static constexpr int kLess = (ZERO >= 0 ? 1 << ZERO : 0) - kTaken;

  typename O::Int total[B][M][S], few[B][M];

  // `rows`: what the activations' rows have for the group, RowsOfPart or RowsOfStep.
  template <typename Rows>
  EXO_INLINE void begin(const Rows& rows) {
    for (int m = 0; m < M; m++) {
      typename O::Int start = O::zero_int();
      if constexpr (kBegins) start = rows.template start<ZERO>(m);
      for (int b = 0; b < B; b++) {
        total[b][m][0] = start;
        for (int s = 1; s < S; s++) total[b][m][s] = O::zero_int();
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

  EXO_INLINE void stay_where_they_are() {
    for (int b = 0; b < B; b++) {
      for (int m = 0; m < M; m++) stay(total[b][m][0]);
    }
  }

  // The float steps of a group of block `b`.
  template <typename Rows>
  EXO_INLINE void finish_group(int b, const Rows& rows, typename O::Float scale,
                               typename O::Float offset, typename O::Float* y) const {
    for (int m = 0; m < M; m++) {
      typename O::Int sum = total[b][m][0];
      for (int s = 1; s < S && kFew == 1; s++) sum = O::add_int(sum, total[b][m][s]);
      if constexpr (!kBegins && kLess != 0) sum = O::add_to_all(sum, rows.template less<kLess>(m));
      if constexpr (ZERO >= 0) {
        y[m] = O::add_scaled(y[m], scale, rows.scale(m), sum);
      } else {
        y[m] = O::add_group(y[m], scale, rows.scale(m), sum, offset, rows.sum(m));
      }
    }
  }
};

// A group of the first row, the next one's coming `groups` later.
struct RowsOfPart {
  const QuantizedGroup* first;
  int64_t groups;

  EXO_INLINE float scale(int m) const { return first[m * groups].scale; }
  EXO_INLINE float sum(int m) const { return first[m * groups].sum; }
  template <int TIMES>
  EXO_INLINE int32_t less(int m) const {
    return TIMES * first[m * groups].less;
  }
  template <int ZERO, typename O = Ops>
  EXO_INLINE typename O::Int start(int m) const {
    return O::shifted_left(O::same_int(first[m * groups].less), ZERO);
  }
};

// The first row's group of the activations' N parts that are added; the next row's comes `groups`
// later. No std::array: its functions are not in this namespace (vector.hpp).
template <int N>
struct GroupParts {
  QuantizedPart part[N];
  int64_t groups, stride;  // stride: of values

  // The same of row `first` and those `distance` from one to the next.
  EXO_INLINE GroupParts of_rows(int first, int distance) const {
    GroupParts some{{}, groups * distance, stride * distance};
    for (int n = 0; n < N; n++) {
      some.part[n] = {part[n].values + first * stride, part[n].groups + first * groups, nullptr};
    }
    return some;
  }
};

// What all groups of a matrix have in common: read once, as stores might change what a reference
// leads to.
struct PlainShape {
  int64_t groups, in_part, apart;
  int units;  // of a group
  DType dtype;
  bool pass_by;

  EXO_INLINE explicit PlainShape(const Matrix& w)
      : groups(w.groups()),
        in_part(groups / w.parts),
        apart(w.block_bytes()),
        units(w.group / kUnitCols),
        dtype(w.dtype),
        pass_by(vendor.weights_pass_by) {}
};

// Adds one group to M outputs of each of B blocks, from the packed weights at `p`: what it is of
// the activations' first part to y, of the second to `left`. Two pointers, as gcc leaves sums in
// memory where an array of them leads to these.
template <Coding C, int ZERO, int M, int N, int B = 1>
EXO_INLINE void add_packed_group(const PlainShape& shape, const uint8_t* p, const uint8_t* scales,
                                 const GroupParts<N>& x, Ops::Float* y, Ops::Float* left) {
  SlabSums<weight_bits<C>(), ZERO, M, sums_of_few(M), B> sums[N];
  for (int n = 0; n < N; n++) sums[n].begin(RowsOfPart{x.part[n].groups, x.groups});
  int64_t at = 0;
  // All groups that have a zero are one unit. Where that is known, sums stay in registers.
  const int units = ZERO >= 0 ? 1 : shape.units;
  for (int u = 0; u < units; u++, p += 64 * C.bits, at += kUnitCols) {
    if constexpr (B == 1) prefetch<M, C.bits>(p, shape.pass_by);
    decode_units<C, B>(p, shape.apart,
                       [&](int slab, const Ops::Bytes(&weights)[B]) __attribute__((always_inline)) {
                         for (int n = 0; n < N; n++) {
                           sums[n].add(slab, weights, x.part[n].values + at + 4 * slab, x.stride);
                         }
                       });
    for (int n = 0; ZERO < 0 && M > 2 && n < N; n++) sums[n].stay_where_they_are();
  }
  if constexpr (B == 1) prefetch<M, 1>(p, shape.pass_by);
  // Or gcc 11, 13 and 14 unroll it too late, and have stored the sums at every step until then.
#pragma GCC unroll 2
  for (int b = 0; b < B; b++) {
    const uint8_t* own = scales + b * shape.apart;
    const Ops::Float scale = load_scales(own, shape.dtype, 0);
    Ops::Float offset = Ops::zero_float();
    if constexpr (ZERO < 0) offset = load_scales(own, shape.dtype, 1);
    for (int n = 0; n < N; n++) {
      const RowsOfPart rows{x.part[n].groups, x.groups};
      sums[n].finish_group(b, rows, scale, offset, (n == 0 ? y : left) + b * M);
    }
  }
}

// Adds what is left over of the fine groups of a tile of M rows to the sums of their parts.
template <Coding C, int ZERO, int M, int B>
__attribute__((noinline)) void add_fine_groups(const Matrix& w, const PlainShape& shape,
                                               const QuantizedRows& x, const FineGroup* fine,
                                               int64_t row, int64_t block, PartSums<B * M>& sums) {
  const uint8_t* start = w.block(block);
  const QuantizedPart left = x.from_row(x.fine, row);
  while (fine->index < shape.groups) {
    Ops::Float y[B * M];
    for (auto& sum : y) sum = Ops::zero_float();
    const int64_t part = fine->index / shape.in_part, end = (part + 1) * shape.in_part;
    for (; fine->index < end; fine++) {
      const int64_t g = fine->index;
      const uint8_t *p = start + w.group_at(g), *scales = start + w.scales_at(g);
      const GroupParts<1> own{{left.from(g, w.group)}, shape.groups, x.stride};
      with_fine_rows<M, B>(
          *fine, y,
          [&](auto some, int first, int distance, Ops::Float* of) __attribute__((always_inline)) {
            const GroupParts<1> rows = own.of_rows(first, distance);
            add_packed_group<C, ZERO, some.value, 1, B>(shape, p, scales, rows, of, nullptr);
          });
    }
    sums.join(part, y);
  }
}

// One block for `rows` rows, up to M, straight from the packed weights. Rows past the last are
// computed from whatever the buffer holds and dropped. Of a pair of blocks `ahead` says what is
// fetched, of one what comes next in memory is.
template <Coding C, int ZERO, int M, int B = 1>
void block_from_packed(const Matrix& w, const QuantizedRows& x, const FineGroup* fine, int64_t row,
                       int64_t rows, int64_t block, float* out, int64_t stride, Ahead ahead) {
  constexpr bool kOne = M * B == 1;  // whose weights are decoded once for both parts
  const PlainShape shape(w);
  // From a group to the next one, and to its scales: in turns, as the scales of two groups may
  // come after both.
  int64_t step = w.group_at(1), to_scales = w.scales_at(0);
  const int64_t both_steps = w.group_at(2);
  const int64_t both_to_scales = to_scales + w.scales_at(1) - w.group_at(1);
  const uint8_t* p = w.block(block);
  const int64_t columns = w.group;
  GroupParts<1> coarse{{x.from_row(x.coarse, row)}, shape.groups, x.stride};
  PartSums<B * M> sums(w.parts, w.parts);
  for (int64_t g = 0, part = 0; g < shape.groups; part++) {
    Ops::Float y[B * M], left = Ops::zero_float();
    for (auto& sum : y) sum = Ops::zero_float();
    for (const int64_t end = g + shape.in_part; g < end; g++) {
      const uint8_t* scales = p + to_scales;
      if constexpr (B > 1) ahead.fetch();
      if (kOne && g == fine->index) {
        const QuantizedPart own = x.from_row(x.fine, row).from(g, w.group);
        const GroupParts<2> both{{coarse.part[0], own}, shape.groups, x.stride};
        add_packed_group<C, ZERO, M>(shape, p, scales, both, y, &left);
        fine++;
      } else {
        add_packed_group<C, ZERO, M, 1, B>(shape, p, scales, coarse, y, nullptr);
      }
      coarse.part[0].values += columns;
      coarse.part[0].groups++;
      p += step;
      step = both_steps - step, to_scales = both_to_scales - to_scales;
    }
    sums.close(y);
    if constexpr (kOne) sums.join(part, &left);
  }
  if constexpr (!kOne) add_fine_groups<C, ZERO, M, B>(w, shape, x, fine, row, block, sums);
  for (int b = 0; b < B; b++) {
    for (int m = 0; m < rows; m++) {
      finish(w, block + b, sums.total(b * M + m), out + (row + m) * stride);
    }
  }
}

}  // namespace exo::EXO_ISA

// The same for super-blocks (matrix.hpp), whose groups have small integers for scales: so has a
// unit of activations (kernels.hpp), and all that a super-block adds up are integers.
//
// For each super-block, over its units u and their groups g, and for every output n:
//   total[n] = sum of code[n][g] * multiple[u] * (sum of q[n][k] * xq[k])
//   offset[n] = sum of offset code[n][g] * multiple[u] * (sum of xq[k])
// then, where offsets have codes of their own,
//   y[n] = fma(fma(factor[n], offset[n], d[n] * total[n]), x_scale, y[n])
// and elsewhere, the codes being the scales' and values standing for q - zero,
//   y[n] = fma(d[n] * x_scale, total[n] - zero * offset[n], y[n])
// The same again from what is left over of those units that are fine in some row of the tile.
#pragma once

#include "blocks.hpp"

namespace exo::EXO_ISA {

template <Coding C>
struct SuperTraits {
  static constexpr SuperForm kForm = super_form(C);
  static constexpr int kHalves = kUnitCols / kForm.group;  // groups in a unit
  static constexpr int kGroups = kSuperCols / kForm.group;
  static constexpr int kPairs = kGroups / 2;  // of offset codes
  static constexpr bool kHasFactor = kForm.kind != SuperKind::kCodes;
  // Dot products of 8 bits may take 128 from each weight, which is IQ4's zero.
  static constexpr bool kTakesZero = weight_bits<C>() == 8 && slabs_less_128();
  static constexpr int kZero = kHasFactor || kTakesZero ? 0 : kForm.zero;
  static_assert(!kTakesZero || kForm.zero == 128);
};

// What of a coding a panel does not say.
struct SuperOffsets {
  bool has_factor;
  int zero_shift;  // log2 of zero; -1: there is none
  constexpr bool are_any() const { return has_factor || zero_shift >= 0; }
};
template <Coding C>
constexpr SuperOffsets super_offsets() {
  constexpr int zero = SuperTraits<C>::kZero;
  static_assert((zero & (zero - 1)) == 0);
  int shift = -1;
  for (int left = zero; left > 0; left >>= 1) shift++;
  return {SuperTraits<C>::kHasFactor, shift};
}

// Where a unit's sums begin with what its values' zero takes from them, `finish_super` needs no
// more of it.
constexpr SuperOffsets left_to_finish(SuperOffsets offsets) {
  return {offsets.has_factor, begins_less() ? -1 : offsets.zero_shift};
}

// Whether an instruction set can multiply by few numbers without multiplying.
template <typename O = Ops>
constexpr bool multiplies_by_shifts() {
  return requires { O::times_few; };
}

// With what a sum over group `g` begins where values stand for what is 2^shift less.
template <int HALVES, typename O = Ops>
EXO_INLINE auto less_of(const QuantizedSuper& x, int g, int shift) {
  constexpr int kZero = HALVES == 1 ? QuantizedSuper::kUnitZero : QuantizedSuper::kHalfZero;
  const auto less = O::same_int(HALVES == 1 ? x.unit_less[g] : x.half_less[g]);
  return 1 << shift > kZero ? O::shifted_left(less, 1) : O::divided(less, kZero >> shift);
}

// Integer sums of M rows and B blocks over one unit, whose slabs come one after the other.
template <int BITS, int HALVES, int M, int B = 1, typename O = Ops>
struct UnitSums {
  static constexpr int kSlabs = 8 / HALVES;  // of a group
  static constexpr bool kAddsFew = requires { O::slabs_in_16_bits(BITS); };
  static constexpr int kMost = slabs_at_once<BITS>();
  static constexpr int kFew = kMost < kSlabs ? kMost : kSlabs;
  static constexpr int kPerGroup = sums_of_few(M) > HALVES ? sums_of_few(M) / HALVES : 1;
  static constexpr int kSums = kAddsFew ? 1 : kPerGroup * HALVES;

  typename O::Int sum[B][M][kSums], few[B][M];

  EXO_INLINE UnitSums() {
    for (auto& block : sum) {
      for (auto& row : block) {
        for (auto& some : row) some = O::zero_int();
      }
    }
  }

  // Begins unit `u` where values stand for what is 2^shift less; `x` is the first row's, the next
  // one's comes `next` later.
  EXO_INLINE void begin_less(const QuantizedSuper* x, int64_t next, int u, int shift) {
    if constexpr (begins_less<O>()) {
      for (int m = 0; m < M; m++, x += next) {
        for (int h = 0; h < HALVES; h++) {
          const auto start = less_of<HALVES, O>(*x, HALVES * u + h, shift);
          for (int b = 0; b < B; b++) sum[b][m][h * kPerGroup] = start;
        }
      }
    }
  }

  // Slab `i` of each block; row m has its four columns at four + m * stride.
  EXO_INLINE void add(int i, const typename O::Bytes (&weights)[B], const int8_t* four,
                      int64_t stride, const typename O::Int (&codes)[B][HALVES]) {
    for (int m = 0; m < M; m++, four += stride) {
      for (int b = 0; b < B; b++) {
        if constexpr (kAddsFew) {
          few[b][m] = i % kFew == 0 ? O::template products<BITS>(weights[b], four)
                                    : O::template add_products<BITS>(few[b][m], weights[b], four);
          const auto code = codes[b][i / kSlabs];
          if (i == kFew - 1) {
            sum[b][m][0] = O::few_times(few[b][m], code);
          } else if (i % kFew == kFew - 1) {
            sum[b][m][0] = O::add_few_times(sum[b][m][0], few[b][m], code);
          }
        } else {
          auto& into = sum[b][m][i / kSlabs * kPerGroup + i % kPerGroup];
          into = O::template dot<BITS>(into, weights[b], four);
        }
      }
    }
  }

  // Row m's total of block `b` with this unit in it; `by_shifts`: see `times_few`.
  template <bool BY_SHIFTS = false>
  EXO_INLINE typename O::Int added(int b, int m, typename O::Int total,
                                   const typename O::Int (&codes)[B][HALVES], int multiple) const {
    if constexpr (kAddsFew) {
      return O::add_multiple(total, sum[b][m][0], multiple);
    } else {
      typename O::Int group[HALVES];
      for (int h = 0; h < HALVES; h++) {
        group[h] = sum[b][m][h * kPerGroup];
        for (int s = 1; s < kPerGroup; s++) {
          group[h] = O::add_int(group[h], sum[b][m][h * kPerGroup + s]);
        }
      }
      if constexpr (HALVES == 2 && requires { O::product; }) {
        const auto first = O::product(group[0], codes[b][0]);
        const auto both = O::add_times(first, group[1], codes[b][1]);
        return O::add_times(total, both, O::same_int(multiple));
      }
      if constexpr (BY_SHIFTS) {
        const auto code = codes[b][0];
        return O::add_times(total, group[0], O::times_few(code, O::thrice(code), multiple));
      }
      for (int h = 0; h < HALVES; h++) {
        total = O::add_times(total, group[h], O::times(codes[b][h], multiple));
      }
      return total;
    }
  }
};

// Rows y with a super-block's integers in them; where it `begins` them they held nothing. `x` is
// the first row's, the next one's comes `next` later; 0: all are the same.
template <int HALVES, int M>
EXO_INLINE void finish_super(Ops::Float* y, const Ops::Int* total, const QuantizedSuper* x,
                             int64_t next, Ops::Float d, Ops::Float factor, const uint8_t* pairs,
                             SuperOffsets offsets, bool begins) {
  Ops::Int offset[M];
  for (auto& sum : offset) sum = Ops::zero_int();
  if (offsets.are_any()) {
#pragma GCC unroll 8
    for (int p = 0; p < 4 * HALVES; p++) {
      const Ops::Int pair = Ops::load_int(pairs + 64 * p);
      for (int m = 0; m < M; m++) {
        const QuantizedSuper& row = x[m * next];
        const int16_t* sums = HALVES == 1 ? row.unit_sums : row.half_sums;
        offset[m] = Ops::add_pairs(offset[m], pair, sums + 2 * p);
      }
    }
  }
  for (int m = 0; m < M; m++) {
    const float scale = x[m * next].scale;
    Ops::Int all = total[m];
    if (!offsets.has_factor && offsets.zero_shift >= 0) {
      all = Ops::less_shifted(all, offset[m], offsets.zero_shift);
    }
    const Ops::Float before = begins ? Ops::zero_float() : y[m];
    y[m] = offsets.has_factor ? Ops::add_both(before, d, all, factor, offset[m], scale)
                              : Ops::add_scaled(before, d, scale, all);
  }
}

// The header of one super-block for 16 outputs, as the kernels want it.
template <Coding C>
struct SuperHeader {
  using T = SuperTraits<C>;
  static constexpr SuperKind kKind = T::kForm.kind;
  const uint8_t *header, *codes;

  EXO_INLINE explicit SuperHeader(const uint8_t* p) : header(p), codes(p + T::kForm.codes_at()) {}

  EXO_INLINE Ops::Float d() const {
    const Ops::Float stored = Ops::from_f16(reinterpret_cast<const uint16_t*>(header));
    if constexpr (T::kForm.unit == 1.f) return stored;
    return Ops::mul(stored, Ops::from_one(T::kForm.unit));
  }
  EXO_INLINE Ops::Float factor() const {
    if constexpr (!T::kHasFactor) return Ops::zero_float();
    return Ops::from_f16(reinterpret_cast<const uint16_t*>(header) + kBlockRows);
  }
  EXO_INLINE Ops::Int code(int group) const {
    const uint8_t* at = codes + kBlockRows * group;
    if constexpr (kKind == SuperKind::kCodes) return Ops::codes_i8(at);
    if constexpr (kKind == SuperKind::kNibbles) return Ops::codes_u4(at, 0);
    return Ops::codes_u6(codes + SixBits::line(group), group % 4);
  }
  EXO_INLINE void store_pairs(uint8_t* pairs) const {
#pragma GCC unroll 8
    for (int p = 0; p < T::kPairs; p++) Ops::store_int(pairs + 64 * p, pair_of_offsets(p));
  }

  // The same of one output.
  EXO_INLINE int code_of(int group, int lane) const {
    if constexpr (kKind == SuperKind::kSixBits) return SixBits::scale(codes, lane, group);
    const uint8_t byte = codes[kBlockRows * group + lane];
    return kKind == SuperKind::kNibbles ? byte & 15 : static_cast<int8_t>(byte);
  }
  EXO_INLINE int min_of(int group, int lane) const {
    if constexpr (kKind == SuperKind::kSixBits) return SixBits::offset(codes, lane, group);
    return codes[kBlockRows * group + lane] >> 4;
  }

 private:
  // Of groups 2p and 2p + 1.
  EXO_INLINE Ops::Int pair_of_offsets(int p) const {
    if constexpr (kKind == SuperKind::kSixBits) {
      const uint8_t* high = codes + SixBits::line(2 * p);
      return Ops::add_int(
          Ops::bits_of(codes + SixBits::kLowLine, SixBits::low_shift(p), SixBits::kLow),
          Ops::bits_of(high, SixBits::high_shift(p), SixBits::kHigh));
    }
    const auto code = [&](int group) __attribute__((always_inline)) {
      const uint8_t* at = codes + kBlockRows * group;
      return kKind == SuperKind::kCodes ? Ops::codes_i8(at) : Ops::codes_u4(at, 4);
    };
    return Ops::pair_codes(code(2 * p), code(2 * p + 1));
  }
};

// One super-block of packed weights.
template <Coding C>
struct SuperAt {
  static constexpr int kUnitBytes = 64 * C.bits, kHeaderBytes = super_form(C).bytes();
  static constexpr int kBytes = kHeaderBytes + QuantizedSuper::kUnits * kUnitBytes;
  static constexpr int kHeaderLines = kHeaderBytes / 64;
  const uint8_t* header;

  EXO_INLINE const uint8_t* unit(int u) const { return header + kHeaderBytes + kUnitBytes * u; }
  EXO_INLINE void next() { header += kBytes; }
};

// The first row's super-block of one part of the activations; the next row's comes `supers` later.
struct SuperActivations {
  const int8_t* values;
  const QuantizedSuper* x;
  int64_t stride, supers;

  EXO_INLINE SuperActivations(const QuantizedRows& rows, const QuantizedPart& part, int64_t row,
                              int64_t super)
      : values(part.values + row * rows.stride + super * kSuperCols),
        x(part.supers + row * scale_stride(rows.cols, kSuperCols) + super),
        stride(rows.stride),
        supers(scale_stride(rows.cols, kSuperCols)) {}

  // The same of row `first` and those `distance` from one to the next.
  EXO_INLINE SuperActivations of_rows(int first, int distance) const {
    SuperActivations some = *this;
    some.values += first * stride, some.stride *= distance;
    some.x += first * supers, some.supers *= distance;
    return some;
  }
};

// Adds unit `u` of B blocks, `apart` bytes from one to the next, from the packed weights at `p` to
// the totals [B * M] of the activations' N parts.
template <Coding C, int M, int N, int B>
EXO_INLINE void add_packed_unit(const uint8_t* p, const SuperHeader<C>& header, int64_t apart,
                                int u, const SuperActivations* const (&x)[N],
                                Ops::Int* const (&total)[N]) {
  constexpr int kHalves = SuperTraits<C>::kHalves;
  Ops::Int codes[B][kHalves];
  for (int b = 0; b < B; b++) {
    const SuperHeader<C> own(header.header + b * apart);
    for (int h = 0; h < kHalves; h++) codes[b][h] = own.code(u * kHalves + h);
  }
  UnitSums<weight_bits<C>(), kHalves, M, B> sums[N];
  if constexpr (super_offsets<C>().zero_shift >= 0) {
    for (int n = 0; n < N; n++) {
      sums[n].begin_less(x[n]->x, x[n]->supers, u, super_offsets<C>().zero_shift);
    }
  }
  decode_units<C, B>(
      p, apart, [&](int slab, const Ops::Bytes(&weights)[B]) __attribute__((always_inline)) {
        for (int n = 0; n < N; n++) {
          sums[n].add(slab, weights, x[n]->values + u * kUnitCols + 4 * slab, x[n]->stride, codes);
        }
      });
  const auto add_all = [&](auto by_shifts) __attribute__((always_inline)) {
    for (int n = 0; n < N; n++) {
      for (int m = 0; m < M; m++) {
        const int multiple = x[n]->x[m * x[n]->supers].multiples[u];
        for (int b = 0; b < B; b++) {
          Ops::Int& own = total[n][b * M + m];
          own = sums[n].template added<by_shifts.value>(b, m, own, codes, multiple);
          if constexpr (M > 2) stay(own);
        }
      }
    }
  };
  if constexpr (M > 2 && kHalves == 1 && multiplies_by_shifts()) {
    if (vendor.shifts_aside) return add_all(std::true_type{});
  }
  add_all(std::false_type{});
}

}  // namespace exo::EXO_ISA

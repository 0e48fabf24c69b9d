// Super-blocks in AMX's tile registers, 16 rows by 16 outputs: the same integers as all others, so
// the same bits.
//
// code * (q - zero), of a weight, and multiple * byte, of a value, need 16 bits, and are two bytes
// each, the low one unsigned and the high one signed. Their four products, of which two count the
// same, add up in tiles over all 256 columns:
//   total = low low + 2^8 (low high + high low) + 2^16 high high
// So tiles are stored once for a super-block, which costs as much as what they multiply meanwhile;
// sums of groups of 16 or 32 columns were stored for each group, and took longer than dot products.
#pragma once

#include "super_rows.hpp"
#include "tiles.hpp"

namespace exo::EXO_ISA {

inline constexpr int kTileSteps = kSuperCols / kTileCols;
static_assert(kSplitCols == kTileCols);

// 64 columns of a block: slabs of low and of high bytes.
struct alignas(64) SplitSlabs {
  int8_t low[kTileCols * kBlockRows], high[kTileCols * kBlockRows];
};

// A super-block's sums of 16 rows, the first one's columns at `x`, by 16 outputs: of bytes low by
// low, of unlike ones, and high by high.
inline constexpr int kSplitSums = 3;
#ifdef EXO_AMX_EMULATED
// In plain C++: proves the logic on processors without AMX.
inline void multiply_super(const int8_t* x, int64_t stride, const SplitSlabs* w, int32_t* sums) {
  const auto low = [](int8_t byte) { return static_cast<uint8_t>(byte); };
  std::memset(sums, 0, kSplitSums * kTileSums * sizeof *sums);
  for (int step = 0; step < kTileSteps; step++, x += 2 * kTileCols, w++) {
    for (int i = 0; i < kTileSums; i++) {
      const int8_t* row = x + i / kBlockRows * stride;
      for (int k = 0; k < kTileCols; k++) {
        const int at = k / 4 * 64 + i % kBlockRows * 4 + k % 4;
        const int x_low = low(row[k]), w_low = low(w->low[at]);
        const int x_high = row[kTileCols + k], w_high = w->high[at];
        sums[i] += x_low * w_low;
        sums[kTileSums + i] += x_low * w_high + x_high * w_low;
        sums[2 * kTileSums + i] += x_high * w_high;
      }
    }
  }
}
#else
EXO_INLINE void multiply_super(const int8_t* x, int64_t stride, const SplitSlabs* w,
                               int32_t* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
#pragma GCC unroll 4
  for (int step = 0; step < kTileSteps; step++, x += 2 * kTileCols, w++) {
    _tile_loadd(4, x, stride);
    _tile_loadd(5, x + kTileCols, stride);
    _tile_loadd(6, w->low, 64);
    _tile_loadd(7, w->high, 64);
    _tile_dpbuud(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbssd(2, 5, 7);
    _tile_dpbsud(1, 5, 6);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileSums, 64);
  _tile_stored(2, sums + 2 * kTileSums, 64);
}
#endif

EXO_INLINE void put_split(const int16_t* values, int count, int8_t* low, int8_t* high) {
  for (int i = 0; i < count; i++) low[i] = static_cast<int8_t>(values[i]);
  for (int i = 0; i < count; i++) high[i] = static_cast<int8_t>(values[i] >> 8);
}

inline void split_rows(const QuantizedRows& x, int64_t first, int64_t rows) {
  const int64_t supers = x.cols / kSuperCols;
  for (int64_t r = first; r < first + rows; r++) {
    const int8_t* values = x.coarse.values + r * x.stride;
    int8_t* out = x.split + r * split_stride(x.cols);
    for (int64_t s = 0; s < supers; s++) {
      const QuantizedSuper& super = x.coarse.supers[r * scale_stride(x.cols, kSuperCols) + s];
      for (int u = 0; u < QuantizedSuper::kUnits; u++, values += kUnitCols) {
        int8_t* low = out + u / 2 * 2 * kSplitCols + u % 2 * kUnitCols;
        int16_t products[kUnitCols];
        for (int k = 0; k < kUnitCols; k++) {
          products[k] = static_cast<int16_t>(values[k] * super.multiples[u]);
        }
        put_split(products, kUnitCols, low, low + kSplitCols);
      }
      out += 2 * kSuperCols;
    }
  }
}

// A super-block of one block of outputs.
template <Coding C>
struct SplitSuper {
  using T = SuperTraits<C>;
  static constexpr SuperOffsets kOffsets{T::kHasFactor, -1};  // what its end takes
  SplitSlabs steps[kTileSteps];
  alignas(64) float d[kBlockRows], factor[kBlockRows];
  alignas(64) uint8_t pairs[64 * T::kPairs];

  void decode(const SuperAt<C>& at) {
    const SuperHeader<C> header(at.header);
    Ops::store(d, header.d());
    Ops::store(factor, header.factor());
    if constexpr (T::kHasFactor) header.store_pairs(pairs);
    constexpr int kZero = T::kHasFactor ? 0 : T::kForm.zero, kSlabs = 8 / T::kHalves;
    for (int u = 0; u < QuantizedSuper::kUnits; u++) {
      int16_t codes[T::kHalves][64];  // of each byte of a slab
      for (int h = 0; h < T::kHalves; h++) {
        alignas(64) int32_t code[kBlockRows];
        Ops::store_int(code, header.code(u * T::kHalves + h));
        for (int i = 0; i < 64; i++) codes[h][i] = static_cast<int16_t>(code[i / 4]);
      }
      decode_unit<C>(at.unit(u), [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
        alignas(64) uint8_t q[64];
        Ops::store_bytes(q, weights);
        int16_t products[64];
        const int16_t* code = codes[slab / kSlabs];
        for (int i = 0; i < 64; i++) products[i] = static_cast<int16_t>((q[i] - kZero) * code[i]);
        const int line = 64 * (u % 2 * 8 + slab);
        put_split(products, 64, steps[u / 2].low + line, steps[u / 2].high + line);
      });
    }
  }
};

// A unit, decoded once for all rows in which it is fine.
template <Coding C>
struct FineUnit {
  using T = SuperTraits<C>;
  static constexpr SuperOffsets kOffsets = left_to_finish(super_offsets<C>());
  static constexpr int kZero = super_offsets<C>().zero_shift;
  Ops::Bytes slabs[8];
  Ops::Int codes[1][T::kHalves];

  EXO_INLINE FineUnit(const SuperAt<C>& at, int u) {
    const SuperHeader<C> header(at.header);
    for (int h = 0; h < T::kHalves; h++) codes[0][h] = header.code(u * T::kHalves + h);
    decode_unit<C>(at.unit(u), [&](int slab, Ops::Bytes weights)
                                   __attribute__((always_inline)) { slabs[slab] = weights; });
  }
  EXO_INLINE void add_to(Ops::Int& total, const int8_t* values, const QuantizedSuper& x,
                         int u) const {
    UnitSums<weight_bits<C>(), T::kHalves, 1> sums;
    if constexpr (kZero >= 0) sums.begin_less(&x, 0, u, kZero);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      const Ops::Bytes weights[1] = {slabs[i]};
      sums.add(i, weights, values + 4 * i, 0, codes);
    }
    total = sums.added(0, 0, total, codes, x.multiples[u]);
  }
};
template <Coding C, bool HELD = takes_row_after_row<C>()>
struct FineUnitOf {
  using Type = FineUnit<C>;
};
template <Coding C>
struct FineUnitOf<C, true> {
  using Type = HeldUnit<C>;
};

// The rows in which units of a super-block are fine, a bit for each unit.
struct FineRow {
  int32_t row;
  uint32_t units;
};

// Those of all super-blocks, one after the other; starts: [supers + 1]. `list` has room for all.
inline void list_fine_rows(const QuantizedRows& x, int64_t rows, FineRow* list, int64_t* starts) {
  const int64_t supers = x.cols / kSuperCols;
  int64_t found = 0;
  for (int64_t s = 0; s < supers; s++) {
    starts[s] = found;
    const uint8_t* flags = x.is_fine + s * QuantizedSuper::kUnits;
    for (int64_t m = 0; m < rows; m++, flags += supers * QuantizedSuper::kUnits) {
      uint64_t eight;
      __builtin_memcpy(&eight, flags, sizeof eight);
      if (eight == 0) continue;
      uint32_t units = 0;
      for (int u = 0; u < QuantizedSuper::kUnits; u++) {
        units |= static_cast<uint32_t>(eight >> 8 * u & 1) << u;
      }
      list[found++] = {static_cast<int32_t>(m), units};
    }
  }
  starts[supers] = found;
}

// Adds what is left over of one unit to the totals of the rows in which it is fine.
template <Coding C>
__attribute__((noinline)) void add_fine_rows(const SuperAt<C>& at, const SuperActivations& left,
                                             const FineRow* fine, int64_t count, int u,
                                             Ops::Int* totals) {
  using Unit = typename FineUnitOf<C>::Type;
  const Unit unit(at, u);
  const int8_t* values = left.values + u * kUnitCols;
  for (int64_t i = 0; i < count; i++) {
    if ((fine[i].units >> u & 1) == 0) continue;
    const int64_t row = fine[i].row;
    unit.add_to(totals[i], values + row * left.stride, left.x[row * left.supers], u);
  }
}

// One super-block's, to rows y.
template <Coding C>
void finish_fine_rows(const SuperAt<C>& at, const SuperActivations& left, const FineRow* fine,
                      int64_t count, Ops::Int* totals, Ops::Float* y) {
  using T = SuperTraits<C>;
  constexpr SuperOffsets kOffsets = FineUnitOf<C>::Type::kOffsets;
  uint32_t units = 0;
  for (int64_t i = 0; i < count; i++) {
    totals[i] = Ops::zero_int();
    units |= fine[i].units;
  }
  for (; units != 0; units &= units - 1) {
    add_fine_rows<C>(at, left, fine, count, __builtin_ctz(units), totals);
  }
  const SuperHeader<C> header(at.header);
  alignas(64) uint8_t pairs[64 * T::kPairs];
  if constexpr (kOffsets.are_any()) header.store_pairs(pairs);
  const Ops::Float d = header.d(), factor = header.factor();
  for (int64_t i = 0; i < count; i++) {
    finish_super<T::kHalves, 1>(y + fine[i].row, totals + i, left.x + fine[i].row * left.supers, 0,
                                d, factor, pairs, kOffsets, false);
  }
}

// Rows y with the sums of one tile in them; rows past the last are dropped later.
template <Coding C>
EXO_INLINE void finish_tile(const int32_t* sums, const SplitSuper<C>& super,
                            const SuperActivations& coarse, bool begins, Ops::Float* y) {
  const Ops::Float d = Ops::from_f32(super.d), factor = Ops::from_f32(super.factor);
  for (int first = 0; first < kTileRows; first += 4) {
    Ops::Int total[4];
#pragma GCC unroll 4
    for (int m = 0; m < 4; m++) {
      const int32_t* row = sums + kBlockRows * (first + m);
      const auto sum = [&](int i) { return Ops::load_int(row + i * kTileSums); };
      total[m] = Ops::add_shifted(Ops::add_shifted(sum(0), sum(1), 8), sum(2), 16);
    }
    finish_super<SuperTraits<C>::kHalves, 4>(y + first, total, coarse.x + first * coarse.supers,
                                             coarse.supers, d, factor, super.pairs,
                                             SplitSuper<C>::kOffsets, begins);
  }
}

// Blocks whose super-blocks are multiplied by one of all rows while a cache holds it.
inline constexpr int64_t kBlocksInTurn = 2;

// Blocks [begin, end) for many rows.
template <Coding C>
void linear_super_tiles(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                        int64_t end, float* out, int64_t stride, Upcoming upcoming) {
  const int64_t supers = w.cols / kSuperCols, tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t split_bytes = split_stride(x.cols), padded = tiles * kTileRows;
  size_t used = 0;
  const auto reserve = [&](size_t size, int64_t count) {
    const size_t at = used;
    used += (size * static_cast<size_t>(count) + 63) / 64 * 64;
    return at;
  };
  const size_t decoded_at = reserve(sizeof(SplitSuper<C>), kBlocksInTurn),
               sums_at = reserve(sizeof(int32_t), 2 * kSplitSums * kTileSums),
               totals_at = reserve(sizeof(Ops::Int), rows),
               fine_at = reserve(sizeof(FineRow), rows * supers),
               starts_at = reserve(sizeof(int64_t), supers + 1),
               parts_at = reserve(sizeof(Ops::Float), kBlocksInTurn * w.parts * padded);
  uint8_t* memory = scratch(used);
  auto* decoded = reinterpret_cast<SplitSuper<C>*>(memory + decoded_at);
  auto* sums = reinterpret_cast<int32_t*>(memory + sums_at);
  auto* totals = reinterpret_cast<Ops::Int*>(memory + totals_at);
  auto* fine = reinterpret_cast<FineRow*>(memory + fine_at);
  auto* starts = reinterpret_cast<int64_t*>(memory + starts_at);
  const auto part_at = [&](int64_t b, int64_t part) {
    return reinterpret_cast<Ops::Float*>(memory + parts_at) + (b * w.parts + part) * padded;
  };
  list_fine_rows(x, rows, fine, starts);
  [[maybe_unused]] const TileSession session(kTileCols);
  for (int64_t first = begin; first < end; first += kBlocksInTurn) {
    const int64_t count = end - first < kBlocksInTurn ? end - first : kBlocksInTurn;
    const Upcoming next = next_blocks(w, first + count, kBlocksInTurn, end, upcoming);
    Fetching fetching(next, kSetBytes, supers * tiles * count);
    SuperAt<C> at[kBlocksInTurn];
    for (int64_t b = 0; b < count; b++) at[b] = {w.block(first + b)};
    for (int64_t s = 0; s < supers; s++) {
      for (int64_t b = 0; b < count; b++) decoded[b].decode(at[b]);
      const int64_t part = s * w.parts / supers;
      const bool begins = s * w.parts % supers == 0;
      // One tile ahead: its stores are not forwarded to loads, which would else wait for them.
      const auto sums_of = [&](int64_t i) { return sums + i % 2 * kSplitSums * kTileSums; };
      const auto multiply = [&](int64_t i) __attribute__((always_inline)) {
        const int8_t* at_rows = x.split + i / count * kTileRows * split_bytes + 2 * kSuperCols * s;
        multiply_super(at_rows, split_bytes, decoded[i % count].steps, sums_of(i));
      };
      multiply(0);
      for (int64_t i = 0; i < tiles * count; i++) {
        fetching.take(1).fetch();
        if (i + 1 < tiles * count) multiply(i + 1);
        const int64_t row = i / count * kTileRows, b = i % count;
        const SuperActivations coarse(x, x.coarse, row, s);
        finish_tile<C>(sums_of(i), decoded[b], coarse, begins, part_at(b, part) + row);
      }
      const SuperActivations left(x, x.fine, 0, s);
      const int64_t some = starts[s + 1] - starts[s];
      for (int64_t b = 0; b < count; b++) {
        if (some > 0) {
          finish_fine_rows<C>(at[b], left, fine + starts[s], some, totals, part_at(b, part));
        }
        at[b].next();
      }
    }
    for (int64_t b = 0; b < count; b++) {
      for (int64_t m = 0; m < rows; m++) {
        const auto of = [&](int i) { return part_at(b, i)[m]; };
        finish(w, first + b, joined(w.parts, of), out + m * stride);
      }
    }
  }
}

}  // namespace exo::EXO_ISA

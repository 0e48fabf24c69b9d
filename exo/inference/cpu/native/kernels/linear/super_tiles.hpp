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

namespace exo::EXO_ISA {

// Rows from which on tiles are quicker than the dot products of an `Ops`: what is decoded for them
// costs more. Where they are emulated, all that tests ask for.
#ifdef EXO_AMX_EMULATED
inline constexpr int64_t kTilesFrom = 9;
#else
inline constexpr int64_t kTilesFrom = 64;
#endif

inline constexpr int kTileCols = 64, kTileSteps = kSuperCols / kTileCols;

// 64 columns of 16 rows, or of 16 outputs as slabs, in two bytes.
struct alignas(64) SplitStep {
  uint8_t low[16 * kTileCols];
  int8_t high[16 * kTileCols];
};

#ifdef EXO_AMX_EMULATED
// In plain C++: proves the logic on processors without AMX.
struct TileSums {
  static constexpr int kTiles = 3;
  struct Session {};
  static void multiply(const SplitStep* x, const SplitStep* w, int32_t* sums) {
    std::memset(sums, 0, kTiles * 256 * 4);
    for (int step = 0; step < kTileSteps; step++, x++, w++) {
      for (int i = 0; i < 256; i++) {
        for (int k = 0; k < kTileCols; k++) {
          const int a = i / 16 * kTileCols + k, b = k / 4 * 64 + i % 16 * 4 + k % 4;
          sums[i] += x->low[a] * w->low[b];
          sums[256 + i] += x->low[a] * w->high[b] + x->high[a] * w->low[b];
          sums[512 + i] += x->high[a] * w->high[b];
        }
      }
    }
  }
};
#else
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct TileSums {
  static constexpr int kTiles = 3;
  // Tiles are released so that a context switch need not save them.
  struct Session {
    Session() {
      TileConfig config;
      for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
      // gcc 12 drops the stores above otherwise: it does not see that the instruction reads memory.
      asm volatile("" ::"r"(&config) : "memory");
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // [kTiles][16][16]: of bytes low by low, of unlike ones, and high by high.
  static EXO_INLINE void multiply(const SplitStep* x, const SplitStep* w, int32_t* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
#pragma GCC unroll 4
    for (int step = 0; step < kTileSteps; step++, x++, w++) {
      _tile_loadd(4, x->low, kTileCols);
      _tile_loadd(5, x->high, kTileCols);
      _tile_loadd(6, w->low, 64);
      _tile_loadd(7, w->high, 64);
      _tile_dpbuud(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      _tile_dpbssd(2, 5, 7);
      _tile_dpbsud(1, 5, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
  }
};
#endif

EXO_INLINE void put_split(SplitStep& step, int at, const int16_t* values, int count) {
  for (int i = 0; i < count; i++) step.low[at + i] = static_cast<uint8_t>(values[i]);
  for (int i = 0; i < count; i++) step.high[at + i] = static_cast<int8_t>(values[i] >> 8);
}

// 16 rows from `row` on of all super-blocks; those past the last are zeros.
inline void split_rows(const QuantizedRows& x, int64_t row, int64_t rows, SplitStep* out) {
  const int64_t supers = x.cols / kSuperCols;
  if (rows < 16) std::memset(out, 0, static_cast<size_t>(supers * kTileSteps) * sizeof *out);
  for (int64_t m = 0; m < rows && m < 16; m++) {
    const QuantizedSuper* super = x.coarse.supers + (row + m) * supers;
    const int8_t* values = x.coarse.values + (row + m) * x.stride;
    for (int64_t u = 0; u < supers * QuantizedSuper::kUnits; u++, values += kUnitCols) {
      const int by = super[u / QuantizedSuper::kUnits].multiples[u % QuantizedSuper::kUnits];
      int16_t products[kUnitCols];
      for (int k = 0; k < kUnitCols; k++) products[k] = static_cast<int16_t>(values[k] * by);
      const int at = static_cast<int>(m * kTileCols + u % 2 * kUnitCols);
      put_split(out[u / 2], at, products, kUnitCols);
    }
  }
}

// A super-block of one block of outputs.
template <Coding C>
struct SplitSuper {
  using T = SuperTraits<C>;
  static constexpr SuperOffsets kOffsets{T::kHasFactor, -1};  // what its end takes
  SplitStep steps[kTileSteps];
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
        put_split(steps[u / 2], 64 * (u % 2 * 8 + slab), products, 64);
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

// Blocks whose super-blocks are multiplied by one of all rows while a cache holds it.
inline constexpr int64_t kBlocksInTurn = 2;

// Blocks [begin, end) for many rows.
template <Coding C>
void linear_super_tiles(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                        int64_t end, float* out, int64_t stride, uint8_t* memory) {
  using T = SuperTraits<C>;
  using Super = SplitSuper<C>;
  const int64_t supers = w.cols / kSuperCols, tiles = (rows + 15) / 16;
  const auto take = [&](int64_t bytes) {
    uint8_t* taken = memory;
    memory += (bytes + 63) / 64 * 64;
    return taken;
  };
  const int64_t of_tile = supers * kTileSteps;
  auto* split = reinterpret_cast<SplitStep*>(take(tiles * of_tile * int64_t{sizeof(SplitStep)}));
  auto* held = reinterpret_cast<Super*>(take(kBlocksInTurn * int64_t{sizeof(Super)}));
  auto* sums = reinterpret_cast<int32_t*>(take(2 * TileSums::kTiles * 256 * 4));
  auto* totals = reinterpret_cast<Ops::Int*>(take(rows * 64));
  auto* fine = reinterpret_cast<FineRow*>(take(rows * supers * int64_t{sizeof(FineRow)}));
  auto* starts = reinterpret_cast<int64_t*>(take((supers + 1) * 8));
  // [block][part][row]
  auto* parts = reinterpret_cast<Ops::Float*>(memory);
  const auto part_at = [&](int64_t b, int64_t part) {
    return parts + (b * w.parts + part) * tiles * 16;
  };
  for (int64_t t = 0; t < tiles; t++) {
    split_rows(x, 16 * t, rows - 16 * t, split + t * of_tile);
  }
  list_fine_rows(x, rows, fine, starts);
  [[maybe_unused]] const typename TileSums::Session session;
  for (int64_t b0 = begin; b0 < end; b0 += kBlocksInTurn) {
    const int64_t count = end - b0 < kBlocksInTurn ? end - b0 : kBlocksInTurn;
    SuperAt<C> at[kBlocksInTurn];
    for (int64_t b = 0; b < count; b++) at[b] = {w.block(b0 + b)};
    for (int64_t s = 0; s < supers; s++) {
      for (int64_t b = 0; b < count; b++) held[b].decode(at[b]);
      const int64_t part = s * w.parts / supers;
      const bool begins = s * w.parts % supers == 0;
      const auto multiply = [&](int64_t i) __attribute__((always_inline)) {
        const SplitStep* rows_at = split + i / count * of_tile + s * kTileSteps;
        TileSums::multiply(rows_at, held[i % count].steps, sums + i % 2 * TileSums::kTiles * 256);
      };
      constexpr int kLines = SuperAt<C>::kBytes / 64;
      const auto fetch = [&](int64_t b, int64_t t) __attribute__((always_inline)) {
        const uint8_t* next = at[b].header + SuperAt<C>::kBytes;
        for (int64_t l = kLines * t / tiles; l < kLines * (t + 1) / tiles; l++) {
          __builtin_prefetch(next + 64 * l);
        }
      };
      multiply(0);
      for (int64_t i = 0; i < tiles * count; i++) {
        if (i + 1 < tiles * count) multiply(i + 1);
        const int64_t t = i / count, b = i % count;
        fetch(b, t);
        const int32_t* of = sums + i % 2 * TileSums::kTiles * 256;
        const SuperActivations coarse(x, x.coarse, 16 * t, s);
        const Super& super = held[b];
        Ops::Float* y = part_at(b, part) + 16 * t;
        const Ops::Float d = Ops::from_f32(super.d), factor = Ops::from_f32(super.factor);
        for (int m = 0; m < 16; m += 4) {
          Ops::Int total[4];
#pragma GCC unroll 4
          for (int r = 0; r < 4; r++) {
            const auto sum = [&](int tile) {
              return Ops::load_int(of + 256 * tile + 16 * (m + r));
            };
            total[r] = Ops::add_shifted(Ops::add_shifted(sum(0), sum(1), 8), sum(2), 16);
          }
          finish_super<T::kHalves, 4>(y + m, total, coarse.x + m * supers, supers, d, factor,
                                      super.pairs, Super::kOffsets, begins);
        }
      }
      const int64_t some = starts[s + 1] - starts[s];
      for (int64_t b = 0; b < count; b++) {
        if (some > 0) {
          const SuperActivations left(x, x.fine, 0, s);
          finish_fine_rows<C>(at[b], left, fine + starts[s], some, totals, part_at(b, part));
        }
        at[b].next();
      }
    }
    for (int64_t b = 0; b < count; b++) {
      for (int64_t m = 0; m < rows; m++) {
        const auto of = [&](int i) { return part_at(b, i)[m]; };
        finish(w, b0 + b, joined(w.parts, of), out + m * stride);
      }
    }
  }
}

// Bytes of memory for that.
template <Coding C>
int64_t super_tiles_bytes(const Matrix& w, int64_t rows) {
  const int64_t supers = w.cols / kSuperCols, tiles = (rows + 15) / 16;
  return tiles * supers * kTileSteps * int64_t{sizeof(SplitStep)} +
         kBlocksInTurn * int64_t{sizeof(SplitSuper<C>)} + 2 * TileSums::kTiles * 256 * 4 +
         rows * (64 + supers * int64_t{sizeof(FineRow)}) + (supers + 1) * 8 +
         kBlocksInTurn * w.parts * tiles * 16 * 64 + 7 * 64;
}

}  // namespace exo::EXO_ISA

// y = W x for affine weights and int8 activations: which tile computes which rows and blocks.
#pragma once

#include <type_traits>

#include "plain_panels.hpp"
#include "quicker.hpp"
#include "super_packed.hpp"
#include "super_panels.hpp"
#include "super_rows.hpp"
#ifdef EXO_TILES
#include "plain_tiles.hpp"
#include "super_tiles.hpp"
#endif

namespace exo::EXO_ISA {

// How the groups of a matrix lie in memory (matrix.hpp).
enum class Layout : uint8_t { kSuper, kOffsets, kZero };

using PackedTile = void (*)(const Matrix&, const QuantizedRows&, const FineGroup*, int64_t, int64_t,
                            int64_t, float*, int64_t, Ahead);
template <Coding C, Layout L>
constexpr RowLimits row_limits() {
#ifdef EXO_TILES
  // Bytes need no decoding, and their tiles are slower than dot products.
  if (L != Layout::kZero || C.bits < 8) return {kAllRows, kTilesFrom - 1};
#endif
  return Ops::row_limits(C, L == Layout::kSuper);
}

template <Coding C, Layout L, int M, int B>
constexpr PackedTile tile_from_packed() {
  if constexpr (L == Layout::kSuper) {
    return super_block_from_packed<C, M, B>;
  } else {
    constexpr int kZero = L == Layout::kOffsets ? -1 : zero_shift(C);
    return block_from_packed<C, kZero, M, B>;
  }
}

template <Coding C, Layout L, int M>
constexpr PackedTile packed_tile() {
  if constexpr (M > Ops::kMaxRows || M >= row_limits<C, L>().shared_from) return nullptr;
  return tile_from_packed<C, L, M, 1>();
}
static_assert(Ops::kTileBlocks > 1 || Ops::kMaxRows <= 4);  // pairs have tables of their own
template <Coding C, Layout L>
constexpr PackedTile kPackedTiles[] = {nullptr, packed_tile<C, L, 1>(), packed_tile<C, L, 2>(),
                                       packed_tile<C, L, 3>(), packed_tile<C, L, 4>()};

inline FineGroup* scratch_lists(int64_t groups) {
  return reinterpret_cast<FineGroup*>(scratch(static_cast<size_t>(groups) * sizeof(FineGroup)));
}

inline constexpr int64_t kPanelBytes = 640 << 10;  // decoded weights that stay in the L2 cache

inline constexpr int64_t kPackedAtOnce = 64;  // rows that stay in a cache beside a block

// Blocks [begin, end) for some rows: one is read from memory for the first tile of rows and from a
// cache for the others.
template <Coding C, Layout L>
void linear_packed(const Matrix& w, const QuantizedRows& x, int64_t first, int64_t rows,
                   int64_t begin, int64_t end, float* out, int64_t stride) {
  constexpr int64_t kShared = row_limits<C, L>().shared_from;
  const int64_t listed = w.cols / x.flag_cols() + 1, last = first + rows;
  FineGroup* lists = scratch_lists((rows + Ops::kMaxRows - 1) / Ops::kMaxRows * listed);
  const auto size_at = [&](int64_t row) {
    return last - row < Ops::kMaxRows ? last - row : Ops::kMaxRows;
  };
  FineGroup* list = lists;
  for (int64_t row = first; row < last; row += Ops::kMaxRows, list += listed) {
    list_fine_groups(x, row, size_at(row), list);
  }
  for (int64_t b = begin; b < end; b++) {
    if constexpr (kShared < kAllRows) {
      static_assert(row_limits<C, L>().packed <= kFewRows);
      if (rows >= kShared) {
        super_block_for_few<C>(w, x, lists, first, rows, b, out, stride);
        continue;
      }
    }
    const FineGroup* fine = lists;
    for (int64_t row = first; row < last; row += Ops::kMaxRows, fine += listed) {
      const int64_t size = size_at(row);
      kPackedTiles<C, L>[size](w, x, fine, row, size, b, out, stride, {});
    }
  }
}

// Formats that few files have: of their tiles few sizes are compiled.
template <Coding C, Layout L>
constexpr bool is_rare() {
  if (C.table != Table::kNone) return C.table != Table::kIq4 && C.table != Table::kE2m1;
  return L == Layout::kOffsets ? C.bits != 4 && C.bits != 8 : L == Layout::kZero && C.bits == 5;
}

// What one set of tiles needs of all rows and of a tile's, and how a tile is computed from a panel.
template <Coding C, Layout L>
struct PlainPanels {
  static constexpr bool kHasOffsets = L == Layout::kOffsets;
  static int64_t scale_bytes(const Matrix& w) { return w.groups() * panel_scales(kHasOffsets) * 4; }
  // Of a tile, at each of which something is fetched.
  static int64_t steps(const Matrix& w) { return w.groups(); }
  static void decode(const Matrix& w, int64_t block, const Panel& panel) {
    decode_block<C, kHasOffsets>(w, block, panel);
  }
  static constexpr int kZero = kHasOffsets ? -1 : zero_shift(C), kBits = weight_bits<C>();
#ifdef EXO_TILES
  struct Steps : PanelSteps<16, kHasOffsets, kHasOffsets ? 0 : 1 << kZero> {
    Steps(uint8_t* memory, const Matrix& w, const QuantizedRows& x, int64_t row, int64_t,
          const FineGroup* fine)
        : Steps::PanelSteps(memory, w, x, row, fine) {}
  };
  static void compute(const Matrix& w, const Panel& panel, const Steps& todo, Ahead ahead,
                      int64_t row, int64_t rows, int64_t block, float* out, int64_t stride) {
    tile_from_panel<kHasOffsets>(w, panel, todo, ahead, row, rows, block, out, stride);
  }
#else
  struct Steps : PanelSteps<Ops::kTileRows, kHasOffsets, SlabSums<kBits, kZero, 1, 1>::kLess> {
    Steps(uint8_t* memory, const Matrix& w, const QuantizedRows& x, int64_t row, int64_t,
          const FineGroup* fine)
        : Steps::PanelSteps(memory, w, x, row, fine) {}
  };
  static void compute(const Matrix& w, const Panel& panel, const Steps& todo, Ahead ahead,
                      int64_t row, int64_t rows, int64_t block, float* out, int64_t stride) {
    block_from_panel<kBits, kZero, Ops::kTileRows>(w, panel, todo, ahead, row, rows, block, out,
                                                   stride);
  }
#endif
};

template <Coding C>
struct SuperPanels {
  static constexpr int kHalves = SuperTraits<C>::kHalves;
  static int64_t scale_bytes(const Matrix& w) {
    return w.cols / kSuperCols * SuperScales<kHalves>::kBytes;
  }
  static int64_t steps(const Matrix& w) { return w.cols / kUnitCols; }
  static void decode(const Matrix& w, int64_t block, const Panel& panel) {
    decode_super_block<C>(w, block, panel);
  }
  struct Steps {
    const QuantizedRows& x;
    const FineGroup* fine;
    static size_t bytes(const Matrix&) { return 0; }
    Steps(uint8_t*, const Matrix&, const QuantizedRows& x, int64_t, int64_t, const FineGroup* fine)
        : x(x), fine(fine) {}
  };
  static void compute(const Matrix& w, const Panel& panel, const Steps& todo, Ahead ahead,
                      int64_t row, int64_t rows, int64_t block, float* out, int64_t stride) {
    super_block_from_panel<weight_bits<C>(), kHalves, super_offsets<C>(), Ops::kTileRows>(
        w, panel, todo.x, todo.fine, ahead, row, rows, block, out, stride);
  }
};

// Rows of a tile of pairs of blocks. Where each result has two sums, those of its unit's halves,
// registers have room for fewer.
template <Coding C, Layout L>
constexpr int pair_rows() {
  if constexpr (L == Layout::kSuper) {
    if (SuperTraits<C>::kHalves == 2 && !multiplies_halves<C>() && Ops::kTileRows > 4) return 4;
  }
  return Ops::kTileRows;
}

// Tiles of pairs of blocks, for 1 to pair_rows rows.
template <Coding C, Layout L, int M>
constexpr PackedTile pair_tile() {
  constexpr int kRows = is_rare<C, L>() ? (M + 1) / 2 * 2 : M;
  if constexpr (M <= pair_rows<C, L>()) return tile_from_packed<C, L, kRows, Ops::kTileBlocks>();
  return nullptr;
}
template <Coding C, Layout L>
constexpr PackedTile kPairTiles[] = {nullptr,
                                     pair_tile<C, L, 1>(),
                                     pair_tile<C, L, 2>(),
                                     pair_tile<C, L, 3>(),
                                     pair_tile<C, L, 4>(),
                                     pair_tile<C, L, 5>(),
                                     pair_tile<C, L, 6>()};

// Tiles of pairs of blocks as `linear_sets` takes them.
template <Coding C, Layout L>
struct PairTiles {
  static constexpr int kRows = pair_rows<C, L>(), kBlocks = Ops::kTileBlocks;
  static constexpr PackedTile tile(int64_t rows) { return kPairTiles<C, L>[rows]; }
  // Of one block.
  template <int M>
  static constexpr PackedTile single() {
    return tile_from_packed<C, L, M, 1>();
  }
};

// Tiles of one block, for 1 to kRowsInTurn rows, of an even number.
template <Coding C, int M>
constexpr PackedTile row_tile() {
  if constexpr (M <= kRowsInTurn) return super_block_row_after_row<C, M>;
  return nullptr;
}
template <Coding C>
constexpr PackedTile kRowTiles[] = {nullptr,          row_tile<C, 2>(), row_tile<C, 4>(),
                                    row_tile<C, 6>(), row_tile<C, 8>(), row_tile<C, 10>(),
                                    row_tile<C, 12>()};
template <Coding C>
struct RowTiles {
  static constexpr int kRows = kRowsInTurn, kBlocks = 1;
  static constexpr PackedTile tile(int64_t rows) { return kRowTiles<C>[(rows + 1) / 2]; }
  template <int M>
  static constexpr PackedTile single() {
    return super_block_row_after_row<C, M>;
  }
};

// Blocks [begin, end) for all rows, in tiles straight from the packed weights: where registers hold
// a tile of many rows, or of two blocks, decoding them again for each tile costs less than to keep
// what was decoded. All tiles of rows take one set of blocks after the other, the next one's
// weights coming from memory meanwhile, a few lines at a time.
template <typename Tiles>
void linear_sets(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin, int64_t end,
                 float* out, int64_t stride, Upcoming upcoming) {
  constexpr int M = Tiles::kRows, B = Tiles::kBlocks;
  const int64_t steps = w.cols / x.flag_cols(), listed = steps + 1, bytes = w.block_bytes();
  // Alike, as one of few rows costs nearly as much as one of many.
  const int64_t tiles = (rows + M - 1) / M, size = (rows + tiles - 1) / tiles;
  FineGroup* lists = scratch_lists(tiles * listed);
  const auto size_at = [&](int64_t row) { return rows - row < size ? rows - row : size; };
  FineGroup* list = lists;
  for (int64_t row = 0; row < rows; row += size, list += listed) {
    list_fine_groups(x, row, size_at(row), list);
  }
  // What these wait for is memory, which gives one stream more than two.
  if (rows <= 2) {
    const auto tile = rows == 1 ? Tiles::template single<1>() : Tiles::template single<2>();
    for (int64_t b = begin; b < end; b++) tile(w, x, lists, 0, rows, b, out, stride, {});
    return;
  }
  // One tile needs its blocks no second time.
  const int64_t fit = kSetBytes / (B * bytes), most = tiles == 1 || fit < 1 ? 1 : fit;
  const int64_t several = (end - begin + B - 1) / B, sets = (several + most - 1) / most;
  const auto set_at = [&](int64_t s) {  // alike
    const int64_t at = begin + several * s / sets * B;
    return at < end ? at : end;
  };
  for (int64_t s = 0; s < sets; s++) {
    const int64_t first = set_at(s), last = set_at(s + 1);
    const Upcoming next = next_blocks(w, last, set_at(s + 2) - last, end, upcoming);
    Fetching fetching(next, kFetchedBytes, tiles * ((last - first) / B) * steps);
    const FineGroup* fine = lists;
    for (int64_t row = 0; row < rows; row += size, fine += listed) {
      const int64_t m = size_at(row);
      int64_t b = first;
      for (; b + B <= last; b += B) {
        Tiles::tile(m)(w, x, fine, row, m, b, out, stride, fetching.take(steps));
      }
      for (; b < last; b++) Tiles::template single<M>()(w, x, fine, row, m, b, out, stride, {});
    }
  }
}

// The same by whichever tiles are quicker here; `second`: the vendor's usual ones.
template <typename First, typename Second>
void linear_quicker(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                    int64_t end, float* out, int64_t stride, Upcoming upcoming, bool second) {
  static Quicker quicker;
  // Whole tiles of either; a thread of many has no more blocks at once.
  constexpr int64_t kRows = 24, kBlocks = 2;
  if (!vendor.is_told && rows > 2) {  // fewer wait for memory
    if (quicker.is_untried() && rows >= kRows && end - begin >= kBlocks) {
      const int64_t some = begin + kBlocks;
      quicker.try_both([&] { linear_sets<First>(w, x, kRows, begin, some, out, stride, {}); },
                       [&] { linear_sets<Second>(w, x, kRows, begin, some, out, stride, {}); },
                       second);
    }
    second = quicker.is_second(second);
  }
  second ? linear_sets<Second>(w, x, rows, begin, end, out, stride, upcoming)
         : linear_sets<First>(w, x, rows, begin, end, out, stride, upcoming);
}

// Blocks [begin, end) for many rows, decoded once for all.
template <Coding C, Layout L>
void linear_panels(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                   int64_t end, float* out, int64_t stride, Upcoming upcoming) {
  using Panels = std::conditional_t<L == Layout::kSuper, SuperPanels<C>, PlainPanels<C, L>>;
  const size_t list_bytes = static_cast<size_t>(w.cols / x.flag_cols() + 1) * sizeof(FineGroup);
  const int64_t slab_bytes = w.cols * kBlockRows;
  const int64_t panel_bytes = slab_bytes + Panels::scale_bytes(w);
#ifdef EXO_TILES
  [[maybe_unused]] const TileSession session(w.group < kTileCols ? w.group : kTileCols);
  constexpr int64_t kRows = kTileRows;
#else
  constexpr int64_t kRows = Ops::kTileRows;
#endif
  // As many panels as stay in a cache.
  const int64_t fit = kPanelBytes / panel_bytes, several = fit < 1 ? 1 : fit;
  const int64_t step = several < end - begin ? several : end - begin;
  const size_t step_bytes = Panels::Steps::bytes(w);
  uint8_t* memory = scratch(static_cast<size_t>(step * panel_bytes) + step_bytes + list_bytes);
  uint8_t* step_memory = memory + step * panel_bytes;
  FineGroup* fine = reinterpret_cast<FineGroup*>(step_memory + step_bytes);
  for (int64_t b0 = begin; b0 < end; b0 += step) {
    const int64_t count = end - b0 < step ? end - b0 : step;
    const auto panel = [&](int64_t i) {
      uint8_t* at = memory + i * panel_bytes;
      return Panel{at, reinterpret_cast<float*>(at + slab_bytes)};
    };
    for (int64_t i = 0; i < count; i++) Panels::decode(w, b0 + i, panel(i));
    // The next panels' weights come from memory while these are multiplied, a few lines at a time.
    const Upcoming next = next_blocks(w, b0 + count, step, end, upcoming);
    const int64_t steps = Panels::steps(w);
    Fetching fetching(next, kPanelBytes, (rows + kRows - 1) / kRows * count * steps, 4);
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t m = rows - row < kRows ? rows - row : kRows;
      list_fine_groups(x, row, m, fine);
      const typename Panels::Steps todo(step_memory, w, x, row, m, fine);
      for (int64_t i = 0; i < count; i++) {
        Panels::compute(w, panel(i), todo, fetching.take(steps), row, m, b0 + i, out, stride);
      }
    }
  }
}

template <Coding C, Layout L>
void linear_coded(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin, int64_t end,
                  float* out, int64_t stride, Upcoming next) {
  constexpr int64_t kPacked = row_limits<C, L>().packed;
  if constexpr (kPacked < kAllRows) {
    if (rows > kPacked) {
#ifdef EXO_TILES
      if constexpr (L == Layout::kSuper) {
        return linear_super_tiles<C>(w, x, rows, begin, end, out, stride, next);
      } else
#endif
        return linear_panels<C, L>(w, x, rows, begin, end, out, stride, next);
    }
  }
  using Pairs = PairTiles<C, L>;
  constexpr bool kRowAfterRow = L == Layout::kSuper && takes_row_after_row<C>();
  if constexpr (kRowAfterRow && !multiplies_by_shifts()) {
    linear_sets<RowTiles<C>>(w, x, rows, begin, end, out, stride, next);
  } else if constexpr (Ops::kTileBlocks > 1 && kRowAfterRow) {
    linear_quicker<Pairs, RowTiles<C>>(w, x, rows, begin, end, out, stride, next,
                                       !vendor.shifts_aside);
  } else if constexpr (Ops::kTileBlocks > 1 && may_permute<C>()) {
    using Permuting = PairTiles<Coding{C.bits, C.table, true}, L>;
    if (!vendor.has_vbmi) {
      return linear_sets<Pairs>(w, x, rows, begin, end, out, stride, next);
    }
    linear_quicker<Pairs, Permuting>(w, x, rows, begin, end, out, stride, next,
                                     vendor.permutes_bytes);
  } else if constexpr (Ops::kTileBlocks > 1) {
    linear_sets<Pairs>(w, x, rows, begin, end, out, stride, next);
  } else {
    const int64_t cached = kPanelBytes / w.block_bytes() < 1 ? 1 : kPanelBytes / w.block_bytes();
    for (int64_t b = begin; b < end; b += cached) {
      const int64_t some = b + cached < end ? b + cached : end;
      for (int64_t row = 0; row < rows; row += kPackedAtOnce) {
        const int64_t count = rows - row < kPackedAtOnce ? rows - row : kPackedAtOnce;
        linear_packed<C, L>(w, x, row, count, b, some, out, stride);
      }
    }
  }
}

// In linear/super.cpp.
void linear_super(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin, int64_t end,
                  float* out, int64_t stride, Upcoming next);

inline void linear_int8(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                        int64_t end, float* out, int64_t stride, Upcoming next) {
  if (w.is_super) return linear_super(w, x, rows, begin, end, out, stride, next);
  with_coding(w.coding(), [&](auto coding) {
    if constexpr (may_have_offsets(coding.value)) {
      if (w.zero == 0) {
        return linear_coded<coding.value, Layout::kOffsets>(w, x, rows, begin, end, out, stride,
                                                            next);
      }
    }
    if constexpr (zero_shift(coding.value) >= 0) {
      linear_coded<coding.value, Layout::kZero>(w, x, rows, begin, end, out, stride, next);
    }
  });
}

}  // namespace exo::EXO_ISA

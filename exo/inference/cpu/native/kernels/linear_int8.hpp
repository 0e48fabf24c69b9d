// y = W x for affine weights and int8 activations: which tile computes which rows and blocks.
#pragma once

#include <cstdlib>

#include "linear_blocks.hpp"
#include "linear_super.hpp"
#ifdef EXO_TILES
#include "tiles_amx.hpp"
#endif

namespace exo::EXO_ISA {

using PackedTile = void (*)(const Matrix&, const QuantizedRows&, const uint8_t*, int64_t, int64_t,
                            float*, int64_t);
using PanelTile = void (*)(const Matrix&, const Panel&, const PanelSteps&, int64_t, int64_t, float*,
                           int64_t);

// Tables of the tiles for 1 to 8 rows; an instruction set with few registers takes 4 at most.
template <Coding C, bool SUPER, int M>
constexpr PackedTile packed_tile() {
  if constexpr (M > Ops::kMaxRows)
    return nullptr;
  else if constexpr (SUPER)
    return super_block_from_packed<C, M>;
  else
    return block_from_packed<C, M>;
}
template <Coding C, bool SUPER>
constexpr PackedTile kPackedTiles[] = {nullptr,
                                       packed_tile<C, SUPER, 1>(),
                                       packed_tile<C, SUPER, 2>(),
                                       packed_tile<C, SUPER, 3>(),
                                       packed_tile<C, SUPER, 4>(),
                                       packed_tile<C, SUPER, 5>(),
                                       packed_tile<C, SUPER, 6>(),
                                       packed_tile<C, SUPER, 7>(),
                                       packed_tile<C, SUPER, 8>()};
template <int BITS, int M>
constexpr PanelTile panel_tile() {
  if constexpr (M <= Ops::kMaxRows) return block_from_panel<BITS, M>;
  return nullptr;
}
template <int BITS>
constexpr PanelTile kPanelTiles[] = {nullptr,
                                     panel_tile<BITS, 1>(),
                                     panel_tile<BITS, 2>(),
                                     panel_tile<BITS, 3>(),
                                     panel_tile<BITS, 4>(),
                                     panel_tile<BITS, 5>(),
                                     panel_tile<BITS, 6>(),
                                     panel_tile<BITS, 7>(),
                                     panel_tile<BITS, 8>()};

// Memory of this thread for panels, kept from call to call.
inline uint8_t* scratch(size_t bytes) {
  static thread_local struct Scratch {
    uint8_t* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
  } held;
  if (held.size < bytes) {
    std::free(held.data);
    held.size = (bytes + 4095) / 4096 * 4096;
    held.data = static_cast<uint8_t*>(std::aligned_alloc(4096, held.size));
  }
  return held.data;
}

inline constexpr int64_t kPanelBytes = 512 << 10;  // decoded weights that stay in the L2 cache

// Up to so many rows every tile reads the packed weights; with more, decoding them once pays.
#ifdef EXO_TILES
inline constexpr int64_t kPackedRows = Ops::kMaxRows;
#else
inline constexpr int64_t kPackedRows = Ops::kPackedRows;
#endif

template <Coding C, bool SUPER>
void linear_coded(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin, int64_t end,
                  float* out, int64_t stride) {
  const size_t flag_bytes = static_cast<size_t>(w.groups());
  if (rows <= kPackedRows) {
    // A block is read from memory for the first tile of rows and from a cache for the others.
    uint8_t* fine = scratch(static_cast<size_t>(kPackedRows) * flag_bytes);
    for (int64_t row = 0, at = 0; row < rows; row += Ops::kMaxRows, at += w.groups()) {
      const int64_t left = rows - row;
      find_fine_groups(x, row, left < Ops::kMaxRows ? left : Ops::kMaxRows, fine + at);
    }
    for (int64_t b = begin; b < end; b++) {
      const uint8_t* any = fine;
      for (int64_t row = 0; row < rows; row += Ops::kMaxRows, any += w.groups()) {
        const int64_t left = rows - row;
        kPackedTiles<C, SUPER>[left < Ops::kMaxRows ? left : Ops::kMaxRows](w, x, any, row, b, out,
                                                                            stride);
      }
    }
    return;
  }
  const int64_t slab_bytes = w.cols * kBlockRows, scale_bytes = w.groups() * 128;
  const int64_t panel_bytes = slab_bytes + scale_bytes;
  const int64_t several = kPanelBytes / panel_bytes < 1 ? 1 : kPanelBytes / panel_bytes;
  const int64_t step = several < end - begin ? several : end - begin;
#ifdef EXO_TILES
  const size_t tile_bytes = TileSteps::bytes(w.groups());
#else
  const size_t tile_bytes = static_cast<size_t>(2 * w.groups()) * sizeof(PanelStep);
#endif
  uint8_t* memory = scratch(static_cast<size_t>(step * panel_bytes) + tile_bytes + flag_bytes);
  uint8_t* tile_memory = memory + step * panel_bytes;
  uint8_t* fine = tile_memory + tile_bytes;
#ifdef EXO_TILES
  const TileUnit::Session session(w.group);
  constexpr int64_t kRows = TileUnit::kRows;
#else
  constexpr int64_t kRows = Ops::kMaxRows;
#endif
  for (int64_t b0 = begin; b0 < end; b0 += step) {
    const int64_t count = end - b0 < step ? end - b0 : step;
    const auto panel = [&](int64_t i) {
      uint8_t* at = memory + i * panel_bytes;
      return Panel{at, reinterpret_cast<float*>(at + slab_bytes)};
    };
    for (int64_t i = 0; i < count; i++) {
      if constexpr (SUPER) {
        decode_super_block<C>(w, b0 + i, panel(i));
      } else {
        decode_block<C>(w, b0 + i, panel(i));
      }
    }
    for (int64_t row = 0; row < rows; row += kRows) {
      const int64_t m = rows - row < kRows ? rows - row : kRows;
      find_fine_groups(x, row, m, fine);
#ifdef EXO_TILES
      const TileSteps todo(tile_memory, x, row, m, fine);
#else
      PanelSteps todo{reinterpret_cast<PanelStep*>(tile_memory), {}};
      list_steps(w, x, row, fine, todo);
#endif
      for (int64_t i = 0; i < count; i++) {
#ifdef EXO_TILES
        tile_from_panel(w, panel(i), todo, row, m, b0 + i, out, stride);
#else
        kPanelTiles<weight_bits<C>()>[m](w, panel(i), todo, row, b0 + i, out, stride);
#endif
      }
    }
  }
}

inline void linear_int8(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                        int64_t end, float* out, int64_t stride) {
  with_coding(w.coding(), [&](auto coding) {
    if constexpr (may_be_super(coding.value)) {
      if (w.is_super) {
        return linear_coded<coding.value, true>(w, x, rows, begin, end, out, stride);
      }
    }
    if constexpr (may_be_plain(coding.value)) {
      linear_coded<coding.value, false>(w, x, rows, begin, end, out, stride);
    }
  });
}

}  // namespace exo::EXO_ISA

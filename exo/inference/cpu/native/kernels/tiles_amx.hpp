// Blocks of 16 rows by 16 outputs in the AMX tile registers: the same integers as the dot products
// of ops_avx512.hpp, then the same float steps, so the same bits.
#pragma once

#include <immintrin.h>

#include "linear_blocks.hpp"

namespace exo::EXO_ISA {

#ifdef EXO_AMX_EMULATED
// The three instructions used, in plain C++: proves the logic on processors without AMX.
struct TileUnit {
  static constexpr int64_t kRows = 16;
  struct Session {
    explicit Session(int) {}
  };
  int32_t sums[16][16] = {};
  EXO_INLINE void zero() { std::memset(sums, 0, sizeof sums); }
  void multiply(const int8_t* a, int64_t stride, const uint8_t* slabs, int columns) {
    for (int m = 0; m < 16; m++) {
      for (int n = 0; n < 16; n++) {
        for (int k = 0; k < columns; k++) {
          sums[m][n] += a[m * stride + k] * slabs[k / 4 * 64 + 4 * n + k % 4];
        }
      }
    }
  }
  EXO_INLINE void store(int32_t* out) { std::memcpy(out, sums, sizeof sums); }
};
#else
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tile 0: sums, 16 rows of 16 integers. Tile 1: activations, 16 rows of `columns` bytes.
// Tile 2: weights, columns / 4 slabs of 64 bytes.
struct TileUnit {
  static constexpr int64_t kRows = 16;
  // Tiles are configured for one group size, and released so that a context switch need not save
  // them.
  struct Session {
    explicit Session(int group) {
      const int columns = group < 64 ? group : 64;
      TileConfig config;
      config.row_bytes[0] = 64, config.rows[0] = 16;
      config.row_bytes[1] = static_cast<uint16_t>(columns), config.rows[1] = 16;
      config.row_bytes[2] = 64, config.rows[2] = static_cast<uint8_t>(columns / 4);
      // gcc 12 drops the stores above otherwise: it does not see that the instruction reads memory.
      asm volatile("" ::"r"(&config) : "memory");
      _tile_loadconfig(&config);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };
  EXO_INLINE void zero() { _tile_zero(0); }
  EXO_INLINE void multiply(const int8_t* a, int64_t stride, const uint8_t* slabs, int) {
    _tile_loadd(1, a, stride);
    _tile_loadd(2, slabs, 64);
    _tile_dpbsud(0, 1, 2);
  }
  EXO_INLINE void store(int32_t* out) { _tile_stored(0, out, 64); }
};
#endif

// Adds one group to 16 rows by 16 outputs. Rows past the last one of a short tile are computed from
// whatever the buffer holds and dropped.
EXO_INLINE void add_tile_group(const Matrix& w, const Panel& panel, const QuantizedPart& x,
                               int64_t row, int64_t rows, int64_t g, int32_t* sum, Ops::Float* y) {
  const int64_t groups = w.groups();
  const int columns = w.group < 64 ? w.group : 64;
  const float* scales = x.scales + row * groups + g;
  const float* sums = x.sums + row * groups + g;
  TileUnit tiles;
  tiles.zero();
  for (int k = 0; k < w.group; k += columns) {
    const int64_t column = g * w.group + k;
    tiles.multiply(x.values + row * w.cols + column, w.cols, panel.slabs + column * kBlockRows,
                   columns);
  }
  tiles.store(sum);
  const Ops::Float scale = Ops::from_f32(panel.scales + 32 * g);
  const Ops::Float offset = Ops::from_f32(panel.scales + 32 * g + 16);
#pragma GCC unroll 16
  for (int m = 0; m < 16; m++) {
    const int64_t at = (m < rows ? m : rows - 1) * groups;
    y[m] =
        Ops::add_group(y[m], scale, scales[at], _mm512_load_si512(sum + 16 * m), offset, sums[at]);
  }
}

inline void tile_from_panel(const Matrix& w, const Panel& panel, const QuantizedRows& x,
                            const uint8_t* any_fine, int64_t row, int64_t rows, int64_t block,
                            float* out, int64_t stride) {
  // Two buffers: the tile unit fills one while the other's floats are added.
  alignas(64) int32_t sums[2][256];
  Ops::Float y[16];
  for (auto& lane : y) lane = Ops::zero_float();
  int64_t turn = 0;
  for (int64_t g = 0; g < w.groups(); g++) {
    add_tile_group(w, panel, x.coarse, row, rows, g, sums[turn++ % 2], y);
    if (any_fine[g]) add_tile_group(w, panel, x.fine, row, rows, g, sums[turn++ % 2], y);
  }
  for (int64_t m = 0; m < rows; m++) finish(w, block, y[m], out + (row + m) * stride);
}

}  // namespace exo::EXO_ISA

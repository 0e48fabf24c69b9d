// Plain groups in the AMX tile registers, 16 rows by 16 outputs: the same integers as the dot
// products of an `Ops`, then the same steps, so the same bits.
#pragma once

#include "plain_panels.hpp"
#include "tiles.hpp"

namespace exo::EXO_ISA {

#ifdef EXO_AMX_EMULATED
// The three instructions used, in plain C++: proves the logic on processors without AMX.
struct TileUnit {
  int32_t sums[16][16] = {};
  EXO_INLINE void zero() { std::memset(sums, 0, sizeof sums); }
  void multiply(const int8_t* a, int64_t stride, const uint8_t* slabs, int columns) {
    int8_t rows[16][kTileCols];
    uint8_t own[kTileCols / 4][64];
    for (int m = 0; m < 16; m++) std::memcpy(rows[m], a + m * stride, columns);
    std::memcpy(own, slabs, columns / 4 * sizeof own[0]);
    add_products(rows, own, columns);
  }
  EXO_UNCHECKED void add_products(const int8_t (*rows)[kTileCols], const uint8_t (*own)[64],
                                  int columns) {
    for (int m = 0; m < 16; m++) {
      for (int k = 0; k < columns; k++) {
        for (int n = 0; n < 16; n++) sums[m][n] += rows[m][k] * own[k / 4][4 * n + k % 4];
      }
    }
  }
  EXO_INLINE void store(int32_t* out) { std::memcpy(out, sums, sizeof sums); }
};
#else
struct TileUnit {
  EXO_INLINE void zero() { _tile_zero(0); }
  EXO_INLINE void multiply(const int8_t* a, int64_t stride, const uint8_t* slabs, int) {
    _tile_loadd(4, a, stride);
    _tile_loadd(6, slabs, 64);
    _tile_dpbsud(0, 4, 6);
  }
  EXO_INLINE void store(int32_t* out) { _tile_stored(0, out, 64); }
};
#endif

// The integer sums of one group, 16 rows by 16 outputs, `values` being the first row's. Rows past
// the last one of a short tile are computed from whatever the buffer holds and dropped.
EXO_INLINE void multiply_group(const Matrix& w, const Panel& panel, const int8_t* values,
                               int64_t stride, int64_t group, int32_t* sum) {
  const int columns = w.group < kTileCols ? w.group : kTileCols;
  TileUnit tiles;
  tiles.zero();
  for (int k = 0; k < w.group; k += columns) {
    tiles.multiply(values + k, stride, panel.slabs + (group * w.group + k) * kBlockRows, columns);
  }
  tiles.store(sum);
}

template <bool OFFSETS, typename Steps>
void tile_from_panel(const Matrix& w, const Panel& panel, const Steps& todo, Ahead ahead,
                     int64_t row, int64_t rows, int64_t block, float* out, int64_t stride) {
  // A step's integers are read one step after they are written: the tile unit's stores are not
  // forwarded to loads, which would else wait for them.
  alignas(64) int32_t sums[2][256];
  Ops::Float y[16];
  // Indexed by a constant everywhere, or the compiler keeps all of y in memory.
#pragma GCC unroll 16
  for (int m = 0; m < 16; m++) y[m] = Ops::zero_float();
  const auto multiply = [&](int64_t i) __attribute__((always_inline)) {
    const auto& step = todo.steps[i];
    multiply_group(w, panel, step.values, todo.stride, step.group, sums[i % 2]);
  };
  multiply(0);
  PartSums<16> parts(w.parts, w.parts);
  int half = 0;  // of a part: its groups, or what is left over
  const auto close = [&]() __attribute__((always_inline)) {
    if (half % 2 == 0) {
      parts.close(y);
    } else {
      parts.join(half / 2, y);
#pragma GCC unroll 16
      for (int m = 0; m < 16; m++) y[m] = Ops::zero_float();
    }
  };
  const int64_t count = todo.ends[2 * w.parts - 1];
  for (int64_t i = 0; i < count; i++) {
    if (i == todo.ends[half]) {
      close();
      half += todo.ends[half + 1] == i ? 2 : 1;  // nothing is fine
    }
    ahead.fetch();
    if (i + 1 < count) multiply(i + 1);
    const auto& step = todo.steps[i];
    const float* scales = panel.scales + panel_scales(OFFSETS) * step.group;
    const Ops::Float scale = Ops::from_f32(scales);
    Ops::Float offset = Ops::zero_float();
    if constexpr (OFFSETS) offset = Ops::from_f32(scales + kBlockRows);
#pragma GCC unroll 16
    for (int m = 0; m < 16; m++) {
      const Ops::Int sum = Ops::load_int(sums[i % 2] + 16 * m);
      if constexpr (OFFSETS) {
        y[m] = Ops::add_group(y[m], scale, step.scale[m], sum, offset, step.sum[m]);
      } else {
        y[m] = Ops::add_scaled(y[m], scale, step.scale[m], Ops::add_to_all(sum, step.less[m]));
      }
    }
  }
  close();
  for (int m = 0; m < rows; m++) finish(w, block, parts.total(m), out + (row + m) * stride);
}

}  // namespace exo::EXO_ISA

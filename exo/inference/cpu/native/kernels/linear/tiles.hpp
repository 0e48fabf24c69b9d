// The AMX tile registers: of 16 rows by up to 64 columns of bytes, and their sums by 16 outputs.
#pragma once

#include "blocks.hpp"

namespace exo::EXO_ISA {

// Rows from which on tiles are quicker than the dot products of an `Ops`: what is decoded for them
// costs more. Where they are emulated, all that tests ask for.
#ifdef EXO_AMX_EMULATED
inline constexpr int64_t kTilesFrom = 9;
#else
inline constexpr int64_t kTilesFrom = 64;
#endif

inline constexpr int kTileRows = 16, kTileCols = 64;
inline constexpr int kTileSums = kTileRows * kBlockRows;

#ifdef EXO_AMX_EMULATED
struct TileSession {
  explicit TileSession(int) {}
};
#else
// Tiles 0 to 3: sums, 16 rows of 16 integers. 4 and 5: activations, 16 rows of `columns` bytes. 6
// and 7: weights, columns / 4 slabs. Released so that a context switch need not save them.
class TileSession {
 public:
  explicit TileSession(int columns) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) {
      const bool is_rows = tile == 4 || tile == 5, is_weights = tile >= 6;
      config.row_bytes[tile] = static_cast<uint16_t>(is_rows ? columns : 64);
      config.rows[tile] = static_cast<uint8_t>(is_weights ? columns / 4 : kTileRows);
    }
    // gcc 12 drops the stores above otherwise: it does not see that the instruction reads memory.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};
#endif

}  // namespace exo::EXO_ISA

// A unit, 32 columns of 16 rows, as matrix.hpp lays it out: how its values get in and out.
#pragma once

#include <cstdint>
#include <cstring>

#include "slabs.hpp"

namespace exo {

// One row's 32 values into a unit; four columns at a time, a byte each.
template <int BITS>
void put_unit(uint8_t* unit, int row, const uint8_t* values) {
  uint32_t slabs[kSlabs], lines[BITS] = {};
  std::memcpy(slabs, values, sizeof slabs);
  for (int slab = 0; slab < kSlabs; slab++) {
    const Pieces pieces = pieces_of(BITS, slab);
    for (int i = 0; i < pieces.count; i++) {
      const auto [line, low, width, at] = pieces.piece[i];
      const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
      lines[line] |= (slabs[slab] >> at & mask) << low;
    }
  }
  for (int line = 0; line < BITS; line++) {
    std::memcpy(unit + line * kLine + 4 * row, lines + line, 4);
  }
}

// The value of column i of a unit.
inline int value_at(const uint8_t* unit, int bits, int row, int i) {
  const Pieces pieces = pieces_of(bits, i / 4);
  int value = 0;
  for (int p = 0; p < pieces.count; p++) {
    const auto [line, low, width, at] = pieces.piece[p];
    value |= (unit[line * kLine + 4 * row + i % 4] >> low & ((1 << width) - 1)) << at;
  }
  return value;
}

// n0 n1 n2 n3 n4 n5 n6 n7 (nibbles, lowest first) -> bytes (n0 n4) (n1 n5) (n2 n6) (n3 n7).
inline uint32_t pair_nibbles(uint32_t word) {
  const auto spread = [](uint32_t half) {
    half = (half | half << 8) & 0x00ff00ff;
    return (half | half << 4) & 0x0f0f0f0f;
  };
  return spread(word & 0xffff) | spread(word >> 16) << 4;
}

// One row's 32 values from a little-endian bit stream, as MLX stores them.
template <int BITS>
void pack_unit(uint8_t* unit, int row, const uint8_t* stream) {
  if constexpr (BITS == 4) {
    for (int line = 0; line < 4; line++) {
      uint32_t word;
      std::memcpy(&word, stream + 4 * line, 4);
      word = pair_nibbles(word);
      std::memcpy(unit + line * kLine + 4 * row, &word, 4);
    }
  } else if constexpr (BITS == 8) {
    put_unit<BITS>(unit, row, stream);
  } else {
    uint8_t values[kUnitCols];
    for (int i = 0; i < kUnitCols; i++) {
      const int bit = i * BITS;
      uint32_t word = stream[bit / 8];
      if (bit % 8 + BITS > 8) word |= static_cast<uint32_t>(stream[bit / 8 + 1]) << 8;
      values[i] = static_cast<uint8_t>(word >> (bit % 8) & ((1u << BITS) - 1));
    }
    put_unit<BITS>(unit, row, values);
  }
}

}  // namespace exo

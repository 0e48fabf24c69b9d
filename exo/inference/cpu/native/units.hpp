// A unit, 32 columns of 16 rows, as matrix.hpp lays it out: how its values get in and out.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "matrix.hpp"

namespace exo {

inline constexpr int kLine = 64;
inline constexpr int kSlabs = 8;

// Where a bit plane puts (slab, row, column j of the slab): line, byte, shift.
struct Plane {
  int first_line, slabs_per_line, low_bit, width;
};

struct Planes {
  int count;
  Plane plane[2];
};

constexpr Planes planes_of(int bits) {
  switch (bits) {
    case 2:
      return {1, {{0, 4, 0, 2}, {}}};
    case 3:
      return {2, {{0, 4, 0, 2}, {2, 8, 2, 1}}};
    case 4:
      return {1, {{0, 2, 0, 4}, {}}};
    case 5:
      return {2, {{0, 2, 0, 4}, {4, 8, 4, 1}}};
    case 6:
      return {2, {{0, 2, 0, 4}, {4, 4, 4, 2}}};
    case 8:
      return {1, {{0, 1, 0, 8}, {}}};
    default:
      throw std::invalid_argument("bits " + std::to_string(bits));
  }
}

// One row's 32 values into a unit; four columns at a time, a byte each.
template <int BITS>
void put_unit(uint8_t* unit, int row, const uint8_t* values) {
  constexpr Planes planes = planes_of(BITS);
  uint32_t slabs[kSlabs];
  std::memcpy(slabs, values, sizeof slabs);
  for (int p = 0; p < planes.count; p++) {
    const auto [first_line, per_line, low_bit, width] = planes.plane[p];
    const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    for (int line = 0; line < kSlabs / per_line; line++) {
      uint32_t word = 0;
      for (int i = 0; i < per_line; i++) {
        word |= (slabs[line * per_line + i] >> low_bit & mask) << (i * width);
      }
      std::memcpy(unit + (first_line + line) * kLine + 4 * row, &word, 4);
    }
  }
}

// The value of column i of a unit.
inline int value_at(const uint8_t* unit, const Planes& planes, int row, int i) {
  int value = 0;
  for (int p = 0; p < planes.count; p++) {
    const auto [first_line, per_line, low_bit, width] = planes.plane[p];
    const int slab = i / 4;
    const int byte = unit[(first_line + slab / per_line) * kLine + 4 * row + i % 4];
    value |= (byte >> (slab % per_line * width) & ((1 << width) - 1)) << low_bit;
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

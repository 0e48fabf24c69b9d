// The IQ formats of less than four bits: blocks of 256 columns. Sources as in blocks.hpp.
#pragma once

#include <vector>

#include "../ggml.hpp"
#include "super_blocks.hpp"

namespace exo::ggml {

// The IQ formats of less than four bits: entries of a codebook, with signs. The first of a unit's
// values is the entry's first, and bit j of `signs` is of its j-th.
struct GridShape {
  int entries, width;
};

inline constexpr GridShape kGridShapes[kGrids] = {{256, 8}, {512, 8}, {1024, 8},
                                                  {256, 4}, {512, 4}, {2048, 8}};

inline std::vector<uint8_t> grids[kGrids];

template <Grid G>
inline void look_up(int entry, int signs, uint8_t* values) {
  constexpr int kWidth = kGridShapes[static_cast<int>(G)].width;
  const uint8_t* places = grids[static_cast<int>(G)].data() + entry * kWidth;
  for (int j = 0; j < kWidth; j++) {
    values[j] = static_cast<uint8_t>(places[j] | (signs >> j & 1) << 3);
  }
}

// Seven of eight signs: an even number of all is negative.
inline int eight_signs(uint32_t seven) {
  const int known = static_cast<int>(seven & 127);
  return known | (__builtin_popcount(static_cast<unsigned>(known)) & 1) << 7;
}

inline uint32_t read_u32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// All scales are odd.
inline uint8_t odd(uint32_t code) { return static_cast<uint8_t>(2 * code + 1); }

// Four bits each, the lower ones first.
inline void unpack_odd_nibbles(const uint8_t* packed, int count, uint8_t* codes) {
  for (int i = 0; i < count; i++) codes[i] = odd(packed[i / 2] >> (4 * (i % 2)) & 15);
}

struct IQ2_XXS {
  static constexpr int kBits = 4, kBytes = 66;
  static constexpr Table kTable = Table::kIq2;
  static constexpr Grid kGrid = Grid::kIq2Xxs;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    for (int g = 0; g < 8; g++) {
      const uint8_t* quants = block + 2 + 8 * g;
      const uint32_t more = read_u32(quants + 4);
      row.codes[2 * g] = row.codes[2 * g + 1] = odd(more >> 28);
      for (int i = 0; i < 4; i++, values += 8) {
        look_up<kGrid>(quants[i], eight_signs(more >> (7 * i)), values);
      }
    }
  }
};

struct IQ2_XS {
  static constexpr int kBits = 4, kBytes = 74;
  static constexpr Table kTable = Table::kIq2;
  static constexpr Grid kGrid = Grid::kIq2Xs;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    unpack_odd_nibbles(block + 66, 16, row.codes);
    for (int i = 0; i < 32; i++, values += 8) {
      const uint32_t quant = read_u16(block + 2 + 2 * i);
      look_up<kGrid>(static_cast<int>(quant & 511), eight_signs(quant >> 9), values);
    }
  }
};

struct IQ2_S {
  static constexpr int kBits = 4, kBytes = 82;
  static constexpr Table kTable = Table::kIq2;
  static constexpr Grid kGrid = Grid::kIq2S;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *quants = block + 2, *signs = block + 34, *high = block + 66;
    row.d = read_u16(block);
    unpack_odd_nibbles(block + 74, 16, row.codes);
    for (int i = 0; i < 32; i++, values += 8) {
      look_up<kGrid>(quants[i] | (high[i / 4] >> (2 * (i % 4)) & 3) << 8, signs[i], values);
    }
  }
};

struct IQ3_XXS {
  static constexpr int kBits = 4, kBytes = 98;
  static constexpr Table kTable = Table::kIq3;
  static constexpr Grid kGrid = Grid::kIq3Xxs;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t* quants = block + 2;
    row.d = read_u16(block);
    for (int g = 0; g < 8; g++) {
      const uint32_t more = read_u32(block + 66 + 4 * g);
      row.codes[g] = odd(more >> 28);
      for (int i = 0; i < 4; i++, quants += 2, values += 8) {
        const int signs = eight_signs(more >> (7 * i));
        look_up<kGrid>(quants[0], signs, values);
        look_up<kGrid>(quants[1], signs >> 4, values + 4);
      }
    }
  }
};

struct IQ3_S {
  static constexpr int kBits = 4, kBytes = 110;
  static constexpr Table kTable = Table::kIq3s;
  static constexpr Grid kGrid = Grid::kIq3S;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *quants = block + 2, *high = block + 66, *signs = block + 74;
    row.d = read_u16(block);
    unpack_odd_nibbles(block + 106, 8, row.codes);
    for (int i = 0; i < 64; i++, values += 4) {
      const int entry = quants[i] | (high[i / 8] >> (i % 8) & 1) << 8;
      look_up<kGrid>(entry, signs[i / 2] >> (4 * (i % 2)), values);
    }
  }
};

struct IQ1_S {
  static constexpr int kBits = 4, kBytes = 50;
  static constexpr Table kTable = Table::kIq1;
  static constexpr Grid kGrid = Grid::kIq1;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    for (int g = 0; g < 8; g++) {
      const uint32_t high = read_u16(block + 34 + 2 * g);
      row.codes[2 * g] = row.codes[2 * g + 1] = odd(high >> 12 & 7);
      for (int i = 0; i < 4; i++, values += 8) {
        const int entry = block[2 + 4 * g + i] | static_cast<int>(high >> (3 * i) & 7) << 8;
        look_up<kGrid>(entry, high & 0x8000 ? 255 : 0, values);
      }
    }
  }
};

// The float16 stands in the upper bits of four words of scales.
struct IQ1_M {
  static constexpr int kBits = 4, kBytes = 56;
  static constexpr Table kTable = Table::kIq1;
  static constexpr Grid kGrid = Grid::kIq1;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *high = block + 32, *scales = block + 48;
    int d = 0;
    for (int i = 0; i < 4; i++) d |= read_u16(scales + 2 * i) >> 12 << (4 * i);
    row.d = static_cast<uint16_t>(d);
    for (int i = 0; i < 16; i++) {
      row.codes[i] = odd(read_u16(scales + i / 4 * 2) >> (3 * (i % 4)) & 7);
    }
    for (int i = 0; i < 32; i++, values += 8) {
      const int more = high[i / 2] >> (4 * (i % 2));
      look_up<kGrid>(block[i] | (more & 7) << 8, more & 8 ? 255 : 0, values);
    }
  }
};

}  // namespace exo::ggml

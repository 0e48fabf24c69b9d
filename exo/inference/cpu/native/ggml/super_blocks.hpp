// Blocks of 256 columns: the K formats and IQ4_XS. Sources as in blocks.hpp.
#pragma once

#include "blocks.hpp"

namespace exo::ggml {

// Formats with super-blocks of 256 columns. `unpack` writes 256 values and what a header holds of
// one row (matrix.hpp): the codes of 16 or of 8 groups.
struct SuperRow {
  uint16_t d;
  uint16_t factor;
  uint8_t codes[16];
  uint8_t mins[8];
};

inline uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// Q4_K and Q5_K hold 8 scales and 8 minima of 6 bits in 12 bytes.
inline void unpack_six_bits(const uint8_t* packed, SuperRow& row) {
  for (int i = 0; i < 4; i++) {
    row.codes[i] = packed[i] & 63;
    row.mins[i] = packed[i + 4] & 63;
    row.codes[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | packed[i] >> 6 << 4);
    row.mins[i + 4] = static_cast<uint8_t>(packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4);
  }
}

struct Q2_K {
  static constexpr int kBits = 2, kBytes = 84;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t* quants = block + 16;
    std::memcpy(row.codes, block, 16);
    row.d = read_u16(block + 80), row.factor = negated(read_u16(block + 82));
    for (int half = 0; half < 2; half++, quants += 32) {
      for (int shift = 0; shift < 8; shift += 2, values += 32) {
        for (int i = 0; i < 32; i++) values[i] = quants[i] >> shift & 3;
      }
    }
  }
};

struct Q3_K {
  static constexpr int kBits = 3, kBytes = 110;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *high = block, *quants = block + 32, *packed = block + 96;
    row.d = read_u16(block + 108);
    for (int i = 0; i < 16; i++) {
      const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
      const int above = packed[8 + i % 4] >> (i / 4 * 2) & 3;
      row.codes[i] = static_cast<uint8_t>((low | above << 4) - 32);
    }
    for (int j = 0; j < 8; j++, values += 32) {
      const uint8_t* low = quants + j / 4 * 32;
      for (int i = 0; i < 32; i++) {
        values[i] = static_cast<uint8_t>((low[i] >> (j % 4 * 2) & 3) | (high[i] >> j & 1) << 2);
      }
    }
  }
};

struct Q4_K {
  static constexpr int kBits = 4, kBytes = 144;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block), row.factor = negated(read_u16(block + 2));
    unpack_six_bits(block + 4, row);
    const uint8_t* quants = block + 16;
    for (int j = 0; j < 4; j++, quants += 32, values += 64) {
      for (int i = 0; i < 32; i++) {
        values[i] = quants[i] & 15;
        values[i + 32] = quants[i] >> 4;
      }
    }
  }
};

struct Q5_K {
  static constexpr int kBits = 5, kBytes = 176;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block), row.factor = negated(read_u16(block + 2));
    unpack_six_bits(block + 4, row);
    const uint8_t *high = block + 16, *quants = block + 48;
    for (int j = 0; j < 4; j++, quants += 32, values += 64) {
      for (int i = 0; i < 32; i++) {
        const int fifth = high[i] >> (2 * j);
        values[i] = static_cast<uint8_t>((quants[i] & 15) | (fifth & 1) << 4);
        values[i + 32] = static_cast<uint8_t>(quants[i] >> 4 | (fifth & 2) << 3);
      }
    }
  }
};

struct Q6_K {
  static constexpr int kBits = 6, kBytes = 210;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *low = block, *high = block + 128;
    std::memcpy(row.codes, block + 192, 16);
    row.d = read_u16(block + 208);
    for (int half = 0; half < 2; half++, low += 64, high += 32, values += 128) {
      for (int i = 0; i < 32; i++) {
        values[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
        values[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] & 12) << 2);
        values[i + 64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] & 48));
        values[i + 96] = static_cast<uint8_t>(low[i + 32] >> 4 | (high[i] & 192) >> 2);
      }
    }
  }
};

struct IQ4_XS {
  static constexpr int kBits = 4, kBytes = 136;
  static constexpr Table kTable = Table::kIq4;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    const int high = read_u16(block + 2);
    for (int i = 0; i < 8; i++) {
      const int low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
      row.codes[i] = static_cast<uint8_t>((low | (high >> (2 * i) & 3) << 4) - 32);
      unpack_nibbles(block + 8 + 16 * i, values + 32 * i);
    }
  }
};

}  // namespace exo::ggml

// Blocks of 32 columns as https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h defines
// them (block_q4_0 and so on), their values as dequantize_row_* in ggml-quants.c reads them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../matrix.hpp"

namespace exo::ggml {

inline uint16_t read_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

inline uint16_t bfloat_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Formats with one scale in 32 columns. `unpack` writes the 32 values and returns scale and offset
// as kDType: w = scale * value + offset, or with a kZero scale * (value - kZero).
struct Pair {
  uint16_t scale, offset = 0;
};

inline void unpack_nibbles(const uint8_t* quants, uint8_t* values) {
  for (int i = 0; i < 16; i++) {
    values[i] = quants[i] & 15;
    values[i + 16] = quants[i] >> 4;
  }
}

inline void unpack_five_bits(const uint8_t* high, const uint8_t* quants, uint8_t* values) {
  unpack_nibbles(quants, values);
  for (int i = 0; i < 4; i++) {
    // Eight bits to the lowest ones of eight bytes.
    const uint64_t apart = high[i] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t bits = (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    uint64_t eight;
    std::memcpy(&eight, values + 8 * i, 8);
    eight |= bits << 4;
    std::memcpy(values + 8 * i, &eight, 8);
  }
}

struct Q4_0 {
  static constexpr int kBits = 4, kBytes = 18;
  static constexpr int kZero = 8;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 2, values);
    return {read_u16(block)};
  }
};

struct Q4_1 {
  static constexpr int kBits = 4, kBytes = 20;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 4, values);
    return {read_u16(block), read_u16(block + 2)};
  }
};

struct Q5_0 {
  static constexpr int kBits = 5, kBytes = 22;
  static constexpr int kZero = 16;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_five_bits(block + 2, block + 6, values);
    return {read_u16(block)};
  }
};

struct Q5_1 {
  static constexpr int kBits = 5, kBytes = 24;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_five_bits(block + 4, block + 8, values);
    return {read_u16(block), read_u16(block + 2)};
  }
};

struct Q8_0 {
  static constexpr int kBits = 8, kBytes = 34;
  static constexpr int kZero = 128;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    for (int i = 0; i < 32; i++) values[i] = block[2 + i] ^ 0x80;
    return {read_u16(block)};
  }
};

struct IQ4_NL {
  static constexpr int kBits = 4, kBytes = 18;
  static constexpr Table kTable = Table::kIq4;
  static constexpr int kZero = 128;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 2, values);
    return {read_u16(block)};
  }
};

// The scale is a power of two.
struct MXFP4 {
  static constexpr int kBits = 4, kBytes = 17;
  static constexpr Table kTable = Table::kE2m1;
  static constexpr int kZero = kE2m1Zero;
  static constexpr DType kDType = DType::kBFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 1, values);
    return {bfloat_of(std::ldexp(1.f, block[0] - 128))};
  }
};

}  // namespace exo::ggml

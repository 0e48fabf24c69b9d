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

// A float that a float16 holds exactly; infinity for one that is too large.
inline uint16_t half_of(float value) {
  // Multiplying by 2^-112 moves the exponent's bias, and makes what is subnormal so.
  const float magnitude = std::fabs(value) * 0x1p-112f;
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  return static_cast<uint16_t>((std::signbit(value) ? 0x8000 : 0) |
                               (std::min(bits, 0x7c00u << 13) >> 13));
}

inline uint16_t bfloat_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Formats with one scale in 32 columns. `unpack` writes the 32 values and returns scale and offset
// as kDType: w = scale * value + offset.
struct Pair {
  uint16_t scale, offset;
};

// Of w = scale * (value - 2^power).
inline Pair about(int power, const uint8_t* block) {
  const uint16_t scale = read_u16(block);
  const int exponent = scale & 0x7c00, more = power << 10;
  if (exponent != 0 && exponent + more < 0x7c00) {
    return {scale, static_cast<uint16_t>((scale + more) ^ 0x8000)};
  }
  const float zero = static_cast<float>(1 << power);
  return {scale, half_of(-zero * to_float(block, DType::kFloat16, 0))};
}

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
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 2, values);
    return about(3, block);
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
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_five_bits(block + 2, block + 6, values);
    return about(4, block);
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
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    for (int i = 0; i < 32; i++) values[i] = block[2 + i] ^ 0x80;
    return about(7, block);
  }
};

struct IQ4_NL {
  static constexpr int kBits = 4, kBytes = 18;
  static constexpr Table kTable = Table::kIq4;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 2, values);
    return about(7, block);
  }
};

// The scale is a power of two.
struct MXFP4 {
  static constexpr int kBits = 4, kBytes = 17;
  static constexpr Table kTable = Table::kE2m1;
  static constexpr DType kDType = DType::kBFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 1, values);
    const float scale = std::ldexp(1.f, block[0] - 128);
    return {bfloat_of(scale), bfloat_of(-12.f * scale)};
  }
};

}  // namespace exo::ggml

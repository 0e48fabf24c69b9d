// 16 outputs as plain arrays: right on every machine, and what the others are tested against.
//
// An `Ops` says how 16 outputs (one lane each) are computed together:
//   Bytes: a slab, unsigned byte 4 * lane + j; Int, Float: 16 lanes.
//   dot<BITS>(sum, weights, four): sum[lane] += sum over j of weights[4 * lane + j] * four[j], the
//   weights below 2^BITS; kWeightBits 8: it is the same for all BITS. row_limits: see
//   vector.hpp. Where sums of 16 bits cost less: `products` of a slab, `add_products` of
//   another of slabs_in_16_bits(bits) in all, `add_few` to a sum. With kTakes128 dot<8> takes 128
//   from each weight. add_to_all: one integer, to every lane.
//   entries(table, indices): of sixteen bytes those that are asked for; permuted_entries: the same
//   where only four bits of an index are to be looked at.
//   add_group: the two fused steps that linear/blocks.hpp gives; add_scaled: the first of them;
//   add_both: see linear/super.hpp.
//   For super-blocks (linear/super.hpp) codes, small integers, are kept in an Int as it pleases:
//   codes_i8: 16 bytes; codes_u4: four bits of each, from `shift` on; codes_u6: the lower six bits
//   of byte `byte` of 16 words. pair_codes puts two into the halves of a lane, and add_pairs adds
//   the products with two integers of 16 bits. bits_of(words, shift, mask): lanes of 16 words.
//   add_times(sum, a, times(codes, by)): sum + a * codes * by. With slabs_in_16_bits, instead:
//   few_times(few, codes), add_few_times(sum, few, codes), and add_multiple(sum, a, by).
//   Where multiplying lanes is quick: product(a, b), same_int(value), shifted_left(a, count),
//   divided(a, by). And for linear/super_rows.hpp and super_halves.hpp what ops/avx512.hpp has.
//   less_shifted(a, b, count): a - (b << count). With tiles add_shifted(a, b, count): a + it.
//   kMaxRows: rows of activations a tile can take before it runs out of registers.
//   kTileBlocks: blocks of packed weights that a tile takes at once.
#pragma once

#include "../vector.hpp"

namespace exo::EXO_ISA {

struct Ops {
  struct Bytes {
    uint8_t v[64];
  };
  struct Int {
    int32_t v[16];
  };
  struct Float {
    float v[16];
  };

  static constexpr int kMaxRows = most_rows(4);
  static constexpr int kTileRows = kMaxRows;
  static constexpr int kTileBlocks = 1;

  template <typename T>
  static EXO_INLINE T read(const void* p) {
    T t;
    __builtin_memcpy(&t, p, sizeof t);
    return t;
  }
  static EXO_INLINE Bytes load(const uint8_t* p) { return read<Bytes>(p); }
  static EXO_INLINE void store_bytes(uint8_t* p, const Bytes& b) { __builtin_memcpy(p, b.v, 64); }
  static EXO_INLINE Int load_int(const void* p) { return read<Int>(p); }
  static EXO_INLINE void store_int(void* p, const Int& a) { __builtin_memcpy(p, a.v, 64); }
  static EXO_INLINE Bytes and_mask(Bytes b, int mask) {
    for (auto& byte : b.v) byte = static_cast<uint8_t>(byte & mask);
    return b;
  }
  static EXO_INLINE Bytes shift_right(Bytes b, int count) {
    for (auto& byte : b.v) byte = static_cast<uint8_t>(byte >> count);
    return b;
  }
  static EXO_INLINE Bytes select(int mask, Bytes a, const Bytes& b) {
    for (int i = 0; i < 64; i++) {
      a.v[i] = static_cast<uint8_t>((a.v[i] & mask) | (b.v[i] & ~mask));
    }
    return a;
  }

  static EXO_INLINE Bytes entries(const uint8_t* table, Bytes indices) {
    for (auto& byte : indices.v) byte = table[byte];
    return indices;
  }

  static EXO_INLINE Int zero_int() { return {}; }
  static EXO_INLINE Int add_int(Int a, const Int& b) {
    for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
    return a;
  }
  static EXO_INLINE Int add_to_all(Int sum, int32_t value) {
    for (int32_t& lane : sum.v) lane += value;
    return sum;
  }
  static EXO_INLINE Int add_shifted(Int a, const Int& b, int count) {
    for (int i = 0; i < 16; i++) {  // what is added last may bring it back into 32 bits
      a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) +
                                    (static_cast<uint32_t>(b.v[i]) << count));
    }
    return a;
  }
  static EXO_INLINE Int less_shifted(Int a, const Int& b, int count) {
    for (int i = 0; i < 16; i++) a.v[i] -= b.v[i] * (1 << count);
    return a;
  }
  static EXO_INLINE Int codes_i8(const uint8_t* p) {
    Int codes;
    for (int i = 0; i < 16; i++) codes.v[i] = static_cast<int8_t>(p[i]);
    return codes;
  }
  static EXO_INLINE Int codes_u4(const uint8_t* p, int shift) {
    Int codes;
    for (int i = 0; i < 16; i++) codes.v[i] = p[i] >> shift & 15;
    return codes;
  }
  static EXO_INLINE Int codes_u6(const uint8_t* words, int byte) {
    return bits_of(words, 8 * byte, 63);
  }
  static EXO_INLINE Int bits_of(const uint8_t* words, int shift, int mask) {
    Int bits = read<Int>(words);
    for (auto& lane : bits.v) lane = lane >> shift & mask;
    return bits;
  }
  static EXO_INLINE Int pair_codes(Int a, const Int& b) {
    for (int i = 0; i < 16; i++) {
      a.v[i] = static_cast<int32_t>((a.v[i] & 0xffff) | static_cast<uint32_t>(b.v[i]) << 16);
    }
    return a;
  }
  static EXO_INLINE Int add_pairs(Int sum, const Int& pairs, const int16_t* two) {
    for (int i = 0; i < 16; i++) {
      sum.v[i] += static_cast<int16_t>(pairs.v[i]) * two[0] + (pairs.v[i] >> 16) * two[1];
    }
    return sum;
  }
  static EXO_INLINE Int times(Int codes, int by) {
    for (auto& code : codes.v) code *= by;
    return codes;
  }
  static EXO_INLINE Int add_times(Int sum, const Int& a, const Int& b) {
    for (int i = 0; i < 16; i++) sum.v[i] += a.v[i] * b.v[i];
    return sum;
  }
  template <int BITS>
  static EXO_INLINE Int dot(Int sum, const Bytes& weights, const int8_t* four) {
    for (int i = 0; i < 16; i++) {
      for (int j = 0; j < 4; j++) sum.v[i] += weights.v[4 * i + j] * four[j];
    }
    return sum;
  }
  static constexpr int kWeightBits = 8;  // one dot product for all
  static constexpr RowLimits row_limits(Coding, bool) { return {kAllRows, 64}; }

  static EXO_INLINE Float zero_float() { return {}; }
  static EXO_INLINE Float from_f32(const float* p) { return read<Float>(p); }
  static EXO_INLINE Float from_f16(const uint16_t* p) {
    Float f;
    for (int i = 0; i < 16; i += W) exo::EXO_ISA::store(f.v + i, load_f16(p + i));
    return f;
  }
  static EXO_INLINE Float from_bf16(const uint16_t* p) {
    Float f;
    for (int i = 0; i < 16; i += W) exo::EXO_ISA::store(f.v + i, load_bf16(p + i));
    return f;
  }
  static EXO_INLINE Float from_one(float value) {
    Float f;
    for (float& lane : f.v) lane = value;
    return f;
  }
  static EXO_INLINE Float mul(Float a, const Float& b) {
    for (int i = 0; i < 16; i++) a.v[i] *= b.v[i];
    return a;
  }
  static EXO_INLINE Float add(Float a, const Float& b) {
    for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
    return a;
  }
  static EXO_INLINE void store(float* p, const Float& y) { __builtin_memcpy(p, y.v, 64); }
  static EXO_INLINE Float add_group(Float y, const Float& scale, float x_scale, const Int& sum,
                                    const Float& offset, float x_sum) {
    for (int i = 0; i < 16; i += W) {
      VecI whole;
      __builtin_memcpy(&whole, sum.v + i, sizeof whole);
      const VecF total = __builtin_convertvector(whole, VecF);
      VecF v = fma(exo::EXO_ISA::load(scale.v + i) * x_scale, total, exo::EXO_ISA::load(y.v + i));
      v = fma(exo::EXO_ISA::load(offset.v + i), x_sum, v);
      exo::EXO_ISA::store(y.v + i, v);
    }
    return y;
  }
  static EXO_INLINE Float add_scaled(Float y, const Float& scale, float x_scale, const Int& sum) {
    return add_group(y, scale, x_scale, sum, {}, 0);
  }
  static EXO_INLINE Float add_both(Float y, const Float& d, const Int& total, const Float& factor,
                                   const Int& offset, float scale) {
    const auto floats = [](const Int& sum, int i) {
      VecI whole;
      __builtin_memcpy(&whole, sum.v + i, sizeof whole);
      return __builtin_convertvector(whole, VecF);
    };
    for (int i = 0; i < 16; i += W) {
      const VecF own = exo::EXO_ISA::load(d.v + i) * floats(total, i);
      const VecF both = fma(exo::EXO_ISA::load(factor.v + i), floats(offset, i), own);
      exo::EXO_ISA::store(y.v + i, fma(both, scale, exo::EXO_ISA::load(y.v + i)));
    }
    return y;
  }
};

}  // namespace exo::EXO_ISA

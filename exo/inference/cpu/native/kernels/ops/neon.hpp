// 16 outputs in four registers: NEON with the dot product instructions, and with those for unsigned
// times signed bytes where the file is compiled for i8mm.
#pragma once

#include <arm_neon.h>

#include "../vector.hpp"

namespace exo::EXO_ISA {

struct Ops {
  struct Bytes {
    uint8x16_t v[4];
  };
  struct Int {
    int32x4_t v[4];
  };
  struct Float {
    float32x4_t v[4];
  };

  static constexpr int kMaxRows = most_rows(4);
  static constexpr int kTileRows = kMaxRows;
  static constexpr int kTileBlocks = 1;

  static EXO_INLINE Bytes load(const uint8_t* p) {
    return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
  }
  static EXO_INLINE void store_bytes(uint8_t* p, Bytes b) {
    for (int i = 0; i < 4; i++) vst1q_u8(p + 16 * i, b.v[i]);
  }
  static EXO_INLINE Int load_int(const void* p) {
    const auto* at = static_cast<const int32_t*>(p);
    return {vld1q_s32(at), vld1q_s32(at + 4), vld1q_s32(at + 8), vld1q_s32(at + 12)};
  }
  static EXO_INLINE void store_int(void* p, Int a) {
    for (int i = 0; i < 4; i++) vst1q_s32(static_cast<int32_t*>(p) + 4 * i, a.v[i]);
  }
  static EXO_INLINE Bytes and_mask(Bytes b, int mask) {
    for (auto& v : b.v) v = vandq_u8(v, vdupq_n_u8(static_cast<uint8_t>(mask)));
    return b;
  }
  static EXO_INLINE Bytes shift_right(Bytes b, int count) {
    for (auto& v : b.v) v = vshlq_u8(v, vdupq_n_s8(static_cast<int8_t>(-count)));
    return b;
  }
  static EXO_INLINE Bytes select(int mask, Bytes a, Bytes b) {
    const uint8x16_t m = vdupq_n_u8(static_cast<uint8_t>(mask));
    for (int i = 0; i < 4; i++) a.v[i] = vbslq_u8(m, a.v[i], b.v[i]);
    return a;
  }

  static EXO_INLINE Bytes entries(const uint8_t* table, Bytes indices) {
    const uint8x16_t sixteen = vld1q_u8(table);
    for (auto& v : indices.v) v = vqtbl1q_u8(sixteen, v);
    return indices;
  }

  static EXO_INLINE Int zero_int() {
    const int32x4_t zero = vdupq_n_s32(0);
    return {zero, zero, zero, zero};
  }
  static EXO_INLINE Int add_int(Int a, Int b) {
    for (int i = 0; i < 4; i++) a.v[i] = vaddq_s32(a.v[i], b.v[i]);
    return a;
  }
  static EXO_INLINE Int add_to_all(Int sum, int32_t value) {
    for (auto& v : sum.v) v = vaddq_s32(v, vdupq_n_s32(value));
    return sum;
  }
  static EXO_INLINE Int less_shifted(Int a, Int b, int count) {
    const int32x4_t by = vdupq_n_s32(count);
    for (int i = 0; i < 4; i++) a.v[i] = vsubq_s32(a.v[i], vshlq_s32(b.v[i], by));
    return a;
  }

  // Codes are whole lanes; pairs of them are 16 bits each.
  static EXO_INLINE Int codes_i8(const uint8_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t wide[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
    return {vmovl_s16(vget_low_s16(wide[0])), vmovl_s16(vget_high_s16(wide[0])),
            vmovl_s16(vget_low_s16(wide[1])), vmovl_s16(vget_high_s16(wide[1]))};
  }
  static EXO_INLINE Int codes_u4(const uint8_t* p, int shift) {
    const int8x16_t right = vdupq_n_s8(static_cast<int8_t>(-shift));
    return wide(vandq_u8(vshlq_u8(vld1q_u8(p), right), vdupq_n_u8(15)));
  }
  static EXO_INLINE Int codes_u6(const uint8_t* words, int byte) {
    return bits_of(words, 8 * byte, 63);
  }
  static EXO_INLINE Int bits_of(const uint8_t* words, int shift, int mask) {
    const int32x4_t right = vdupq_n_s32(-shift);
    Int bits;
    for (int i = 0; i < 4; i++) {
      const uint32x4_t word = vreinterpretq_u32_u8(vld1q_u8(words + 16 * i));
      bits.v[i] = vandq_s32(vreinterpretq_s32_u32(vshlq_u32(word, right)), vdupq_n_s32(mask));
    }
    return bits;
  }
  static EXO_INLINE Int pair_codes(Int a, Int b) {
    for (int i = 0; i < 4; i++) a.v[i] = vsliq_n_s32(a.v[i], b.v[i], 16);
    return a;
  }
  static EXO_INLINE Int add_pairs(Int sum, Int pairs, const int16_t* two) {
    for (int i = 0; i < 4; i++) {
      const int32x4_t first = vshrq_n_s32(vshlq_n_s32(pairs.v[i], 16), 16);
      sum.v[i] = vmlaq_n_s32(sum.v[i], first, two[0]);
      sum.v[i] = vmlaq_n_s32(sum.v[i], vshrq_n_s32(pairs.v[i], 16), two[1]);
    }
    return sum;
  }
  static EXO_INLINE Int times(Int codes, int by) {
    for (auto& v : codes.v) v = vmulq_n_s32(v, by);
    return codes;
  }
  static EXO_INLINE Int add_times(Int sum, Int a, Int b) {
    for (int i = 0; i < 4; i++) sum.v[i] = vmlaq_s32(sum.v[i], a.v[i], b.v[i]);
    return sum;
  }
  template <int BITS>
  static EXO_INLINE Int dot(Int sum, Bytes weights, const int8_t* four) {
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(word));
    for (int i = 0; i < 4; i++) {
#ifdef __ARM_FEATURE_MATMUL_INT8
      sum.v[i] = vusdotq_s32(sum.v[i], weights.v[i], a);
#else
      // The instruction takes signed bytes.
      const uint8x16_t bit = vdupq_n_u8(BITS == 8 ? 0x80 : 0);
      const int8x16_t signs = vreinterpretq_s8_u8(veorq_u8(weights.v[i], bit));
#ifdef __ARM_FEATURE_DOTPROD
      sum.v[i] = vdotq_s32(sum.v[i], signs, a);
#else
      // Two products of bytes just fit in 16 bits: -128 times -127, twice.
      const int16x8_t low = vmull_s8(vget_low_s8(signs), vget_low_s8(a));
      sum.v[i] = vpadalq_s16(sum.v[i], vpaddq_s16(low, vmull_high_s8(signs, a)));
#endif
#endif
    }
    return sum;
  }
#ifdef __ARM_FEATURE_MATMUL_INT8
  static constexpr int kWeightBits = 8;  // one dot product for all
#else
  static constexpr int kWeightBits = 0;
  static constexpr bool kTakes128 = true;
#endif
  static constexpr RowLimits row_limits(Coding, bool) { return {kAllRows, 64}; }

  static EXO_INLINE Float zero_float() {
    const float32x4_t zero = vdupq_n_f32(0);
    return {zero, zero, zero, zero};
  }
  static EXO_INLINE Float from_f32(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
  }
  static EXO_INLINE Float from_f16(const uint16_t* p) {
    Float f;
    for (int i = 0; i < 4; i++) f.v[i] = (float32x4_t)load_f16(p + 4 * i);
    return f;
  }
  static EXO_INLINE Float from_bf16(const uint16_t* p) {
    Float f;
    for (int i = 0; i < 4; i++) f.v[i] = (float32x4_t)load_bf16(p + 4 * i);
    return f;
  }
  static EXO_INLINE Float from_one(float value) {
    const float32x4_t v = vdupq_n_f32(value);
    return {v, v, v, v};
  }
  static EXO_INLINE Float mul(Float a, Float b) {
    for (int i = 0; i < 4; i++) a.v[i] = vmulq_f32(a.v[i], b.v[i]);
    return a;
  }
  static EXO_INLINE Float add(Float a, Float b) {
    for (int i = 0; i < 4; i++) a.v[i] = vaddq_f32(a.v[i], b.v[i]);
    return a;
  }
  static EXO_INLINE void store(float* p, Float y) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, y.v[i]);
  }
  static EXO_INLINE Float add_group(Float y, Float scale, float x_scale, Int sum, Float offset,
                                    float x_sum) {
    for (int i = 0; i < 4; i++) {
      const float32x4_t s = vmulq_n_f32(scale.v[i], x_scale);
      y.v[i] = vfmaq_f32(y.v[i], s, vcvtq_f32_s32(sum.v[i]));
      y.v[i] = vfmaq_n_f32(y.v[i], offset.v[i], x_sum);
    }
    return y;
  }
  static EXO_INLINE Float add_scaled(Float y, Float scale, float x_scale, Int sum) {
    for (int i = 0; i < 4; i++) {
      y.v[i] = vfmaq_f32(y.v[i], vmulq_n_f32(scale.v[i], x_scale), vcvtq_f32_s32(sum.v[i]));
    }
    return y;
  }
  static EXO_INLINE Float add_both(Float y, Float d, Int total, Float factor, Int offset,
                                   float scale) {
    for (int i = 0; i < 4; i++) {
      const float32x4_t own = vmulq_f32(d.v[i], vcvtq_f32_s32(total.v[i]));
      y.v[i] = vfmaq_n_f32(y.v[i], vfmaq_f32(own, factor.v[i], vcvtq_f32_s32(offset.v[i])), scale);
    }
    return y;
  }

 private:
  static EXO_INLINE Int wide(uint8x16_t bytes) {
    const uint16x8_t half[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
    Int lanes;
    for (int i = 0; i < 2; i++) {
      lanes.v[2 * i] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(half[i])));
      lanes.v[2 * i + 1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(half[i])));
    }
    return lanes;
  }
};

}  // namespace exo::EXO_ISA

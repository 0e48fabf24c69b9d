// 16 outputs in one register: AVX-512 with VNNI.
#pragma once

#include <immintrin.h>

#include "../vector.hpp"

namespace exo::EXO_ISA {

struct Ops {
  using Bytes = __m512i;
  using Int = __m512i;
  using Float = __m512;

  static constexpr int kMaxRows = most_rows(8);
  // Two halve what is read of activations, and their sums hide the latency of a dot product.
  static constexpr int kTileRows = most_rows(6);
  static constexpr int kTileBlocks = 2;

  static EXO_INLINE Bytes load(const uint8_t* p) { return _mm512_load_si512(p); }
  static EXO_INLINE void store_bytes(uint8_t* p, Bytes v) { _mm512_store_si512(p, v); }
  static EXO_INLINE Int load_int(const void* p) { return _mm512_load_si512(p); }
  static EXO_INLINE void store_int(void* p, Int v) { _mm512_store_si512(p, v); }
  static EXO_INLINE Bytes and_mask(Bytes v, int mask) {
    return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask)));
  }
  static EXO_INLINE Bytes shift_right(Bytes v, int count) {
    return _mm512_srli_epi16(v, static_cast<unsigned>(count));
  }
  // Of each byte the bits in `mask` of a, the others of b.
  static EXO_INLINE Bytes select(int mask, Bytes a, Bytes b) {
    const Bytes m = _mm512_set1_epi8(static_cast<char>(mask));
    return _mm512_ternarylogic_epi64(m, a, b, 0xca);
  }

  static EXO_INLINE Bytes entries(const uint8_t* table, Bytes indices) {
    const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen), indices);
  }

  // By the lower four bits of each index; with AVX512-VBMI, which `asm` asks of no other kernel.
  static EXO_INLINE Bytes permuted_entries(const uint8_t* table, Bytes indices) {
    const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    const Bytes four_times = _mm512_broadcast_i32x4(sixteen);
#ifdef EXO_AVX512_EMULATED
    return _mm512_shuffle_epi8(four_times, and_mask(indices, 15));
#else
    Bytes found;
    asm("vpermb %1, %2, %0" : "=v"(found) : "v"(four_times), "v"(indices));
    return found;
#endif
  }

  static EXO_INLINE Int zero_int() { return _mm512_setzero_si512(); }
  static EXO_INLINE Int add_int(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static EXO_INLINE Int add_to_all(Int sum, int32_t value) {
    return _mm512_add_epi32(sum, _mm512_set1_epi32(value));
  }
  static EXO_INLINE Int add_shifted(Int a, Int b, int count) {
    return _mm512_add_epi32(a, _mm512_slli_epi32(b, static_cast<unsigned>(count)));
  }
  static EXO_INLINE Int less_shifted(Int a, Int b, int count) {
    return _mm512_sub_epi32(a, _mm512_slli_epi32(b, static_cast<unsigned>(count)));
  }

  // Codes are whole lanes; pairs of them are 16 bits each.
  static EXO_INLINE Int codes_i8(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static EXO_INLINE Int codes_u4(const uint8_t* p, int shift) {
    const Int bytes = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_and_si512(_mm512_srli_epi32(bytes, static_cast<unsigned>(shift)),
                            _mm512_set1_epi32(15));
  }
  // By a shift of each lane: one by the same for all, which `bits_of` has, is two operations where
  // the compiler does not know it.
  static EXO_INLINE Int codes_u6(const uint8_t* words, int byte) {
    static constexpr int32_t kShifts[4] = {0, 8, 16, 24};
    const Int shifted = _mm512_srlv_epi32(load_int(words), _mm512_set1_epi32(kShifts[byte]));
    return _mm512_and_si512(shifted, _mm512_set1_epi32(63));
  }
  static EXO_INLINE Int bits_of(const uint8_t* words, int shift, int mask) {
    const Int shifted = _mm512_srli_epi32(load_int(words), static_cast<unsigned>(shift));
    return _mm512_and_si512(shifted, _mm512_set1_epi32(mask));
  }
  static EXO_INLINE Int pair_codes(Int a, Int b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
  }
  static EXO_INLINE Int add_pairs(Int sum, Int pairs, const int16_t* two) {
    int32_t word;
    __builtin_memcpy(&word, two, 4);
    return _mm512_dpwssd_epi32(sum, pairs, _mm512_set1_epi32(word));
  }
  // Of 15 bits each, `by` not below 0; quicker than the multiplication of lanes.
  static EXO_INLINE Int times(Int codes, int by) {
    return _mm512_madd_epi16(codes, _mm512_set1_epi32(by));
  }
#ifndef EXO_TILES
  // a times 0 to 8, by shifts: where `vendor.shifts_aside`. (What has tiles is Intel's.)
  static EXO_INLINE Int thrice(Int a) { return _mm512_add_epi32(a, _mm512_add_epi32(a, a)); }
  static EXO_INLINE Int times_few(Int a, Int thrice, int by) {
    constexpr int32_t kNone = 32;
    static constexpr int32_t kShifts[kMostMultiple + 1][2] = {
        {kNone, kNone}, {0, kNone}, {1, kNone}, {kNone, 0}, {2, kNone},
        {1, 0},         {kNone, 1}, {2, 0},     {3, kNone}};
    return _mm512_add_epi32(_mm512_sllv_epi32(a, _mm512_set1_epi32(kShifts[by][0])),
                            _mm512_sllv_epi32(thrice, _mm512_set1_epi32(kShifts[by][1])));
  }
#endif
  static EXO_INLINE Int product(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static EXO_INLINE Int same_int(int32_t value) { return _mm512_set1_epi32(value); }
  static EXO_INLINE Int shifted_left(Int a, int count) {
    return _mm512_slli_epi32(a, static_cast<unsigned>(count));
  }
  // By a power of two, which leaves nothing.
  static EXO_INLINE Int divided(Int a, int by) {
    return by == 1 ? a : _mm512_srai_epi32(a, static_cast<unsigned>(__builtin_ctz(by)));
  }
  static EXO_INLINE Int add_times(Int sum, Int a, Int b) {
    return _mm512_add_epi32(sum, _mm512_mullo_epi32(a, b));
  }
  template <int BITS>
  static EXO_INLINE Int dot(Int sum, Bytes weights, const int8_t* four) {
#if defined(__clang__) && !defined(EXO_AVX512_EMULATED)
    // It would keep the columns of all rows in registers, for which there are none left.
    add_dot(sum, weights, four);
    return sum;
#else
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(word));
#endif
  }
  // For linear/super_rows.hpp, in place and with a row's columns read by the instruction itself:
  // gcc 12 would fill registers with them that sums need.
  static EXO_INLINE void add_dot(Int& sum, Bytes weights, const int8_t* four) {
#ifdef EXO_AVX512_EMULATED
    sum = dot<8>(sum, weights, four);
#else
    typedef int32_t Word __attribute__((may_alias));
    asm("vpdpbusd %1%{1to16%}, %2, %0"
        : "+v"(sum)
        : "m"(*reinterpret_cast<const Word*>(four)), "v"(weights));
#endif
  }
  // Of both halves of each lane.
  static EXO_INLINE void add_products_of_16(Int& total, Int a, Int times) {
#ifdef EXO_AVX512_EMULATED
    total = _mm512_dpwssd_epi32(total, a, times);
#else
    asm("vpdpwssd %1, %2, %0" : "+v"(total) : "v"(a), "v"(times));
#endif
  }
  static EXO_INLINE Int lower_16(Int a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }
  static EXO_INLINE Int times_16(Int a, int by) {
    return _mm512_mullo_epi16(a, _mm512_set1_epi32(by));
  }
  // Two sums of 16 bits in one lane: the second one goes on where the first one ended, shifted, and
  // would borrow from it where it is below 0, but for kBias, which is in `start`.
  static EXO_INLINE void begin_second(Int& sum, const int32_t& start) {
#ifdef EXO_AVX512_EMULATED
    sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 16), same_int(start));
#else
    asm("vpslld $16, %0, %0\n\tvpaddd %1%{1to16%}, %0, %0" : "+v"(sum) : "m"(start));
#endif
  }
  static EXO_INLINE void end_second(Int& sum) {
    sum = _mm512_xor_si512(sum, _mm512_set1_epi32(QuantizedSuper::kBias));
  }
  // Two columns of 16 outputs, and those two of a row.
  static EXO_INLINE Float add_bf16(Float y, Int weights, const int8_t* two) {
    int32_t word;
    __builtin_memcpy(&word, two, 4);
    return _mm512_dpbf16_ps(y, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(word));
  }
  static constexpr int kWeightBits = 8;  // one dot product for all
  // Decoding again for each tile of pairs costs less than to keep what was decoded.
  static constexpr RowLimits row_limits(Coding, bool) { return {kAllRows, kAllRows}; }

  static EXO_INLINE Float zero_float() { return _mm512_setzero_ps(); }
  static EXO_INLINE Float from_f32(const float* p) { return _mm512_loadu_ps(p); }
  static EXO_INLINE Float from_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static EXO_INLINE Float from_bf16(const uint16_t* p) { return (Float)load_bf16(p); }
  static EXO_INLINE Float from_one(float value) { return _mm512_set1_ps(value); }
  static EXO_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static EXO_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static EXO_INLINE void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static EXO_INLINE Float add_group(Float y, Float scale, float x_scale, Int sum, Float offset,
                                    float x_sum) {
    const Float s = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
    y = _mm512_fmadd_ps(s, _mm512_cvtepi32_ps(sum), y);
    return _mm512_fmadd_ps(offset, _mm512_set1_ps(x_sum), y);
  }
  static EXO_INLINE Float add_scaled(Float y, Float scale, float x_scale, Int sum) {
    const Float s = _mm512_mul_ps(scale, _mm512_set1_ps(x_scale));
    return _mm512_fmadd_ps(s, _mm512_cvtepi32_ps(sum), y);
  }
  static EXO_INLINE Float add_both(Float y, Float d, Int total, Float factor, Int offset,
                                   float scale) {
    const Float own = _mm512_mul_ps(d, _mm512_cvtepi32_ps(total));
    const Float both = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(offset), own);
    return _mm512_fmadd_ps(both, _mm512_set1_ps(scale), y);
  }
};

}  // namespace exo::EXO_ISA

// 16 outputs in two registers: AVX2 with FMA, and with VNNI in its 256-bit form where EXO_AVXVNNI.
#pragma once

#include <immintrin.h>

#include "../vector.hpp"

namespace exo::EXO_ISA {

struct Ops {
  struct Bytes {
    __m256i v[2];
  };
  struct Int {
    __m256i v[2];
  };
  struct Float {
    __m256 v[2];
  };

  static constexpr int kMaxRows = most_rows(4);
  static constexpr int kTileRows = kMaxRows;
  static constexpr int kTileBlocks = 1;

  static EXO_INLINE Bytes load(const uint8_t* p) {
    const auto* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
  }
  static EXO_INLINE void store_bytes(uint8_t* p, Bytes b) {
    auto* at = reinterpret_cast<__m256i*>(p);
    _mm256_store_si256(at, b.v[0]);
    _mm256_store_si256(at + 1, b.v[1]);
  }
  static EXO_INLINE Int load_int(const void* p) {
    const auto* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
  }
  static EXO_INLINE void store_int(void* p, Int a) {
    auto* at = reinterpret_cast<__m256i*>(p);
    _mm256_store_si256(at, a.v[0]);
    _mm256_store_si256(at + 1, a.v[1]);
  }
  static EXO_INLINE Bytes and_mask(Bytes b, int mask) {
    const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    return {_mm256_and_si256(b.v[0], m), _mm256_and_si256(b.v[1], m)};
  }
  static EXO_INLINE Bytes shift_right(Bytes b, int count) {
    return {_mm256_srli_epi16(b.v[0], count), _mm256_srli_epi16(b.v[1], count)};
  }
  static EXO_INLINE Bytes select(int mask, Bytes a, Bytes b) {
    const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    for (int i = 0; i < 2; i++) {
      a.v[i] = _mm256_or_si256(_mm256_and_si256(m, a.v[i]), _mm256_andnot_si256(m, b.v[i]));
    }
    return a;
  }

  static EXO_INLINE Bytes entries(const uint8_t* table, Bytes indices) {
    const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    const __m256i twice = _mm256_broadcastsi128_si256(sixteen);
    return {_mm256_shuffle_epi8(twice, indices.v[0]), _mm256_shuffle_epi8(twice, indices.v[1])};
  }

  static EXO_INLINE Int zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static EXO_INLINE Int add_int(Int a, Int b) {
    return {_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])};
  }
  static EXO_INLINE Int add_to_all(Int sum, int32_t value) {
    return add_int(sum, {_mm256_set1_epi32(value), _mm256_set1_epi32(value)});
  }
  static EXO_INLINE Int less_shifted(Int a, Int b, int count) {
    return {_mm256_sub_epi32(a.v[0], _mm256_slli_epi32(b.v[0], count)),
            _mm256_sub_epi32(a.v[1], _mm256_slli_epi32(b.v[1], count))};
  }

  // Codes are twice in a lane, in 16 bits each.
  static EXO_INLINE Int codes_i8(const uint8_t* p) {
    const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(line, line)),
            _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(line, line))};
  }
  static EXO_INLINE Int codes_u4(const uint8_t* p, int shift) {
    const __m128i line = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
    return twice(_mm_and_si128(_mm_srli_epi16(line, shift), _mm_set1_epi8(15)));
  }
  static EXO_INLINE Int codes_u6(const uint8_t* words, int byte) {
    const Int once = bits_of(words, 8 * byte, 63);
    return {_mm256_or_si256(once.v[0], _mm256_slli_epi32(once.v[0], 16)),
            _mm256_or_si256(once.v[1], _mm256_slli_epi32(once.v[1], 16))};
  }
  static EXO_INLINE Int bits_of(const uint8_t* words, int shift, int mask) {
    const auto* at = reinterpret_cast<const __m256i*>(words);
    const __m256i wanted = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(_mm256_srli_epi32(_mm256_load_si256(at), shift), wanted),
            _mm256_and_si256(_mm256_srli_epi32(_mm256_load_si256(at + 1), shift), wanted)};
  }
  static EXO_INLINE Int pair_codes(Int a, Int b) {
    return {_mm256_blend_epi16(a.v[0], b.v[0], 0xaa), _mm256_blend_epi16(a.v[1], b.v[1], 0xaa)};
  }
  static EXO_INLINE Int add_pairs(Int sum, Int pairs, const int16_t* two) {
    const __m256i by = same(two);
    return now({_mm256_add_epi32(sum.v[0], _mm256_madd_epi16(pairs.v[0], by)),
                _mm256_add_epi32(sum.v[1], _mm256_madd_epi16(pairs.v[1], by))});
  }
#ifdef EXO_AVXVNNI
  static EXO_INLINE Int times(Int codes, int by) {
    const __m256i low = _mm256_set1_epi32(by);
    return {_mm256_madd_epi16(codes.v[0], low), _mm256_madd_epi16(codes.v[1], low)};
  }
  static EXO_INLINE Int add_times(Int sum, Int a, Int b) {
    return {_mm256_add_epi32(sum.v[0], _mm256_mullo_epi32(a.v[0], b.v[0])),
            _mm256_add_epi32(sum.v[1], _mm256_mullo_epi32(a.v[1], b.v[1]))};
  }
  template <int BITS>
  static EXO_INLINE Int dot(Int sum, Bytes weights, const int8_t* four) {
    const __m256i a = same(four);
    return {_mm256_dpbusd_avx_epi32(sum.v[0], weights.v[0], a),
            _mm256_dpbusd_avx_epi32(sum.v[1], weights.v[1], a)};
  }
  static constexpr int kWeightBits = 8;  // one dot product for all
  static constexpr RowLimits row_limits(Coding, bool) { return {kAllRows, 64}; }
#else
  static constexpr int kWeightBits = 0;
  // Bytes are their own panel; of 3, 5 and 6 bits much is decoded. Codebooks, which few files
  // have, are decoded for two rows already: tiles of packed ones take seconds to compile.
  static constexpr RowLimits row_limits(Coding coding, bool is_super) {
    const int bits = coding.bits;
    const bool is_simple = bits == 2 || bits == 4;
    if (!is_super) return {kAllRows, bits == 8 ? kAllRows : is_simple ? 32 : 8};
    if (coding.table != Table::kNone && coding.table != Table::kIq4) return {2, 32};
    return {is_simple ? 13 : kMaxRows + 1, 32};
  }
  // A slab's products are at most 2 * (2^BITS - 1) * 127 in each 16 bits; those of 8-bit weights
  // fit once 128 is taken from a weight.
  static constexpr int slabs_in_16_bits(int bits) {
    return bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
  }
  template <int BITS>
  static EXO_INLINE Int dot(Int sum, Bytes weights, const int8_t* four) {
    return now(add_few(sum, products<BITS>(weights, four)));
  }
  static constexpr bool kTakes128 = true;
  template <int BITS>
  static EXO_INLINE Int products(Bytes weights, const int8_t* four) {
    const __m256i a = same(four), bit = _mm256_set1_epi8(static_cast<char>(0x80));
    Int found;
    for (int i = 0; i < 2; i++) {
      if constexpr (BITS == 8) {
        const __m256i w = _mm256_xor_si256(weights.v[i], bit);
        found.v[i] = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
      } else {
        found.v[i] = _mm256_maddubs_epi16(weights.v[i], a);
      }
    }
    return found;
  }
  template <int BITS>
  static EXO_INLINE Int add_products(Int few, Bytes weights, const int8_t* four) {
    const Int more = products<BITS>(weights, four);
    return now({_mm256_add_epi16(few.v[0], more.v[0]), _mm256_add_epi16(few.v[1], more.v[1])});
  }
  static EXO_INLINE Int add_few(Int sum, Int few) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.v[0], _mm256_madd_epi16(few.v[0], ones)),
            _mm256_add_epi32(sum.v[1], _mm256_madd_epi16(few.v[1], ones))};
  }
  static EXO_INLINE Int few_times(Int few, Int codes) {
    return {_mm256_madd_epi16(few.v[0], codes.v[0]), _mm256_madd_epi16(few.v[1], codes.v[1])};
  }
  static EXO_INLINE Int add_few_times(Int sum, Int few, Int codes) {
    return now(add_int(sum, few_times(few, codes)));
  }
  static EXO_INLINE Int add_multiple(Int sum, Int a, int by) {
    const __m256i multiple = _mm256_set1_epi32(by);
    return now({_mm256_add_epi32(sum.v[0], _mm256_mullo_epi32(a.v[0], multiple)),
                _mm256_add_epi32(sum.v[1], _mm256_mullo_epi32(a.v[1], multiple))});
  }
#endif

  static EXO_INLINE Float zero_float() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static EXO_INLINE Float from_f32(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  static EXO_INLINE Float from_f16(const uint16_t* p) {
    const auto* at = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_load_si128(at)), _mm256_cvtph_ps(_mm_load_si128(at + 1))};
  }
  static EXO_INLINE Float from_bf16(const uint16_t* p) {
    return {(__m256)load_bf16(p), (__m256)load_bf16(p + 8)};
  }
  static EXO_INLINE Float from_one(float value) {
    return {_mm256_set1_ps(value), _mm256_set1_ps(value)};
  }
  static EXO_INLINE Float mul(Float a, Float b) {
    return {_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])};
  }
  static EXO_INLINE Float add(Float a, Float b) {
    return {_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])};
  }
  static EXO_INLINE void store(float* p, Float y) {
    _mm256_storeu_ps(p, y.v[0]);
    _mm256_storeu_ps(p + 8, y.v[1]);
  }
  static EXO_INLINE Float add_group(Float y, Float scale, float x_scale, Int sum, Float offset,
                                    float x_sum) {
    for (int i = 0; i < 2; i++) {
      const __m256 s = _mm256_mul_ps(scale.v[i], _mm256_set1_ps(x_scale));
      y.v[i] = _mm256_fmadd_ps(s, _mm256_cvtepi32_ps(sum.v[i]), y.v[i]);
      y.v[i] = _mm256_fmadd_ps(offset.v[i], _mm256_set1_ps(x_sum), y.v[i]);
    }
    return y;
  }
  static EXO_INLINE Float add_scaled(Float y, Float scale, float x_scale, Int sum) {
    for (int i = 0; i < 2; i++) {
      const __m256 s = _mm256_mul_ps(scale.v[i], _mm256_set1_ps(x_scale));
      y.v[i] = _mm256_fmadd_ps(s, _mm256_cvtepi32_ps(sum.v[i]), y.v[i]);
    }
    return y;
  }
  static EXO_INLINE Float add_both(Float y, Float d, Int total, Float factor, Int offset,
                                   float scale) {
    for (int i = 0; i < 2; i++) {
      const __m256 own = _mm256_mul_ps(d.v[i], _mm256_cvtepi32_ps(total.v[i]));
      const __m256 both = _mm256_fmadd_ps(factor.v[i], _mm256_cvtepi32_ps(offset.v[i]), own);
      y.v[i] = _mm256_fmadd_ps(both, _mm256_set1_ps(scale), y.v[i]);
    }
    return y;
  }

 private:
  // Computed here: GCC would make a tree of all sums, and run out of registers.
  static EXO_INLINE Int now(Int sum) {
    asm("" : "+x"(sum.v[0]), "+x"(sum.v[1]));
    return sum;
  }
  static EXO_INLINE Int twice(__m128i line) {
    return {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(line, line)),
            _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(line, line))};
  }
  static EXO_INLINE __m256i same(const void* four) {
    int32_t word;
    __builtin_memcpy(&word, four, 4);
    return _mm256_set1_epi32(word);
  }
};

}  // namespace exo::EXO_ISA

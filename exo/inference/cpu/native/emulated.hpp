// The instructions of AVX-512 and AVX-VNNI that the kernels use, on a processor with AVX2 alone:
// for tests of kernels that no machine at hand can run. Included before all else (CMakeLists.txt).
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace exo::emulated {

// A vector of `size` bytes as an array of T, and back.
template <typename T, int SIZE>
struct Lanes {
  T at[SIZE / sizeof(T)];
};
template <typename T, typename V>
inline Lanes<T, sizeof(V)> lanes(const V& vector) {
  Lanes<T, sizeof(V)> found;
  std::memcpy(&found, &vector, sizeof found);
  return found;
}
template <typename V, typename L>
inline V vector(const L& lanes) {
  static_assert(sizeof(V) == sizeof(L));
  V found;
  std::memcpy(&found, &lanes, sizeof found);
  return found;
}

// compute(i) for each lane.
template <typename T, typename V, typename Compute>
inline V each(const Compute& compute) {
  Lanes<T, sizeof(V)> found;
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(T)); i++) found.at[i] = compute(i);
  return vector<V>(found);
}

using I = __m512i;
using F = __m512;

template <typename V>
inline V load(const void* p) {
  V found;
  std::memcpy(&found, p, sizeof found);
  return found;
}
template <typename V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline I set1_epi8(char x) {
  return each<char, I>([&](int) { return x; });
}
inline I set1_epi32(int x) {
  return each<int32_t, I>([&](int) { return x; });
}
inline F set1_ps(float x) {
  return each<float, F>([&](int) { return x; });
}
inline I and_si512(I a, I b) {
  const auto x = lanes<int32_t>(a), y = lanes<int32_t>(b);
  return each<int32_t, I>([&](int i) { return x.at[i] & y.at[i]; });
}
inline I xor_si512(I a, I b) {
  const auto x = lanes<int32_t>(a), y = lanes<int32_t>(b);
  return each<int32_t, I>([&](int i) { return x.at[i] ^ y.at[i]; });
}
inline I sad_epu8(I a, I b) {
  const auto x = lanes<uint8_t>(a), y = lanes<uint8_t>(b);
  return each<int64_t, I>([&](int i) {
    int64_t sum = 0;
    for (int k = 8 * i; k < 8 * i + 8; k++) sum += std::abs(x.at[k] - y.at[k]);
    return sum;
  });
}
inline __m256i cvtepi64_epi32(I a) {
  const auto x = lanes<int64_t>(a);
  return each<int32_t, __m256i>([&](int i) { return static_cast<int32_t>(x.at[i]); });
}
// Bit `4 a + 2 b + c` of `truth`, for each bit of the three.
inline I ternarylogic_epi64(I a, I b, I c, int truth) {
  const auto x = lanes<uint64_t>(a), y = lanes<uint64_t>(b), z = lanes<uint64_t>(c);
  return each<uint64_t, I>([&](int i) {
    uint64_t found = 0;
    for (int k = 0; k < 8; k++) {
      if ((truth >> k & 1) == 0) continue;
      found |= (k & 4 ? x.at[i] : ~x.at[i]) & (k & 2 ? y.at[i] : ~y.at[i]) &
               (k & 1 ? z.at[i] : ~z.at[i]);
    }
    return found;
  });
}
inline I sllv_epi32(I a, I by) {
  const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(by);
  return each<uint32_t, I>([&](int i) { return y.at[i] < 32 ? x.at[i] << y.at[i] : 0; });
}
template <typename T>
inline I left(I a, unsigned count) {
  const auto x = lanes<T>(a);
  return each<T, I>([&](int i) { return static_cast<T>(x.at[i] << count); });
}
template <typename T>
inline I right(I a, unsigned count) {
  const auto x = lanes<T>(a);
  return each<T, I>([&](int i) { return static_cast<T>(x.at[i] >> count); });
}
inline I shuffle_epi8(I a, I by) {
  const auto x = lanes<uint8_t>(a), y = lanes<uint8_t>(by);
  return each<uint8_t, I>(
      [&](int i) -> uint8_t { return y.at[i] & 128 ? 0 : x.at[(i & ~15) + (y.at[i] & 15)]; });
}
inline I broadcast_i32x4(__m128i a) {
  const auto x = lanes<int32_t>(a);
  return each<int32_t, I>([&](int i) { return x.at[i % 4]; });
}
inline I add_epi32(I a, I b) {
  const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
  return each<uint32_t, I>([&](int i) { return x.at[i] + y.at[i]; });
}
inline I sub_epi32(I a, I b) {
  const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
  return each<uint32_t, I>([&](int i) { return x.at[i] - y.at[i]; });
}
inline I mullo_epi32(I a, I b) {
  const auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
  return each<uint32_t, I>([&](int i) { return x.at[i] * y.at[i]; });
}
inline I mullo_epi16(I a, I b) {
  const auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
  return each<int16_t, I>([&](int i) { return static_cast<int16_t>(x.at[i] * y.at[i]); });
}
inline I dpwssd_epi32(I sum, I a, I b) {
  const auto s = lanes<int32_t>(sum);
  const auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
  return each<int32_t, I>([&](int i) {
    return s.at[i] + x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1];
  });
}
inline I madd_epi16(I a, I b) { return dpwssd_epi32(set1_epi32(0), a, b); }
template <typename V>
inline V dpbusd_epi32(V sum, V a, V b) {
  const auto s = lanes<int32_t>(sum);
  const auto x = lanes<uint8_t>(a);
  const auto y = lanes<int8_t>(b);
  return each<int32_t, V>([&](int i) {
    int32_t found = s.at[i];
    for (int j = 4 * i; j < 4 * i + 4; j++) found += x.at[j] * y.at[j];
    return found;
  });
}
inline I mask_blend_epi16(uint32_t mask, I a, I b) {
  const auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
  return each<int16_t, I>([&](int i) { return mask >> i & 1 ? y.at[i] : x.at[i]; });
}
template <typename T>
inline I widened(__m128i a) {
  const auto x = lanes<T>(a);
  return each<int32_t, I>([&](int i) { return x.at[i]; });
}
inline F cvtepi32_ps(I a) {
  const auto x = lanes<int32_t>(a);
  return each<float, F>([&](int i) { return static_cast<float>(x.at[i]); });
}
// By AVX2's, a half at a time.
inline F cvtph_ps(__m256i a) {
  const __m128i half[] = {_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)};
  const __m256 wide[] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
  return load<F>(wide);
}
inline __m256i cvtps_ph(F a) {
  const auto x = lanes<float>(a);
  const __m128i half[] = {_mm256_cvtps_ph(_mm256_loadu_ps(x.at), _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(_mm256_loadu_ps(x.at + 8), _MM_FROUND_TO_NEAREST_INT)};
  return load<__m256i>(half);
}
inline F roundscale_ps(F a) {
  const auto x = lanes<float>(a);
  return each<float, F>([&](int i) { return std::nearbyint(x.at[i]); });
}
inline F add_ps(F a, F b) { return a + b; }
inline F mul_ps(F a, F b) { return a * b; }
inline F fmadd_ps(F a, F b, F c) {
  const auto x = lanes<float>(a), y = lanes<float>(b), z = lanes<float>(c);
  return each<float, F>([&](int i) { return std::fma(x.at[i], y.at[i], z.at[i]); });
}

template <typename V>
inline F dpbf16_ps(F sum, V a, V b) {
  const auto s = lanes<float>(sum);
  const auto x = lanes<uint16_t>(a), y = lanes<uint16_t>(b);
  const auto wide = [](uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
  };
  return each<float, F>([&](int i) {
    const float odd = std::fma(wide(x.at[2 * i + 1]), wide(y.at[2 * i + 1]), s.at[i]);
    return std::fma(wide(x.at[2 * i]), wide(y.at[2 * i]), odd);
  });
}

}  // namespace exo::emulated

// Some of them are macros already.
#undef _mm512_roundscale_ps
#undef _mm512_cvtps_ph
#define _mm512_loadu_si512(p) exo::emulated::load<__m512i>(p)
#define _mm512_load_si512(p) exo::emulated::load<__m512i>(p)
#define _mm512_loadu_ps(p) exo::emulated::load<__m512>(p)
#define _mm512_store_si512(p, v) exo::emulated::store<__m512i>(p, v)
#define _mm512_storeu_ps(p, v) exo::emulated::store<__m512>(p, v)
#define _mm512_setzero_si512() exo::emulated::set1_epi32(0)
#define _mm512_setzero_ps() exo::emulated::set1_ps(0)
#define _mm512_set1_epi8 exo::emulated::set1_epi8
#define _mm512_set1_epi32 exo::emulated::set1_epi32
#define _mm512_set1_ps exo::emulated::set1_ps
#define _mm512_and_si512 exo::emulated::and_si512
#define _mm512_ternarylogic_epi64 exo::emulated::ternarylogic_epi64
#define _mm512_slli_epi32 exo::emulated::left<uint32_t>
#define _mm512_sllv_epi32 exo::emulated::sllv_epi32
#define _mm512_srli_epi16 exo::emulated::right<uint16_t>
#define _mm512_srai_epi32 exo::emulated::right<int32_t>
#define _mm512_srli_epi32 exo::emulated::right<uint32_t>
#define _mm512_shuffle_epi8 exo::emulated::shuffle_epi8
#define _mm512_broadcast_i32x4 exo::emulated::broadcast_i32x4
#define _mm512_xor_si512 exo::emulated::xor_si512
#define _mm512_sad_epu8 exo::emulated::sad_epu8
#define _mm512_cvtepi64_epi32 exo::emulated::cvtepi64_epi32
#define _mm512_add_epi32 exo::emulated::add_epi32
#define _mm512_sub_epi32 exo::emulated::sub_epi32
#define _mm512_mullo_epi32 exo::emulated::mullo_epi32
#define _mm512_mullo_epi16 exo::emulated::mullo_epi16
#define _mm512_madd_epi16 exo::emulated::madd_epi16
#define _mm512_dpwssd_epi32 exo::emulated::dpwssd_epi32
#define _mm512_dpbusd_epi32 exo::emulated::dpbusd_epi32<__m512i>
#define _mm256_dpbusd_avx_epi32 exo::emulated::dpbusd_epi32<__m256i>
#define _mm512_mask_blend_epi16 exo::emulated::mask_blend_epi16
#define _mm512_cvtepi8_epi32 exo::emulated::widened<int8_t>
#define _mm512_cvtepu8_epi32 exo::emulated::widened<uint8_t>
#define _mm512_cvtepi32_ps exo::emulated::cvtepi32_ps
#define _mm512_cvtph_ps exo::emulated::cvtph_ps
#define _mm512_cvtps_ph(a, rounding) exo::emulated::cvtps_ph(a)
#define _mm512_roundscale_ps(a, scale) exo::emulated::roundscale_ps(a)
#define _mm512_add_ps exo::emulated::add_ps
#define _mm512_mul_ps exo::emulated::mul_ps
#define _mm512_fmadd_ps exo::emulated::fmadd_ps
#define _mm512_dpbf16_ps exo::emulated::dpbf16_ps

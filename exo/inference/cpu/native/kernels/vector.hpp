// Float vectors as wide as the instruction set this file is compiled for.
//
// Written with the compilers' vector extension, so one text serves every instruction set; only
// conversions between widths and fused steps need intrinsics. Everything sits in a namespace named
// after the instruction set: the linker must never take a function compiled for one for another's.
//
// Every instruction set gives the same bits. So a sum over what lies in lanes is kept in 16 of
// them, however many registers these take, and joined by one tree; a product and a sum are one step
// where fma() is written and two elsewhere (the compiler may not choose: -ffp-contract=off); and
// what is no single operation of IEEE 754 (e^x) is computed here, not by a library.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(EXO_AVX512_EMULATED)
#define EXO_AVX512
#endif

#if defined(EXO_AVX512) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "../kernels.hpp"

// Where speed is not the point: inlined arrays of 16 take a compiler minutes.
#ifdef EXO_FEW_ROWS
#define EXO_INLINE inline
#else
#define EXO_INLINE inline __attribute__((always_inline))
#endif

// What only computes, where sanitizers look: they find nothing there and take most of their time.
#if defined(EXO_SANITIZED) && defined(__GNUC__) && !defined(__clang__)
#define EXO_UNCHECKED \
  inline __attribute__((noinline, optimize("O2"), no_sanitize("address", "undefined")))
#else
#define EXO_UNCHECKED EXO_INLINE
#endif

namespace exo::EXO_ISA {

#if defined(EXO_AVX512) || defined(EXO_WIDE)
inline constexpr int W = 16;
#elif defined(__AVX2__)
inline constexpr int W = 8;
#else
inline constexpr int W = 4;
#endif
inline constexpr int kLanes = 16;         // of a sum
inline constexpr int kVecs = kLanes / W;  // vectors they take

// Rows of activations in the largest tile, of the `wanted` that registers allow. Builds for
// tests alone take two: every path is there, and not every size of tile for minutes of compiling.
constexpr int most_rows(int wanted) {
#ifdef EXO_FEW_ROWS
  return wanted < 2 ? wanted : 2;
#else
  return wanted;
#endif
}

// How many rows a linear layer has for its packed weights to be decoded once: from `shared_from` on
// each super-block for the tiles at hand, above `packed` whole blocks for all.
struct RowLimits {
  int64_t shared_from, packed;
};
inline constexpr int64_t kAllRows = int64_t{1} << 62;

typedef float VecF __attribute__((vector_size(W * 4)));
typedef int32_t VecI __attribute__((vector_size(W * 4)));
typedef uint16_t VecH __attribute__((vector_size(W * 2)));

EXO_INLINE VecF load(const float* p) {
  VecF v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
EXO_INLINE void store(float* p, VecF v) { __builtin_memcpy(p, &v, sizeof v); }
EXO_INLINE VecF splat(float x) { return x - VecF{}; }
EXO_INLINE VecF max(VecF a, VecF b) { return a > b ? a : b; }
EXO_INLINE VecF min(VecF a, VecF b) { return a < b ? a : b; }
EXO_INLINE VecF abs(VecF a) { return (VecF)((VecI)a & 0x7fffffff); }

EXO_INLINE VecF load_bf16(const uint16_t* p) {
  VecH h;
  __builtin_memcpy(&h, p, sizeof h);
  typedef uint32_t VecU __attribute__((vector_size(W * 4)));
  return (VecF)(__builtin_convertvector(h, VecU) << 16);
}

#if defined(EXO_AVX512)
EXO_INLINE VecF load_i8(const int8_t* p) {
  return (VecF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
EXO_INLINE VecF from_f16(VecH h) { return (VecF)_mm512_cvtph_ps((__m256i)h); }
EXO_INLINE VecH load_u8(const uint8_t* p) {
  return (VecH)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
}
EXO_INLINE void store_f16(uint16_t* p, VecF v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
EXO_INLINE VecF round_even(VecF v) { return (VecF)_mm512_roundscale_ps((__m512)v, 0); }
#elif defined(__F16C__)
EXO_INLINE VecF load_i8(const int8_t* p) {
  return (VecF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
EXO_INLINE VecF from_f16(VecH h) { return (VecF)_mm256_cvtph_ps((__m128i)h); }
EXO_INLINE VecH load_u8(const uint8_t* p) {
  return (VecH)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
}
EXO_INLINE void store_f16(uint16_t* p, VecF v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
EXO_INLINE VecF round_even(VecF v) { return (VecF)_mm256_round_ps((__m256)v, 0); }
#elif defined(__ARM_NEON)
EXO_INLINE VecF load_i8(const int8_t* p) {
  int32_t four;
  __builtin_memcpy(&four, p, 4);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return (VecF)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
EXO_INLINE VecF from_f16(VecH h) { return (VecF)vcvt_f32_f16((float16x4_t)h); }
EXO_INLINE VecH load_u8(const uint8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  return (VecH)vget_low_u16(vmovl_u8(vcreate_u8(four)));
}
EXO_INLINE void store_f16(uint16_t* p, VecF v) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
}
EXO_INLINE VecF round_even(VecF v) { return (VecF)vrndnq_f32((float32x4_t)v); }
#else
EXO_INLINE VecF load_i8(const int8_t* p) {
  VecF v;
  for (int i = 0; i < W; i++) v[i] = p[i];
  return v;
}
// Without a conversion instruction, by bits; exact, subnormals included.
EXO_INLINE VecF from_f16(VecH h) {
  const VecI wide = __builtin_convertvector(h, VecI);
  const VecI magnitude = (wide & 0x7fff) << 13;
  const VecF finite = (VecF)magnitude * 0x1p112f;
  const VecI special = (VecI)(magnitude >= (0x7c00 << 13)) & 0x7f800000;
  return (VecF)((VecI)finite | special | (wide & 0x8000) << 16);
}
EXO_INLINE VecH load_u8(const uint8_t* p) {
  VecH v;
  for (int i = 0; i < W; i++) v[i] = p[i];
  return v;
}
EXO_INLINE VecF round_even(VecF v) {
  const VecF magic = splat(12582912.f);  // 1.5 * 2^23: what is below the point is rounded away
  return (v + magic) - magic;
}
EXO_INLINE void store_f16(uint16_t* p, VecF v) {
  for (int i = 0; i < W; i++) {
    uint32_t bits;
    const float lane = v[i];
    __builtin_memcpy(&bits, &lane, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) {  // 65536 and above, infinity, NaN
      p[i] = static_cast<uint16_t>(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
    } else if (bits < 0x38800000) {  // below the smallest normal: rounded by a float addition
      float small;
      __builtin_memcpy(&small, &bits, 4);
      small += 0.5f;
      __builtin_memcpy(&bits, &small, 4);
      p[i] = static_cast<uint16_t>(sign | (bits - 0x3f000000));
    } else {
      bits += 0xc8000fff + (bits >> 13 & 1);
      p[i] = static_cast<uint16_t>(sign | bits >> 13);
    }
  }
}
#endif

// a * b + c, rounded once.
#if defined(EXO_AVX512)
EXO_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
EXO_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif defined(__FMA__)
EXO_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
EXO_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif defined(__ARM_NEON)
EXO_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
EXO_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#elif defined(__FP_FAST_FMAF) || defined(EXO_SANITIZED)  // the other is slow there
EXO_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
EXO_UNCHECKED VecF fma(VecF a, VecF b, VecF c) {
  for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
#else
// In doubles, where the product is exact.
typedef double VecD __attribute__((vector_size(W * 8)));
typedef int64_t VecL __attribute__((vector_size(W * 8)));

// The sum is rounded to odd: rounding it once more, to a float, then gives what rounding the exact
// sum would. Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms
// Using Rounding to Odd", IEEE Transactions on Computers 57.
__attribute__((noinline)) inline VecF fma_by_odd(VecF a, VecF b, VecF c) {
  const VecD product = __builtin_convertvector(a, VecD) * __builtin_convertvector(b, VecD);
  const VecD addend = __builtin_convertvector(c, VecD), sum = product + addend;
  const VecD rest = sum - product, error = (product - (sum - rest)) + (addend - rest);
  const VecL larger = error > 0, smaller = error < 0;
  const VecL odd = -((VecL)sum & 1), step = (larger ^ (sum > 0)) | 1;
  const VecL rounded = (VecL)sum + ((larger | smaller) & ~odd & step);
  return __builtin_convertvector((VecD)rounded, VecF);
}

#ifdef __SSE2__
// Rounding twice goes wrong only where the first result lies in the middle between two floats;
// those below the smallest normal one are not told apart.
EXO_INLINE __m128i may_round_wrong(__m128d sum) {
  const __m128i parts = _mm_and_si128((__m128i)sum, _mm_set1_epi64x(0x7fffffff'1fffffff));
  const __m128i middle = _mm_cmpeq_epi32(parts, _mm_set1_epi64x(0xffffffff'10000000));
  const __m128i tiny =
      _mm_and_si128(_mm_cmpgt_epi32(parts, _mm_set1_epi64x(0x00000000'7fffffff)),
                    _mm_cmplt_epi32(parts, _mm_set1_epi64x(0x38100000'00000000)));  // 2^-126
  return _mm_or_si128(middle, tiny);
}

// Of the lower two lanes.
EXO_INLINE __m128d rounded_twice(__m128 a, __m128 b, __m128 c) {
  return _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)), _mm_cvtps_pd(c));
}
EXO_INLINE __m128 upper(__m128 v) { return _mm_movehl_ps(v, v); }

EXO_INLINE VecF fma(VecF a, VecF b, VecF c) {
  __m128 x[W / 4], y[W / 4], z[W / 4];
  __builtin_memcpy(x, &a, sizeof a);
  __builtin_memcpy(y, &b, sizeof b);
  __builtin_memcpy(z, &c, sizeof c);
  __m128i wrong = _mm_setzero_si128();
  for (int i = 0; i < W / 4; i++) {
    const __m128d low = rounded_twice(x[i], y[i], z[i]);
    const __m128d high = rounded_twice(upper(x[i]), upper(y[i]), upper(z[i]));
    wrong = _mm_or_si128(wrong, _mm_or_si128(may_round_wrong(low), may_round_wrong(high)));
    x[i] = _mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high));
  }
  if (__builtin_expect(_mm_movemask_epi8(wrong) != 0, false)) return fma_by_odd(a, b, c);
  __builtin_memcpy(&a, x, sizeof a);
  return a;
}
#else
EXO_INLINE VecF fma(VecF a, VecF b, VecF c) { return fma_by_odd(a, b, c); }
#endif
EXO_INLINE float fma(float a, float b, float c) { return fma(splat(a), splat(b), splat(c))[0]; }
#endif
EXO_INLINE VecF fma(VecF a, float b, VecF c) { return fma(a, splat(b), c); }
EXO_INLINE VecF fma(VecF a, float b, float c) { return fma(a, splat(b), splat(c)); }
EXO_INLINE VecF fma(VecF a, VecF b, float c) { return fma(a, b, splat(c)); }

EXO_INLINE VecF load_f16(const uint16_t* p) {
  VecH h;
  __builtin_memcpy(&h, p, sizeof h);
  return from_f16(h);
}
// 2^-8 times the values: a half's exponent has another bias.
EXO_INLINE VecF load_f8(const uint8_t* p) {
  typedef int16_t VecS __attribute__((vector_size(W * 2)));
  const VecS sign_twice = (VecS)(load_u8(p) << 8) >> 1;
  return from_f16((VecH)sign_twice & 0xbfff);
}
// 2^-14 times the values in the low or high halves of bytes.
EXO_INLINE VecF load_f4(const uint8_t* p, bool high) {
  const VecH halves = high ? load_u8(p) >> 4 : load_u8(p);
  return from_f16((halves & 8) << 12 | (halves & 7) << 9);
}

template <DType T>
EXO_INLINE VecF load(const uint8_t* p, int64_t index) {
  if constexpr (T == DType::kFloat8) return load_f8(p + index);
  if constexpr (T == DType::kFloat32) return load(reinterpret_cast<const float*>(p) + index);
  const uint16_t* half = reinterpret_cast<const uint16_t*>(p) + index;
  if constexpr (T == DType::kFloat16) return load_f16(half);
  return load_bf16(half);
}
template <DType T>
EXO_INLINE float load_one(const uint8_t* p, int64_t index) {
  if constexpr (T == DType::kFloat32) return reinterpret_cast<const float*>(p)[index];
  uint16_t half[W] = {reinterpret_cast<const uint16_t*>(p)[index]};
  return load<T>(reinterpret_cast<const uint8_t*>(half), 0)[0];
}

// Lane i of the result is lane (i + BY) % W.
template <int BY, typename V>
EXO_INLINE V turn(V v) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12  // as on Ubuntu 22.04
  VecI lanes{};
  for (int i = 0; i < W; i++) lanes[i] = (i + BY) % W;
  return __builtin_shuffle(v, lanes);
#else
  if constexpr (W == 16) {
    return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6, BY + 7,
                                   BY + 8, BY + 9, BY + 10, BY + 11, BY + 12, BY + 13, BY + 14,
                                   BY + 15);
  } else if constexpr (W == 8) {
    return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3, BY + 4, BY + 5, BY + 6,
                                   BY + 7);
  } else {
    return __builtin_shufflevector(v, v, BY, BY + 1, BY + 2, BY + 3);
  }
#endif
}

// The lanes of one vector joined.
template <typename V, typename Join>
EXO_INLINE auto fold(V v, const Join& join) {
  if constexpr (W == 16) v = join(v, turn<8>(v));
  if constexpr (W >= 8) v = join(v, turn<4>(v));
  v = join(v, turn<2>(v));
  return join(v, turn<1>(v))[0];
}
// The sum of 16 lanes: of each and the one 8 further, of these and those 4 further, and so on.
EXO_INLINE float reduce_add(const VecF (&lanes)[kVecs]) {
  VecF v = lanes[0];
  if constexpr (kVecs == 2) v = v + lanes[1];
  if constexpr (kVecs == 4) v = (v + lanes[2]) + (lanes[1] + lanes[3]);
  return fold(v, [](VecF a, VecF b) __attribute__((always_inline)) { return a + b; });
}
// Of integers, and of maxima, any order gives the same.
EXO_INLINE int32_t reduce_add(VecI v) {
  return fold(v, [](VecI a, VecI b) __attribute__((always_inline)) { return a + b; });
}
EXO_INLINE float reduce_max(VecF v) {
  return fold(v, [](VecF a, VecF b) __attribute__((always_inline)) { return max(a, b); });
}

// e^x to 1e-7 relative: 2^n times a polynomial in the fraction, |f| <= 1/2, of log2(e) x
// (Taylor coefficients of 2^f). Below -87 it is 0, so that a masked score adds nothing.
EXO_INLINE VecF exp(VecF x) {
  const VecF clamped = min(max(x, splat(-87.f)), splat(88.f));
  const VecF n = round_even(clamped * 1.44269504088896341f);
  // The fraction in two steps keeps it exact for large x.
  const VecF f = fma(n, -1.42860682030941723e-6f, fma(n, -0.693145751953125f, clamped));
  VecF p = splat(1.f / 5040);
  p = fma(p, f, 1.f / 720);
  p = fma(p, f, 1.f / 120);
  p = fma(p, f, 1.f / 24);
  p = fma(p, f, 1.f / 6);
  p = fma(p, f, 0.5f);
  p = fma(p, f, 1.f);
  p = fma(p, f, 1.f);
  const VecI power = (__builtin_convertvector(n, VecI) + 127) << 23;
  const VecF result = p * (VecF)power;
  return x < splat(-87.f) ? VecF{} : result;
}

EXO_INLINE VecF tanh(VecF x) {
  const VecF e = exp(-2.f * abs(x));
  const VecF t = (1.f - e) / (1.f + e);
  return x < VecF{} ? -t : t;
}

// Abramowitz and Stegun 7.1.26 is good to 1.5e-7.
EXO_INLINE VecF erf(VecF x) {
  const VecF a = abs(x);
  const VecF t = 1.f / fma(a, 0.3275911f, 1.f);
  VecF p = splat(1.061405429f);
  p = fma(p, t, -1.453152027f);
  p = fma(p, t, 1.421413741f);
  p = fma(p, t, -0.284496736f);
  p = fma(p, t, 0.254829592f);
  const VecF y = fma(-(p * t), exp(-a * a), 1.f);
  return x < VecF{} ? -y : y;
}

}  // namespace exo::EXO_ISA

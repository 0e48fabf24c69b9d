// Kernels that take one row at a time.
#pragma once

#include "linear/bfloat16.hpp"

namespace exo::EXO_ISA {

// Calls full(i) for whole vectors and then tail(i) for the values left over.
template <typename Full, typename Tail>
EXO_INLINE void sweep(int64_t count, const Full& full, const Tail& tail) {
  int64_t i = 0;
  for (; i + W <= count; i += W) full(i);
  for (; i < count; i++) tail(i);
}

// A sum over `count` values: in turns in four sums of 16 lanes, what is left over by itself.
// add(sum, i) adds a vector of them from i on, add_one(sum, i) one.
template <typename Add, typename AddOne>
EXO_INLINE float sum_up(int64_t count, const Add& add, const AddOne& add_one) {
  constexpr int kSums = 4;
  VecF sums[kSums][kVecs] = {};
  int64_t i = 0;
  const auto add_lanes = [&](int s) __attribute__((always_inline)) {
    for (int v = 0; v < kVecs; v++) sums[s][v] = add(sums[s][v], i + v * W);
    i += kLanes;
  };
  while (i + kSums * kLanes <= count) {
    for (int s = 0; s < kSums; s++) add_lanes(s);
  }
#pragma GCC unroll 4
  for (int s = 0; s < kSums - 1; s++) {
    if (i + kLanes <= count) add_lanes(s);
  }
  float tail = 0;
  for (; i < count; i++) tail = add_one(tail, i);
  VecF all[kVecs];
  for (int v = 0; v < kVecs; v++) all[v] = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
  return reduce_add(all) + tail;
}

inline void rms_norm(const float* x, const float* weight, float* out, int64_t cols, float eps) {
  const float sum = sum_up(
      cols,
      [&](VecF all, int64_t i) __attribute__((always_inline)) {
        const VecF v = load(x + i);
        return fma(v, v, all);
      },
      [&](float all, int64_t i) { return fma(x[i], x[i], all); });
  const float scale = 1.f / __builtin_sqrtf(sum / static_cast<float>(cols) + eps);
  sweep(
      cols, [&](int64_t k) { store(out + k, load(x + k) * scale * load(weight + k)); },
      [&](int64_t k) { out[k] = x[k] * scale * weight[k]; });
}

inline void layer_norm(const float* x, const float* weight, const float* bias, float* out,
                       int64_t cols, float eps) {
  const float sum = sum_up(
      cols, [&](VecF all, int64_t i) __attribute__((always_inline)) { return all + load(x + i); },
      [&](float all, int64_t i) { return all + x[i]; });
  const float mean = sum / static_cast<float>(cols);
  const float squares = sum_up(
      cols,
      [&](VecF all, int64_t i) __attribute__((always_inline)) {
        const VecF v = load(x + i) - mean;
        return fma(v, v, all);
      },
      [&](float all, int64_t i) { return fma(x[i] - mean, x[i] - mean, all); });
  const float scale = 1.f / __builtin_sqrtf(squares / static_cast<float>(cols) + eps);
  sweep(
      cols,
      [&](int64_t k) {
        const VecF shift = bias != nullptr ? load(bias + k) : VecF{};
        store(out + k, fma((load(x + k) - mean) * scale, load(weight + k), shift));
      },
      [&](int64_t k) {
        out[k] = fma((x[k] - mean) * scale, weight[k], bias != nullptr ? bias[k] : 0.f);
      });
}

inline void add_scaled(float* x, const float* y, float scale, int64_t count) {
  sweep(
      count, [&](int64_t i) { store(x + i, fma(load(y + i), scale, load(x + i))); },
      [&](int64_t i) { x[i] = fma(y[i], scale, x[i]); });
}

EXO_INLINE VecF sigmoid(VecF x) { return 1.f / (1.f + exp(-x)); }

template <Activation A>
EXO_INLINE VecF gated(VecF g, VecF up) {
  if constexpr (A == Activation::kSilu) return g * sigmoid(g) * up;
  if constexpr (A == Activation::kSigmoid) return sigmoid(g) * up;
  if constexpr (A == Activation::kRelu2) {
    const VecF positive = max(g, VecF{});
    return positive * positive * up;
  }
  if constexpr (A == Activation::kGeluTanh) {
    return 0.5f * g * (1.f + tanh(0.7978845608028654f * fma(0.044715f * g * g, g, g))) * up;
  }
  if constexpr (A == Activation::kGelu) {
    return 0.5f * g * (1.f + erf(g * 0.7071067811865476f)) * up;
  }
  // gpt-oss: both sides clamped, the linear side shifted by one.
  const VecF limited = min(g, splat(7.f));
  const VecF linear = max(min(up, splat(7.f)), splat(-7.f));
  return limited * sigmoid(1.702f * limited) * (linear + 1.f);
}

template <Activation A>
void gate_rows(float* g, const float* up, int64_t count) {
  int64_t i = 0;
  const auto linear = [&](int64_t k) { return up != nullptr ? load(up + k) : splat(1.f); };
  for (; i + W <= count; i += W) store(g + i, gated<A>(load(g + i), linear(i)));
  if (i == count) return;
  float last[2][W] = {};
  std::memcpy(last[0], g + i, static_cast<size_t>(count - i) * 4);
  for (int64_t k = i; k < count; k++) last[1][k - i] = up != nullptr ? up[k] : 1.f;
  store(last[0], gated<A>(load(last[0]), load(last[1])));
  std::memcpy(g + i, last[0], static_cast<size_t>(count - i) * 4);
}

inline void gate(Activation activation, float* g, const float* up, int64_t count) {
  switch (activation) {
    case Activation::kSilu:
      return gate_rows<Activation::kSilu>(g, up, count);
    case Activation::kGeluTanh:
      return gate_rows<Activation::kGeluTanh>(g, up, count);
    case Activation::kGelu:
      return gate_rows<Activation::kGelu>(g, up, count);
    case Activation::kClampedSwiglu:
      return gate_rows<Activation::kClampedSwiglu>(g, up, count);
    case Activation::kSigmoid:
      return gate_rows<Activation::kSigmoid>(g, up, count);
    case Activation::kRelu2:
      return gate_rows<Activation::kRelu2>(g, up, count);
  }
}

EXO_INLINE VecF xielu_of(VecF x, const Xielu& n) {
  const VecF below = exp(min(x, splat(n.eps))) - 1.f - x;
  return n.beta * x + (x > VecF{} ? n.alpha_p * x * x : n.alpha_n * below);
}

inline void xielu(float* x, const Xielu& numbers, int64_t count) {
  sweep(
      count, [&](int64_t i) { store(x + i, xielu_of(load(x + i), numbers)); },
      [&](int64_t i) { x[i] = xielu_of(splat(x[i]), numbers)[0]; });
}

inline void rotate(float* x, int heads, int head_dim, int pairs, bool interleaved, const float* cos,
                   const float* sin) {
  for (int h = 0; h < heads; h++, x += head_dim) {
    if (interleaved) {
      for (int i = 0; i < pairs; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = fma(a, cos[i], -(b * sin[i]));
        x[2 * i + 1] = fma(a, sin[i], b * cos[i]);
      }
    } else {
      for (int i = 0; i < pairs; i++) {
        const float a = x[i], b = x[i + pairs];
        x[i] = fma(a, cos[i], -(b * sin[i]));
        x[i + pairs] = fma(a, sin[i], b * cos[i]);
      }
    }
  }
}

// One group in bytes at `scale`; returns the sum of the bytes.
EXO_INLINE int quantize_group(const float* x, int count, float inverse, int8_t* values) {
  VecI sum = {};
  for (int i = 0; i < count; i += W) {
    const VecI q = __builtin_convertvector(round_even(load(x + i) * inverse), VecI);
    sum += q;
    typedef int8_t VecB __attribute__((vector_size(W)));
    const VecB bytes = __builtin_convertvector(q, VecB);
    __builtin_memcpy(values + i, &bytes, sizeof bytes);
  }
  return reduce_add(sum);
}

struct Peak {
  float largest, energy;
  float of_half;  // the most that 16 columns add up to, each without its sign
  // Whether one value leaves the others of its group nothing.
  EXO_INLINE bool dwarfs() const { return largest * largest > kPeakShare * energy; }
};
EXO_INLINE Peak peak_of(const float* x, int count) {
  VecF peak = {}, energy[kVecs] = {};
  float of_half = 0;
  for (int i = 0; i < count; i += kLanes) {
    VecF amount[kVecs];
    for (int v = 0; v < kVecs; v++) {
      const VecF some = load(x + i + v * W);
      amount[v] = abs(some);
      peak = max(peak, amount[v]);
      energy[v] = fma(some, some, energy[v]);
    }
    const float sum = reduce_add(amount);
    of_half = of_half > sum ? of_half : sum;
  }
  return {reduce_max(peak), reduce_add(energy), of_half};
}

// What `values` at `scale` leave over of x, in bytes so that half of it is `most`; returns their
// sum.
EXO_INLINE int quantize_rest(const float* x, int count, const int8_t* values, float scale,
                             float inverse, int most, int8_t* rest) {
  float left[128];
  for (int i = 0; i < count; i++) {
    left[i] = fma(-scale, static_cast<float>(values[i]), x[i]);
  }
  return quantize_group(left, count, inverse * static_cast<float>(2 * most), rest);
}

// What kernels read of a super-block beside its bytes, whose sums of halves are `sums`.
EXO_INLINE void put_super(QuantizedSuper& out, float scale, const int32_t* multiples,
                          const int32_t* sums) {
  constexpr int kUnits = QuantizedSuper::kUnits;
  out.scale = scale;
  for (int u = 0; u < kUnits; u++) {
    const int32_t sum = sums[2 * u] + sums[2 * u + 1];
    out.multiples[u] = multiples[u];
    out.unit_sums[u] = static_cast<int16_t>(multiples[u] * sum);
    out.unit_less[u] = -QuantizedSuper::kUnitZero * sum;
    out.second_less[u] = QuantizedSuper::kBias - QuantizedSuper::kHalfZero * sums[2 * u + 1];
  }
  for (int h = 0; h < QuantizedSuper::kHalves; h++) {
    out.half_multiples[h] = static_cast<int16_t>(multiples[h / 2]);
    out.half_sums[h] = static_cast<int16_t>(multiples[h / 2] * sums[h]);
    out.half_less[h] = -QuantizedSuper::kHalfZero * sums[h];
  }
}

// One super-block. The largest value becomes 127 at the largest multiple, or less where 16 columns
// would add up to too much; other units have the least multiple that holds theirs.
inline void quantize_super(const float* x, bool all_fine, int8_t* values, QuantizedSuper& coarse,
                           int8_t* rest, QuantizedSuper& fine, uint8_t* is_fine) {
  constexpr int kUnits = QuantizedSuper::kUnits;
  constexpr int kHalf = kUnitCols / 2, kMostRest = QuantizedSuper::kMostOfHalf / kHalf;
  static_assert(kLanes == kHalf);
  // Rounding adds at most a half to each.
  constexpr float kOfHalf = 127.f / (QuantizedSuper::kMostOfHalf - kHalf / 2);
  float peaks[kUnits];
  bool dwarfs[kUnits];
  float largest = 0;
  for (int u = 0; u < kUnits; u++) {
    const Peak peak = peak_of(x + u * kUnitCols, kUnitCols);
    const float sum = peak.of_half * kOfHalf;
    peaks[u] = peak.largest > sum ? peak.largest : sum;
    dwarfs[u] = peak.dwarfs();
    largest = largest > peaks[u] ? largest : peaks[u];
  }
  constexpr float kSmallest = 1e-30f;  // below, a reciprocal may be infinite
  if (!(largest > kSmallest)) largest = 0;
  const float scale = largest * (1.f / (127 * kMostMultiple));
  const float steps = largest > 0 ? kMostMultiple / largest : 0.f;
  int32_t multiples[kUnits], of_fine[kUnits], sums[QuantizedSuper::kHalves],
      rests[QuantizedSuper::kHalves] = {};
  bool some_fine = false;
  for (int u = 0; u < kUnits; u++) {
    const float wanted = peaks[u] * steps;
    int multiple = static_cast<int>(wanted);
    multiple += static_cast<float>(multiple) < wanted;
    multiple = multiple < 1 ? 1 : multiple > kMostMultiple ? kMostMultiple : multiple;
    const float step = scale * static_cast<float>(multiple);
    const float inverse = 127.f / static_cast<float>(multiple) * steps;
    is_fine[u] = largest > 0 && (all_fine || dwarfs[u]);
    multiples[u] = multiple;
    of_fine[u] = is_fine[u] ? multiple : 0;
    some_fine |= is_fine[u] != 0;
    for (int h = 2 * u; h < 2 * u + 2; h++) {
      const int at = h * kHalf;
      sums[h] = quantize_group(x + at, kHalf, inverse, values + at);
      if (is_fine[u]) {
        rests[h] = quantize_rest(x + at, kHalf, values + at, step, inverse, kMostRest, rest + at);
      }
    }
  }
  put_super(coarse, scale, multiples, sums);
  if (some_fine) {
    put_super(fine, scale * (1.f / (2 * kMostRest)), of_fine, rests);
  } else {
    fine = {};
  }
}

inline void quantize_supers(const float* x, int64_t rows, const QuantizedRows& out, int64_t first,
                            bool all_fine) {
  const int64_t supers = out.cols / kSuperCols;
  for (int64_t r = first; r < first + rows; r++) {
    for (int64_t s = 0; s < supers; s++, x += kSuperCols) {
      const int64_t at = r * scale_stride(out.cols, kSuperCols) + s;
      const int64_t value = r * out.stride + s * kSuperCols;
      quantize_super(x, all_fine, out.coarse.values + value, out.coarse.supers[at],
                     out.fine.values + value, out.fine.supers[at],
                     out.is_fine + (r * supers + s) * QuantizedSuper::kUnits);
    }
  }
}

// The largest value of a group becomes 127; what is left over, at most half a step, again.
inline void quantize_rows(const float* x, int64_t rows, const QuantizedRows& out, int64_t first,
                          bool all_fine) {
  if (out.group == kPairCols) return round_rows(x, rows, out, first);
  if (out.group == kSuperCols) return quantize_supers(x, rows, out, first, all_fine);
  const int64_t groups = out.cols / out.group;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t g = 0; g < groups; g++) {
      const float* in = x + r * out.cols + g * out.group;
      const int64_t value = (first + r) * out.stride + g * out.group;
      const int64_t at = (first + r) * groups + g;
      const Peak peak = peak_of(in, out.group);
      const float largest = peak.largest;
      const float inverse = largest > 0 ? 127.f / largest : 0.f;
      const float scale = largest * (1.f / 127.f);
      int8_t* coarse = out.coarse.values + value;
      const int sum = quantize_group(in, out.group, inverse, coarse);
      out.coarse.groups[at] = {scale, scale * static_cast<float>(sum), -sum};
      out.is_fine[at] = (all_fine || peak.dwarfs()) && largest > 0;
      out.fine.groups[at] = {};
      if (!out.is_fine[at]) continue;
      const float step = scale * (1.f / 254.f);
      const int left_sum =
          quantize_rest(in, out.group, coarse, scale, inverse, 127, out.fine.values + value);
      out.fine.groups[at] = {step, step * static_cast<float>(left_sum), -left_sum};
    }
  }
}

}  // namespace exo::EXO_ISA

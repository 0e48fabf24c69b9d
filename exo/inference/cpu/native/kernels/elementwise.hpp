// Kernels that take one row at a time.
#pragma once

#include "vector.hpp"

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

// The largest value of a group becomes 127; what is left over, at most half a step, again.
inline void quantize_rows(const float* x, int64_t rows, const QuantizedRows& out, int64_t first,
                          bool all_fine) {
  const int64_t groups = out.cols / out.group;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t g = 0; g < groups; g++) {
      const float* in = x + r * out.cols + g * out.group;
      const int64_t value = (first + r) * out.cols + g * out.group, at = (first + r) * groups + g;
      VecF peak = {}, energy[kVecs] = {};
      for (int i = 0; i < out.group; i += kLanes) {
        for (int v = 0; v < kVecs; v++) {
          const VecF x = load(in + i + v * W);
          peak = max(peak, abs(x));
          energy[v] = fma(x, x, energy[v]);
        }
      }
      const float largest = reduce_max(peak);
      const float inverse = largest > 0 ? 127.f / largest : 0.f;
      const float scale = largest * (1.f / 127.f);
      int8_t* coarse = out.coarse.values + value;
      const int sum = quantize_group(in, out.group, inverse, coarse);
      out.coarse.groups[at] = {scale, scale * static_cast<float>(sum), sum};
      const bool is_fine = all_fine || largest * largest > kPeakShare * reduce_add(energy);
      out.is_fine[at] = is_fine && largest > 0;
      out.fine.groups[at] = {};
      if (!out.is_fine[at]) continue;
      float left[128];
      for (int i = 0; i < out.group; i++) {
        left[i] = fma(-scale, static_cast<float>(coarse[i]), in[i]);
      }
      const float step = scale * (1.f / 254.f);
      const int left_sum =
          quantize_group(left, out.group, inverse * 254.f, out.fine.values + value);
      out.fine.groups[at] = {step, step * static_cast<float>(left_sum), left_sum};
    }
  }
}

}  // namespace exo::EXO_ISA

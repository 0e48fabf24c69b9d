// Layers whose memory of what was before is a state of fixed size.
#pragma once

#include "elementwise.hpp"

namespace exo::EXO_ISA {

template <bool SILU>
EXO_INLINE VecF convolved(const float* x, int64_t stride, const float* weights, int64_t channels,
                          int taps, VecF sum) {
  for (int t = 0; t < taps; t++) {
    sum = fma(load(weights + t * channels), load(x + t * stride), sum);
  }
  return SILU ? sum * sigmoid(sum) : sum;
}

template <bool SILU>
void convolve_all(const float* x, int64_t stride, const float* weights, const float* bias,
                  int64_t channels, int taps, float* out) {
  int64_t i = 0;
  for (; i + W <= channels; i += W) {
    const VecF sum = bias != nullptr ? load(bias + i) : VecF{};
    store(out + i, convolved<SILU>(x + i, stride, weights + i, channels, taps, sum));
  }
  for (; i < channels; i++) {
    VecF sum = splat(bias != nullptr ? bias[i] : 0.f);
    for (int t = 0; t < taps; t++) {
      sum = fma(splat(weights[t * channels + i]), x[t * stride + i], sum);
    }
    out[i] = (SILU ? sum * sigmoid(sum) : sum)[0];
  }
}

inline void convolve(const float* x, int64_t stride, const float* weights, const float* bias,
                     int64_t channels, int taps, bool silu, float* out) {
  if (silu) return convolve_all<true>(x, stride, weights, bias, channels, taps, out);
  convolve_all<false>(x, stride, weights, bias, channels, taps, out);
}

// R rows of the state through one token. `step` is a copy: stores to the state might change
// another.
template <int R, bool DELTA>
EXO_INLINE void recur_rows(float* state, StateStep step, int keys, int64_t row) {
  float change[R];
  if constexpr (DELTA) {
    VecF recalled[R][kVecs] = {};
    for (int i = 0; i < keys; i += kLanes) {
      for (int v = 0; v < kVecs; v++) {
        const VecF key = load(step.key + i + v * W);
        for (int r = 0; r < R; r++) {
          recalled[r][v] = fma(load(state + (row + r) * keys + i + v * W), key, recalled[r][v]);
        }
      }
    }
    for (int r = 0; r < R; r++) {
      change[r] = step.rate * fma(-step.decay, reduce_add(recalled[r]), step.value[row + r]);
    }
  } else {
    for (int r = 0; r < R; r++) change[r] = step.rate * step.value[row + r];
  }
  VecF sums[R][kVecs] = {};
  for (int i = 0; i < keys; i += kLanes) {
    for (int v = 0; v < kVecs; v++) {
      const VecF key = load(step.key + i + v * W), query = load(step.query + i + v * W);
      for (int r = 0; r < R; r++) {
        float* place = state + (row + r) * keys + i + v * W;
        const VecF now = fma(load(place), step.decay, change[r] * key);
        store(place, now);
        sums[r][v] = fma(now, query, sums[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++) step.out[row + r] = reduce_add(sums[r]);
}

template <bool DELTA>
void recur_all(float* state, const StateStep* steps, int64_t tokens, int keys, int64_t rows) {
  constexpr int kMany = kVecs == 1 ? 8 : 4;  // whose sums hide the latency of an addition
  for (int64_t t = 0; t < tokens; t++) {
    int64_t row = 0;
    for (; row + kMany <= rows; row += kMany) recur_rows<kMany, DELTA>(state, steps[t], keys, row);
    for (; row < rows; row++) recur_rows<1, DELTA>(state, steps[t], keys, row);
  }
}

inline void recur(float* state, const StateStep* steps, int64_t tokens, int keys, int64_t rows,
                  bool delta) {
  if (delta) return recur_all<true>(state, steps, tokens, keys, rows);
  recur_all<false>(state, steps, tokens, keys, rows);
}

}  // namespace exo::EXO_ISA

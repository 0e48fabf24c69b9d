// Layers whose memory of what was before is a state of fixed size.
#pragma once

#include <type_traits>

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

// A row's sums over the keys are four, each of every fourth key.
inline constexpr int kKeySums = 4;
static_assert(kStateLanes == kLanes);

// B blocks of 16 rows (kernels.hpp), of which `rows` exist, through one token. `step` is a copy:
// stores to the state might change another.
template <int B, Recurrence KIND>
EXO_INLINE void recur_blocks(float* state, StateStep step, int keys, int64_t rows) {
  const int64_t apart = int64_t{keys} * kLanes;
  float values[B * kLanes] = {};
  __builtin_memcpy(values, step.value, static_cast<size_t>(rows) * sizeof(float));
  const auto joined = [](const VecF* sums) __attribute__((always_inline)) {
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  VecF change[B][kVecs], sums[B][kVecs][kKeySums] = {};
  constexpr bool kByKey = KIND == Recurrence::kDeltaByKey;
  if constexpr (KIND != Recurrence::kSum) {
    const float* place = state;
    for (int i = 0; i < keys; i += kKeySums) {
      for (int s = 0; s < kKeySums; s++, place += kLanes) {
        const VecF key = splat(kByKey ? step.key[i + s] * step.decays[i + s] : step.key[i + s]);
        for (int b = 0; b < B; b++) {
          for (int v = 0; v < kVecs; v++) {
            sums[b][v][s] = fma(load(place + b * apart + v * W), key, sums[b][v][s]);
          }
        }
      }
    }
  }
  for (int b = 0; b < B; b++) {
    for (int v = 0; v < kVecs; v++) {
      VecF value = load(values + b * kLanes + v * W);
      if constexpr (kByKey) value = value - joined(sums[b][v]);
      if constexpr (KIND == Recurrence::kDelta) {
        value = fma(joined(sums[b][v]), -step.decay, value);
      }
      change[b][v] = step.rate * value;
      for (auto& sum : sums[b][v]) sum = VecF{};
    }
  }
  for (int i = 0; i < keys; i += kKeySums) {
    for (int s = 0; s < kKeySums; s++, state += kLanes) {
      const VecF key = splat(step.key[i + s]), query = splat(step.query[i + s]);
      const float decay = kByKey ? step.decays[i + s] : step.decay;
      for (int b = 0; b < B; b++) {
        for (int v = 0; v < kVecs; v++) {
          float* place = state + b * apart + v * W;
          const VecF now = fma(load(place), decay, change[b][v] * key);
          store(place, now);
          sums[b][v][s] = fma(now, query, sums[b][v][s]);
        }
      }
    }
  }
  for (int b = 0; b < B; b++) {
    for (int v = 0; v < kVecs; v++) store(values + b * kLanes + v * W, joined(sums[b][v]));
  }
  __builtin_memcpy(step.out, values, static_cast<size_t>(rows) * sizeof(float));
}

template <Recurrence KIND>
void recur_all(float* state, const StateStep* steps, int64_t tokens, int keys, int64_t rows) {
  constexpr int kBlocks = kVecs == 1 ? 2 : 1;  // what registers hold of sums
  for (int64_t t = 0; t < tokens; t++) {
    StateStep step = steps[t];
    float* blocks = state;
    int64_t left = rows;
    const auto pass = [&](auto count) __attribute__((always_inline)) {
      constexpr int64_t kRows = count.value * kLanes;
      recur_blocks<count.value, KIND>(blocks, step, keys, left < kRows ? left : kRows);
      blocks += kRows * keys;
      step.value += kRows, step.out += kRows, left -= kRows;
    };
    while (left > (kBlocks - 1) * kLanes) pass(std::integral_constant<int, kBlocks>{});
    while (left > 0) pass(std::integral_constant<int, 1>{});
  }
}

inline void recur(float* state, const StateStep* steps, int64_t tokens, int keys, int64_t rows,
                  Recurrence kind) {
  switch (kind) {
    case Recurrence::kSum:
      return recur_all<Recurrence::kSum>(state, steps, tokens, keys, rows);
    case Recurrence::kDelta:
      return recur_all<Recurrence::kDelta>(state, steps, tokens, keys, rows);
    case Recurrence::kDeltaByKey:
      return recur_all<Recurrence::kDeltaByKey>(state, steps, tokens, keys, rows);
  }
}

// log(1 + e), 0 <= e <= 1: 2 artanh(e / (2 + e)), of which this is the series.
EXO_INLINE VecF log1p(VecF e) {
  const VecF s = e / (e + 2.f), square = s * s;
  VecF sum = splat(2.f / 13);
  for (const float term : {2.f / 11, 2.f / 9, 2.f / 7, 2.f / 5, 2.f / 3, 2.f}) {
    sum = fma(sum, square, splat(term));
  }
  return s * sum;
}

EXO_INLINE VecF softplus(VecF x) { return max(x, VecF{}) + log1p(exp(min(x, -x))); }

EXO_INLINE VecF faded(VecF x, float rate, float bound) {
  if (bound < 0.f) return exp(bound * sigmoid(rate * x));
  return exp(-rate * softplus(x));
}

inline void fade(float* x, const float* bias, float rate, float bound, int64_t count) {
  sweep(
      count, [&](int64_t i) { store(x + i, faded(load(x + i) + load(bias + i), rate, bound)); },
      [&](int64_t i) { x[i] = faded(splat(x[i] + bias[i]), rate, bound)[0]; });
}

// kStateLanes channels through one token after the other.
inline void scan(float* state, const Scan& channels, int64_t tokens, int keys) {
  Scan token = channels;
  for (int64_t t = 0; t < tokens; t++) {
    for (int v = 0; v < kLanes; v += W) {
      const VecF step = softplus(load(token.step + v)), x = load(token.x + v);
      const VecF gain = step * x;
      VecF sums[kKeySums] = {};
      for (int i = 0; i < keys; i += kKeySums) {
        for (int s = 0; s < kKeySums; s++) {
          const int key = i + s;
          float* place = state + key * kLanes + v;
          const VecF decay = exp(-(load(token.rates + key * kLanes + v) * step));
          const VecF now = fma(load(place), decay, gain * token.b[key]);
          store(place, now);
          sums[s] = fma(now, token.c[key], sums[s]);
        }
      }
      const VecF read = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      store(token.out + v, fma(load(token.skip + v), x, read));
    }
    token.step += token.width, token.x += token.width, token.out += token.width;
    token.b += token.apart, token.c += token.apart;
  }
}

}  // namespace exo::EXO_ISA

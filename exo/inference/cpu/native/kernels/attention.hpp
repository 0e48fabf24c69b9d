// Attention of query rows over one chunk of keys, and the merging of chunks.
//
// Keys are taken in chunks of 256 at fixed positions. Each chunk gives an unnormalized sum with its
// own maximum; chunks are merged in order. A row's arithmetic therefore depends on its position
// alone: decoded or prefilled, in whatever tile, on whatever thread. A key a row must not see has
// the weight 0, which changes no sum.
#pragma once

#include <cstring>
#include <type_traits>

#include "vector.hpp"

namespace exo::EXO_ISA {

inline constexpr int kRowTile = W == 16 ? 8 : 4;  // query rows whose sums stay in registers
inline constexpr float kHidden = -3e38f;

// Calls use with the type as a constant.
template <typename Use>
EXO_INLINE void with_type(KVType type, const Use& use) {
  switch (type) {
    case KVType::kFloat32:
      return use(std::integral_constant<KVType, KVType::kFloat32>{});
    case KVType::kFloat16:
      return use(std::integral_constant<KVType, KVType::kFloat16>{});
    case KVType::kInt8:
      return use(std::integral_constant<KVType, KVType::kInt8>{});
  }
}

template <KVType T>
EXO_INLINE VecF load(const uint8_t* p, int64_t index) {
  if constexpr (T == KVType::kFloat32) return load(reinterpret_cast<const float*>(p) + index);
  if constexpr (T == KVType::kFloat16)
    return load_f16(reinterpret_cast<const uint16_t*>(p) + index);
  return load_i8(reinterpret_cast<const int8_t*>(p) + index);
}
template <KVType T>
EXO_INLINE float load_one(const uint8_t* p, int64_t index) {
  if constexpr (T == KVType::kFloat32) return load_one<DType::kFloat32>(p, index);
  if constexpr (T == KVType::kFloat16) return load_one<DType::kFloat16>(p, index);
  return static_cast<float>(reinterpret_cast<const int8_t*>(p)[index]);
}

// The scales that follow the bytes of a page's keys or values.
EXO_INLINE const float* scales_of(const uint8_t* bytes, int64_t head_dim) {
  return reinterpret_cast<const float*>(bytes + kPageTokens * head_dim);
}

// Adds q_r[d] * k_j[d] for d in [from, stop) and B blocks of 16 keys.
template <KVType T, int R, int B, int VECS>
EXO_INLINE void add_products(const uint8_t* const (&keys)[B], const float* const* q, int64_t from,
                             int64_t stop, VecF (&sum)[B][R][VECS]) {
  for (int64_t d = from; d < stop; d++) {
    for (int b = 0; b < B; b++) {
      for (int v = 0; v < VECS; v++) {
        const VecF k = load<T>(keys[b], d * kKeyBlock + v * W);
        for (int r = 0; r < R; r++) sum[b][r][v] = fma(k, q[r][d], sum[b][r][v]);
      }
    }
  }
}

// scores[r][j] = q_r . k_j for B blocks of 16 keys from j on.
template <KVType T, int R, int B>
EXO_INLINE void score_blocks(const KVView& kv, int64_t chunk, int j, const float* const* q,
                             float (*scores)[kChunkTokens]) {
  static_assert(kKeyBlock == kLanes);
  const uint8_t* keys[B];
  const float* scales[B];
  const int64_t groups = kv_groups(kv.head_dim);
  for (int b = 0; b < B; b++) {
    const int64_t token = chunk * kChunkTokens + j + b * kKeyBlock, slot = token % kPageTokens;
    const uint8_t* all = kv.pages[token / kPageTokens] + kv.key_offset;
    keys[b] = all + slot * kv.head_dim * size_of(T);
    scales[b] = scales_of(all, kv.head_dim) + slot * groups;
  }
  VecF sum[B][R][kVecs] = {};
  if constexpr (T == KVType::kInt8) {
    for (int64_t g = 0; g < groups; g++) {
      VecF part[B][R][kVecs] = {};
      const int64_t from = g * kKVGroup, stop = from + kKVGroup;
      add_products<T>(keys, q, from, stop < kv.head_dim ? stop : kv.head_dim, part);
      for (int b = 0; b < B; b++) {
        for (int v = 0; v < kVecs; v++) {
          const VecF scale = load(scales[b] + g * kKeyBlock + v * W);
          for (int r = 0; r < R; r++) sum[b][r][v] = fma(part[b][r][v], scale, sum[b][r][v]);
        }
      }
    }
  } else {
    add_products<T>(keys, q, 0, kv.head_dim, sum);
  }
  for (int b = 0; b < B; b++) {
    for (int r = 0; r < R; r++) {
      for (int v = 0; v < kVecs; v++) store(scores[r] + j + b * kKeyBlock + v * W, sum[b][r][v]);
    }
  }
}

template <KVType T, int R>
void score_tile(const KVView& kv, int64_t chunk, int begin, int end, const float* const* q,
                float (*scores)[kChunkTokens]) {
  constexpr int kBlocks = W < 16 ? 1 : R == 1 ? 4 : 2;
  int j = begin;
  for (; j + kBlocks * kKeyBlock <= end; j += kBlocks * kKeyBlock) {
    score_blocks<T, R, kBlocks>(kv, chunk, j, q, scores);
  }
  for (; j < end; j += kKeyBlock) score_blocks<T, R, 1>(kv, chunk, j, q, scores);
}

// out_r[d] = sum over j of p_r[j] * v_j[d], keys in order. V vectors lie in one group.
template <KVType T, int R, int V>
void weigh_values(const KVView& kv, int64_t chunk, int begin, int end, int64_t d,
                  const float (*p)[kChunkTokens], float* out) {
  const int64_t groups = kv_groups(kv.value_dim), group = d / kKVGroup;
  VecF sum[R][V] = {};
  for (int j = begin; j < end;) {
    const int64_t token = chunk * kChunkTokens + j;
    const uint8_t* values = kv.pages[token / kPageTokens] + kv.value_offset;
    const float* scale = scales_of(values, kv.value_dim) + token % kPageTokens * groups + group;
    const int last = static_cast<int>(kPageTokens - token % kPageTokens) + j;
    const int stop = last < end ? last : end;
    int64_t at = token % kPageTokens * kv.value_dim + d;
    for (; j < stop; j++, at += kv.value_dim, scale += groups) {
      float weights[R];
      for (int r = 0; r < R; r++) {
        weights[r] = T == KVType::kInt8 ? p[r][j] * *scale : p[r][j];
      }
      for (int v = 0; v < V; v++) {
        const VecF value = load<T>(values, at + v * W);
        for (int r = 0; r < R; r++) sum[r][v] = fma(value, weights[r], sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) store(out + r * kv.value_dim + d + v * W, sum[r][v]);
  }
}

template <KVType T, int R>
void attend_tile(const KVView& kv, const AttentionRule& rule, int64_t chunk,
                 const float* const* queries, const int64_t* positions, float* out,
                 Partial* partials) {
  alignas(64) float scores[R][kChunkTokens];
  const int64_t base = chunk * kChunkTokens;
  // The keys each row sees, and what the tile must compute for all of them.
  int first[R], last[R], begin = kChunkTokens, end = 0;
  for (int r = 0; r < R; r++) {
    int64_t to = positions[r] + 1 - base;
    int64_t from = rule.first_seen(positions[r]) - base;
    to = to > kChunkTokens ? kChunkTokens : to;
    from = from < 0 ? 0 : from;
    first[r] = static_cast<int>(from), last[r] = static_cast<int>(to);
    if (from < to) {
      begin = first[r] < begin ? first[r] : begin;
      end = last[r] > end ? last[r] : end;
    }
  }
  begin = begin / kKeyBlock * kKeyBlock;
  end = (end + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  if (begin >= end) {
    for (int r = 0; r < R; r++) partials[r] = {kHidden, 0.f};
    return;
  }
  score_tile<T, R>(kv, chunk, begin, end, queries, scores);
  VecI lanes;
  for (int i = 0; i < W; i++) lanes[i] = i;
  for (int r = 0; r < R; r++) {
    VecF peak = splat(kHidden);
    for (int j = begin; j < end; j += W) {
      VecF s = load(scores[r] + j);
      if (rule.soft_cap > 0) s = rule.soft_cap * tanh(s / rule.soft_cap);
      const VecI key = lanes + j;
      s = ((key >= first[r]) & (key < last[r])) ? s : splat(kHidden);
      peak = max(peak, s);
      store(scores[r] + j, s);
    }
    const float top = reduce_max(peak);
    VecF sum[kVecs] = {};
    for (int j = begin; j < end; j += kLanes) {
      for (int v = 0; v < kVecs; v++) {
        const VecF s = load(scores[r] + j + v * W);
        const VecF p = s > splat(kHidden) ? exp(s - top) : VecF{};
        sum[v] += p;
        store(scores[r] + j + v * W, p);
      }
    }
    partials[r] = {top, reduce_add(sum)};
  }
  constexpr int kMost = T == KVType::kInt8 ? kKVGroup / W : 8;
  constexpr int kWide = R == 1 ? (kMost < 8 ? kMost : 8) : W < 16 || R > 4 ? 2 : 4;
  int64_t d = 0;
  for (; d + kWide * W <= kv.value_dim; d += kWide * W) {
    weigh_values<T, R, kWide>(kv, chunk, begin, end, d, scores, out);
  }
  for (; d + W <= kv.value_dim; d += W)
    weigh_values<T, R, 1>(kv, chunk, begin, end, d, scores, out);
  for (; d < kv.value_dim; d++) {  // a head narrower than a vector
    for (int r = 0; r < R; r++) {
      float sum = 0;
      for (int j = begin; j < end; j++) {
        const int64_t token = base + j;
        const uint8_t* values = kv.pages[token / kPageTokens] + kv.value_offset;
        const int64_t slot = token % kPageTokens;
        float weight = scores[r][j];
        if constexpr (T == KVType::kInt8) {
          weight *= scales_of(values, kv.value_dim)[slot * kv_groups(kv.value_dim) + d / kKVGroup];
        }
        sum = fma(load_one<T>(values, slot * kv.value_dim + d), weight, sum);
      }
      out[r * kv.value_dim + d] = sum;
    }
  }
}

template <KVType T>
void attend_rows(const KVView& kv, const AttentionRule& rule, int64_t chunk,
                 const float* const* queries, const int64_t* positions, int count, float* out,
                 Partial* partials) {
  int r = 0;
  for (; r + kRowTile <= count; r += kRowTile) {
    attend_tile<T, kRowTile>(kv, rule, chunk, queries + r, positions + r, out + r * kv.value_dim,
                             partials + r);
  }
  if (r == count) return;
  using Tile = void (*)(const KVView&, const AttentionRule&, int64_t, const float* const*,
                        const int64_t*, float*, Partial*);
  constexpr Tile kTiles[] = {nullptr,           attend_tile<T, 1>, attend_tile<T, 2>,
                             attend_tile<T, 3>, attend_tile<T, 4>, attend_tile<T, 5>,
                             attend_tile<T, 6>, attend_tile<T, 7>};
  kTiles[count - r](kv, rule, chunk, queries + r, positions + r, out + r * kv.value_dim,
                    partials + r);
}

inline void attend_chunk(const KVView& kv, const AttentionRule& rule, int64_t chunk,
                         const float* const* queries, const int64_t* positions, int count,
                         float* out, Partial* partials) {
  with_type(kv.type, [&](auto type) {
    attend_rows<type.value>(kv, rule, chunk, queries, positions, count, out, partials);
  });
}

template <KVType T, int R>
void score_rows(const KVView& kv, int64_t chunk, const float* const* queries, const float* weights,
                int keys, float* out) {
  alignas(64) float scores[R][kChunkTokens];
  score_tile<T, R>(kv, chunk, 0, keys, queries, scores);
  for (int r = 0; r < R; r++) {
    for (int j = 0; j < keys; j += W) {
      store(out + j, fma(max(load(scores[r] + j), VecF{}), weights[r], load(out + j)));
    }
  }
}

template <KVType T>
void score_all(const KVView& kv, int64_t chunk, const float* const* queries, const float* weights,
               int count, int keys, float* out) {
  keys = (keys + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  for (int j = 0; j < keys; j++) out[j] = 0.f;
  int r = 0;
  for (; r + kRowTile <= count; r += kRowTile) {
    score_rows<T, kRowTile>(kv, chunk, queries + r, weights + r, keys, out);
  }
  for (; r < count; r++) score_rows<T, 1>(kv, chunk, queries + r, weights + r, keys, out);
}

inline void score_chunk(const KVView& kv, int64_t chunk, const float* const* queries,
                        const float* weights, int count, int keys, float* out) {
  with_type(kv.type, [&](auto type) {
    score_all<type.value>(kv, chunk, queries, weights, count, keys, out);
  });
}

// As many tiles of R rows as there are from `row` on, which then is the first of what is left.
template <KVType T, int R>
void multiply_rows(const KVView& kv, int64_t chunk, const float* const* queries, int& row,
                   int count, int keys, float* out, int64_t apart) {
  alignas(64) float products[R][kChunkTokens];
  for (; row + R <= count; row += R) {
    score_tile<T, R>(kv, chunk, 0, keys, queries + row, products);
    for (int r = 0; r < R; r++) {
      std::memcpy(out + (row + r) * apart, products[r], static_cast<size_t>(keys) * sizeof(float));
    }
  }
}

template <KVType T>
void multiply_all(const KVView& kv, int64_t chunk, const float* const* queries, int count, int keys,
                  float* out, int64_t apart) {
  keys = (keys + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  int row = 0;
  multiply_rows<T, kRowTile>(kv, chunk, queries, row, count, keys, out, apart);
  multiply_rows<T, 4>(kv, chunk, queries, row, count, keys, out, apart);
  multiply_rows<T, 2>(kv, chunk, queries, row, count, keys, out, apart);
  multiply_rows<T, 1>(kv, chunk, queries, row, count, keys, out, apart);
}

inline void multiply_chunk(const KVView& kv, int64_t chunk, const float* const* queries, int count,
                           int keys, float* out, int64_t apart) {
  with_type(kv.type, [&](auto type) {
    multiply_all<type.value>(kv, chunk, queries, count, keys, out, apart);
  });
}

EXO_INLINE float scalar_exp(float x) { return exp(splat(x))[0]; }

inline void merge(float* out, Partial& partial, const float* other, const Partial& other_partial,
                  int value_dim) {
  if (other_partial.sum == 0.f) return;
  if (partial.sum == 0.f) {
    partial = other_partial;
    for (int d = 0; d < value_dim; d++) out[d] = other != nullptr ? other[d] : 0.f;
    return;
  }
  const float top = partial.max > other_partial.max ? partial.max : other_partial.max;
  const float a = scalar_exp(partial.max - top), b = scalar_exp(other_partial.max - top);
  partial = {top, fma(partial.sum, a, other_partial.sum * b)};
  for (int d = 0; d < value_dim; d++) {
    out[d] = other != nullptr ? fma(out[d], a, other[d] * b) : out[d] * a;
  }
}

inline void normalize(float* out, const Partial& partial, int value_dim) {
  const float inverse = 1.f / partial.sum;
  for (int d = 0; d < value_dim; d++) out[d] *= inverse;
}

// Calls put(i, values[i] as float16).
template <typename Put>
EXO_INLINE void each_half(const float* values, int count, const Put& put) {
  for (int i = 0; i < count; i += W) {
    float lanes[W] = {};
    uint16_t halves[W];
    const int n = count - i < W ? count - i : W;
    std::memcpy(lanes, values + i, static_cast<size_t>(n) * 4);
    store_f16(halves, load(lanes));
    for (int lane = 0; lane < n; lane++) put(i + lane, halves[lane]);
  }
}

// Calls put(i, byte) for all values and put_scale(group, scale) for each group: the largest value
// becomes 127, all are rounded half to even.
template <typename Put, typename PutScale>
EXO_INLINE void each_byte(const float* values, int count, const Put& put,
                          const PutScale& put_scale) {
  for (int from = 0; from < count; from += kKVGroup) {
    const int stop = from + kKVGroup < count ? from + kKVGroup : count;
    float peak = 0;
    for (int i = from; i < stop; i++) {
      const float size = __builtin_fabsf(values[i]);
      peak = size > peak ? size : peak;
    }
    put_scale(from / kKVGroup, peak / 127);
    const float inverse = peak > 0 ? 127 / peak : 0.f;
    for (int i = from; i < stop; i += W) {
      float lanes[W] = {};
      const int n = stop - i < W ? stop - i : W;
      std::memcpy(lanes, values + i, static_cast<size_t>(n) * 4);
      const VecF rounded = round_even(load(lanes) * inverse);
      for (int lane = 0; lane < n; lane++) put(i + lane, static_cast<int8_t>(rounded[lane]));
    }
  }
}

inline void store_key(const float* key, uint8_t* keys, int slot, int head_dim, KVType type) {
  const int64_t block = slot / kKeyBlock * kKeyBlock * head_dim + slot % kKeyBlock;
  if (type == KVType::kFloat32) {
    float* out = reinterpret_cast<float*>(keys) + block;
    for (int d = 0; d < head_dim; d++) out[d * kKeyBlock] = key[d];
    return;
  }
  if (type == KVType::kInt8) {
    int8_t* out = reinterpret_cast<int8_t*>(keys) + block;
    float* scales = reinterpret_cast<float*>(keys + kPageTokens * head_dim) +
                    slot / kKeyBlock * kKeyBlock * kv_groups(head_dim) + slot % kKeyBlock;
    each_byte(
        key, head_dim, [&](int d, int8_t byte) { out[d * kKeyBlock] = byte; },
        [&](int group, float scale) { scales[group * kKeyBlock] = scale; });
    return;
  }
  uint16_t* out = reinterpret_cast<uint16_t*>(keys) + block;
  each_half(key, head_dim, [&](int d, uint16_t half) { out[d * kKeyBlock] = half; });
}

inline void store_value(const float* value, uint8_t* values, int slot, int head_dim, KVType type) {
  if (type == KVType::kInt8) {
    int8_t* out = reinterpret_cast<int8_t*>(values) + static_cast<int64_t>(slot) * head_dim;
    float* scales =
        reinterpret_cast<float*>(values + kPageTokens * head_dim) + slot * kv_groups(head_dim);
    each_byte(
        value, head_dim, [&](int d, int8_t byte) { out[d] = byte; },
        [&](int group, float scale) { scales[group] = scale; });
    return;
  }
  if (type == KVType::kFloat32) {
    std::memcpy(values + static_cast<int64_t>(slot) * head_dim * 4, value,
                static_cast<size_t>(head_dim) * 4);
    return;
  }
  uint16_t* out = reinterpret_cast<uint16_t*>(values) + static_cast<int64_t>(slot) * head_dim;
  each_half(value, head_dim, [&](int d, uint16_t half) { out[d] = half; });
}

}  // namespace exo::EXO_ISA

// y = W x for bfloat16 weights and activations rounded to bfloat16.
//
// For each part of the columns (matrix.hpp), over its pairs k in order, and every output n:
//   y[n] = fma(w[n][2k + 1], x[2k + 1], y[n])
//   y[n] = fma(w[n][2k], x[2k], y[n])
// That is what AVX512-BF16's dot product computes, but for numbers below 2^-126, which it takes for
// 0 (VDPBF16PS in Intel's Architectures Software Developer's Manual).
#pragma once

#include "int8.hpp"

namespace exo::EXO_ISA {

// Whether rows are pairs for AVX512-BF16's dot products, not floats.
EXO_INLINE bool rounds_to_pairs() {
#if defined(EXO_AVX512_EMULATED)
  return true;
#elif defined(EXO_AVX512)
  return vendor.uses_bfloat16_dots;
#else
  return false;
#endif
}

EXO_INLINE uint32_t to_bfloat16(float value) {  // to the nearest, halfway to even
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Rows for the kernels below.
inline void round_rows(const float* x, int64_t rows, const QuantizedRows& out, int64_t first) {
  for (int64_t r = first; r < first + rows; r++, x += out.cols) {
    auto* row = reinterpret_cast<uint32_t*>(out.coarse.values + r * out.stride);
    if (rounds_to_pairs()) {
      auto* halves = reinterpret_cast<uint16_t*>(row);
      for (int64_t c = 0; c < out.cols; c++) halves[c] = static_cast<uint16_t>(to_bfloat16(x[c]));
      if (out.cols % 2 != 0) halves[out.cols] = 0;
    } else {
      for (int64_t c = 0; c < out.cols; c++) row[c] = to_bfloat16(x[c]) << 16;
      if (out.cols % 2 != 0) row[out.cols] = 0;
    }
  }
}

// How a tile takes what a row has for a pair of columns, and adds the pair to 16 outputs.
struct FloatPairs {
  typedef uint32_t VecU __attribute__((vector_size(W * 4)));
  static constexpr int64_t kBytes = 8;

  struct Weights {
    VecF even[kVecs], odd[kVecs];

    EXO_INLINE explicit Weights(const uint8_t* p) {
      for (int v = 0; v < kVecs; v++) {
        VecU pairs;
        __builtin_memcpy(&pairs, p + v * W * 4, sizeof pairs);
        even[v] = (VecF)(pairs << 16);
        odd[v] = (VecF)(pairs & 0xffff0000u);
      }
    }
  };
  struct Sum {
    VecF v[kVecs] = {};

    EXO_INLINE void add(const Weights& w, const int8_t* x) {
      float pair[2];
      __builtin_memcpy(pair, x, sizeof pair);
      for (int i = 0; i < kVecs; i++) v[i] = fma(w.even[i], pair[0], fma(w.odd[i], pair[1], v[i]));
    }
    EXO_INLINE Ops::Float whole() const {
      alignas(64) float lanes[kBlockRows];
      for (int i = 0; i < kVecs; i++) store(lanes + i * W, v[i]);
      return Ops::from_f32(lanes);
    }
  };
};

#ifdef EXO_AVX512
struct DotPairs {
  static constexpr int64_t kBytes = 4;

  struct Weights {
    Ops::Int pairs;
    EXO_INLINE explicit Weights(const uint8_t* p) : pairs(Ops::load_int(p)) {}
  };
  struct Sum {
    Ops::Float v = Ops::zero_float();
    EXO_INLINE void add(const Weights& w, const int8_t* x) { v = Ops::add_bf16(v, w.pairs, x); }
    EXO_INLINE Ops::Float whole() const { return v; }
  };
};
#endif

// Rows of activations whose sums over each part are kept while the weights of a part stay in a
// cache.
inline constexpr int64_t kRowsAtOnce = 64;

inline constexpr int64_t kPairsAStep = 4;  // with which something is fetched
inline constexpr int64_t steps_of(int64_t pairs) { return (pairs + kPairsAStep - 1) / kPairsAStep; }

// One part of M rows by B blocks: row m's sum over it in block b at sums[(m * B + b) * kMostParts].
// `p` and `x` are the part's first pair of columns. FETCHES: what comes next in each block, beside
// what `ahead` says.
template <typename Pairs, int M, int B, bool FETCHES>
void bfloat16_tile(const uint8_t* p, int64_t apart, const int8_t* x, int64_t stride, int64_t pairs,
                   Ahead ahead, Ops::Float* sums) {
  typename Pairs::Sum y[B][M];
  for (int64_t k = 0; k < pairs;) {
    ahead.fetch();
    const int64_t stop = k + kPairsAStep < pairs ? k + kPairsAStep : pairs;
    for (; k < stop; k++, p += 4 * kBlockRows, x += Pairs::kBytes) {
      for (int b = 0; b < B; b++) {
        if constexpr (FETCHES) prefetch<M, 1>(p + b * apart, false);
        const typename Pairs::Weights weights(p + b * apart);
        for (int m = 0; m < M; m++) y[b][m].add(weights, x + m * stride);
      }
    }
  }
  for (int m = 0; m < M; m++) {
    for (int b = 0; b < B; b++) sums[(m * B + b) * kMostParts] = y[b][m].whole();
  }
}

// Rows [row, rows) in tiles of M, then of half as many.
template <typename Pairs, int M, int B, bool FETCHES>
void bfloat16_rows(const uint8_t* p, int64_t apart, const int8_t* x, int64_t stride, int64_t pairs,
                   int64_t row, int64_t rows, Fetching& fetching, Ops::Float* sums) {
  const int64_t steps = steps_of(pairs);
  for (; row + M <= rows; row += M) {
    Ops::Float* own = sums + row * B * kMostParts;
    bfloat16_tile<Pairs, M, B, FETCHES>(p, apart, x + row * stride, stride, pairs,
                                        fetching.take(steps), own);
  }
  if constexpr (M > 1) {
    bfloat16_rows<Pairs, M / 2, B, FETCHES>(p, apart, x, stride, pairs, row, rows, fetching, sums);
  }
}

// B blocks from `block` on for all rows, `next` coming from memory meanwhile.
template <typename Pairs, int M, int B, bool FETCHES = false>
void bfloat16_block(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t block,
                    Upcoming next, float* out, int64_t stride) {
  const int64_t pairs = (w.cols + 1) / 2 / w.parts;
  const int64_t tiles = rows / M + __builtin_popcountll(static_cast<uint64_t>(rows % M));
  Fetching fetching(next, kFetchedBytes, tiles * w.parts * steps_of(pairs));
  auto* sums = reinterpret_cast<Ops::Float*>(
      scratch(static_cast<size_t>(kRowsAtOnce * B * kMostParts) * sizeof(Ops::Float)));
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    const int64_t some = rows - first < kRowsAtOnce ? rows - first : kRowsAtOnce;
    for (int64_t part = 0; part < w.parts; part++) {
      const uint8_t* p = w.block(block) + part * pairs * 4 * kBlockRows;
      const int8_t* values = x.coarse.values + first * x.stride + part * pairs * Pairs::kBytes;
      bfloat16_rows<Pairs, M, B, FETCHES>(p, w.block_bytes(), values, x.stride, pairs, 0, some,
                                          fetching, sums + part);
    }
    for (int64_t i = 0; i < some * B; i++) {
      const Ops::Float* parts = sums + i * kMostParts;
      const Ops::Float y = joined(w.parts, [&](int part) { return parts[part]; });
      finish(w, block + i % B, y, out + (first + i / B) * stride);
    }
  }
}

template <typename Pairs>
void bfloat16_layer(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                    int64_t end, float* out, int64_t stride, Upcoming upcoming) {
  // Of one row several blocks keep enough sums in flight.
  constexpr int kOfOne = 4, M = Ops::kMaxRows, B = Ops::kTileBlocks;
  const bool fetches = kFetchesToSecond && !vendor.weights_pass_by;
  int64_t b = begin;
  for (; rows == 1 && b + kOfOne <= end; b += kOfOne) {
    fetches ? bfloat16_block<Pairs, 1, kOfOne, true>(w, x, rows, b, {}, out, stride)
            : bfloat16_block<Pairs, 1, kOfOne>(w, x, rows, b, {}, out, stride);
  }
  // One or two rows wait for memory: what the processor itself fetches ahead is better then.
  const auto next = [&](int64_t count) {
    return rows > 2 ? next_blocks(w, b + count, count, end, upcoming) : Upcoming{};
  };
  for (; b + B <= end; b += B) {
    bfloat16_block<Pairs, M, B>(w, x, rows, b, next(B), out, stride);
  }
  for (; b < end; b++) bfloat16_block<Pairs, M, 1>(w, x, rows, b, next(1), out, stride);
}

inline void linear_bfloat16(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                            int64_t end, float* out, int64_t stride, Upcoming next) {
#ifdef EXO_AVX512
  if (rounds_to_pairs()) return bfloat16_layer<DotPairs>(w, x, rows, begin, end, out, stride, next);
#endif
  bfloat16_layer<FloatPairs>(w, x, rows, begin, end, out, stride, next);
}

}  // namespace exo::EXO_ISA

// y = W x from float activations: dense weights, and quantized ones decoded to float first, as are
// dense ones for many rows.
//
// Every part of an output (matrix.hpp) is one chain of fused steps over its columns in order, in
// all sizes of tile.
#pragma once

#include "linear_int8.hpp"

namespace exo::EXO_ISA {

template <DType T>
inline constexpr bool kIsScaled = T == DType::kFloat8 || T == DType::kFloat4;

// What all of a group's columns are multiplied with: W rows from `lane`.
template <DType T>
EXO_INLINE VecF group_scale(const Matrix& w, const uint8_t* block, int64_t group, int lane) {
  if constexpr (T == DType::kFloat4) {
    return load_f8(block + group * kFloat4Group + kFloat4Values + lane) * splat(w.scale * 0x1p22f);
  } else {
    return load(w.float8_scales(block, group) + lane);
  }
}

// Column k without that.
template <DType T>
EXO_INLINE VecF column(const uint8_t* block, int64_t k, int lane) {
  if constexpr (T == DType::kFloat4) {
    const uint8_t* group = block + k / kFloat4Cols * kFloat4Group;
    return load_f4(group + k % kFloat4Cols / 2 * kBlockRows + lane, k % 2 != 0);
  } else {
    return load<T>(block, k * kBlockRows + lane);
  }
}

// M rows of activations by B blocks; B > 1 keeps enough chains in flight when rows are few.
template <DType T, int M, int B>
void float_tile(const Matrix& w, const uint8_t* weights, int64_t block_bytes, const float* x,
                int64_t block, float* out, int64_t stride) {
  PartSums<B * M> sums(w.parts, w.parts);
  const int64_t part_cols = w.cols / w.parts, span = kIsScaled<T> ? w.group : part_cols;
  for (int64_t part = 0, group = 0, k = 0; part < w.parts; part++) {
    VecF y[B][M][kVecs] = {};
    for (const int64_t stop = k + part_cols; k < stop; group++) {
      const int64_t end = std::min(k + span, stop);
      VecF scale[B][kVecs];
      if constexpr (kIsScaled<T>) {
        for (int b = 0; b < B; b++) {
          for (int v = 0; v < kVecs; v++) {
            scale[b][v] = group_scale<T>(w, weights + b * block_bytes, group, v * W);
          }
        }
      }
      for (; k < end; k++) {
        for (int b = 0; b < B; b++) {
          for (int v = 0; v < kVecs; v++) {
            VecF weight = column<T>(weights + b * block_bytes, k, v * W);
            if constexpr (kIsScaled<T>) weight *= scale[b][v];
            for (int m = 0; m < M; m++) y[b][m][v] = fma(weight, x[m * w.cols + k], y[b][m][v]);
          }
        }
      }
    }
    for (int b = 0; b < B; b++) {
      for (int m = 0; m < M; m++) {
        alignas(64) float lanes[kBlockRows];
        for (int v = 0; v < kVecs; v++) store(lanes + v * W, y[b][m][v]);
        sums.now()[b * M + m] = Ops::from_f32(lanes);
      }
    }
    sums.next();
  }
  for (int b = 0; b < B; b++) {
    for (int m = 0; m < M; m++) finish(w, block + b, sums.total(b * M + m), out + m * stride);
  }
}

// Tiles of four rows, and one of what is left.
template <DType T, int B>
void float_rows(const Matrix& w, const uint8_t* weights, int64_t block_bytes, const float* x,
                int64_t rows, int64_t block, float* out, int64_t stride) {
  const auto tile = [&](auto size, int64_t row) {
    float_tile<T, size.value, B>(w, weights, block_bytes, x + row * w.cols, block,
                                 out + row * stride, stride);
  };
  int64_t row = 0;
  if constexpr (B == 1) {
    for (; row + 4 <= rows; row += 4) tile(std::integral_constant<int, 4>{}, row);
  }
  if constexpr (B <= 2) {
    if (rows - row == 3) return tile(std::integral_constant<int, 3>{}, row);
    if (rows - row == 2) return tile(std::integral_constant<int, 2>{}, row);
  }
  for (; row < rows; row++) tile(std::integral_constant<int, 1>{}, row);
}

template <DType T, int B>
int64_t float_blocks(const Matrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                     float* out, int64_t stride) {
  int64_t b = begin;
  for (; b + B <= end; b += B) {
    float_rows<T, B>(w, w.block(b), w.block_bytes(), x, rows, b, out, stride);
  }
  return b;
}

template <DType T>
void linear_dense(const Matrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                  float* out, int64_t stride) {
  int64_t b = begin;
  if (rows == 1) b = float_blocks<T, 4>(w, x, rows, b, end, out, stride);
  if (rows < 4) b = float_blocks<T, 2>(w, x, rows, b, end, out, stride);
  float_blocks<T, 1>(w, x, rows, b, end, out, stride);
}

// The 32 columns of a unit as floats: [32][16] at `out`; `scale(slab)` gives a slab's [2][16].
template <Coding C, typename Scale>
EXO_INLINE void unit_to_float(const uint8_t* p, const Scale& scale, float* out) {
  typedef uint32_t VecU __attribute__((vector_size(W * 4)));
  decode_unit<C>(p, [&](int slab, Ops::Bytes weights) __attribute__((always_inline)) {
    alignas(64) uint8_t bytes[64];
    Ops::store_bytes(bytes, weights);
    const float* pair = scale(slab);
    for (int v = 0; v < kVecs; v++) {
      VecU four;
      __builtin_memcpy(&four, bytes + 4 * v * W, sizeof four);
      for (int j = 0; j < 4; j++) {
        const VecF q = __builtin_convertvector((VecI)(four >> (8 * j) & 255), VecF);
        const VecF value = fma(q, load(pair + v * W), load(pair + kBlockRows + v * W));
        exo::EXO_ISA::store(out + (4 * slab + j) * kBlockRows + v * W, value);
      }
    }
  });
}

// out: float32 [cols][16]
template <Coding C>
void decode_to_float(const Matrix& w, int64_t block, float* out) {
  const uint8_t* p = w.block(block);
  for (int64_t g = 0; g < w.groups(); g++) {
    alignas(64) float pair[2 * kBlockRows];
    const uint8_t* scales = p + 2 * w.group * C.bits;
    Ops::store(pair, load_scales(scales, w.dtype, 0));
    Ops::store(pair + kBlockRows, load_scales(scales, w.dtype, 1));
    for (int u = 0; u < w.group / kUnitCols; u++, p += 64 * C.bits, out += kUnitCols * kBlockRows) {
      unit_to_float<C>(p, [&](int) { return pair; }, out);
    }
    p = scales + 2 * kBlockRows * size_of(w.dtype);
  }
}

template <Coding C>
void decode_super_to_float(const Matrix& w, int64_t block, float* out) {
  using Scales = SuperScales<C>;
  const uint8_t* p = w.block(block);
  for (int64_t s = 0; s < w.cols / kSuperCols; s++) {
    const Scales scales(p);
    alignas(64) float pairs[Scales::kGroups][2 * kBlockRows];
    for (int g = 0; g < Scales::kGroups; g++) {
      Ops::Float scale, offset;
      scales.of(g, scale, offset);
      Ops::store(pairs[g], scale);
      Ops::store(pairs[g] + kBlockRows, offset);
    }
    p += kSuperHeader;
    for (int u = 0; u < kSuperCols / kUnitCols;
         u++, p += 64 * C.bits, out += kUnitCols * kBlockRows) {
      const auto pair = [&](int slab) {
        return pairs[(u * kUnitCols + 4 * slab) / Scales::kForm.group];
      };
      unit_to_float<C>(p, pair, out);
    }
  }
}

template <DType T>
void decode_dense_to_float(const Matrix& w, int64_t block, float* out) {
  const uint8_t* p = w.block(block);
  for (int64_t k = 0; k < w.cols; k++) {
    for (int v = 0; v < kVecs; v++) {
      VecF weight = column<T>(p, k, v * W);
      if constexpr (kIsScaled<T>) weight *= group_scale<T>(w, p, k / w.group, v * W);
      exo::EXO_ISA::store(out + k * kBlockRows + v * W, weight);
    }
  }
}

inline void decode_block(const Matrix& w, int64_t block, float* out) {
  if (!w.is_quantized()) {
    return with_dtype(w.dtype,
                      [&](auto dtype) { decode_dense_to_float<dtype.value>(w, block, out); });
  }
  with_coding(w.coding(), [&](auto coding) {
    if constexpr (may_be_super(coding.value)) {
      if (w.is_super) return decode_super_to_float<coding.value>(w, block, out);
    }
    if constexpr (may_be_plain(coding.value)) decode_to_float<coding.value>(w, block, out);
  });
}

inline void linear_decoded(const Matrix& w, const float* x, int64_t rows, int64_t begin,
                           int64_t end, float* out, int64_t stride) {
  uint8_t* memory = scratch(static_cast<size_t>(w.cols * kBlockRows * 4));
  for (int64_t b = begin; b < end; b++) {
    decode_block(w, b, reinterpret_cast<float*>(memory));
    float_rows<DType::kFloat32, 1>(w, memory, 0, x, rows, b, out, stride);
  }
}

// Rows of activations from which it pays to decode dense weights once for all of them.
inline constexpr int64_t kDecodedFrom = 12;

inline void linear_float(const Matrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                         float* out, int64_t stride) {
  const bool often = w.dtype != DType::kFloat32 && rows >= kDecodedFrom;
  if (w.is_quantized() || often) return linear_decoded(w, x, rows, begin, end, out, stride);
  with_dtype(w.dtype,
             [&](auto dtype) { linear_dense<dtype.value>(w, x, rows, begin, end, out, stride); });
}

}  // namespace exo::EXO_ISA

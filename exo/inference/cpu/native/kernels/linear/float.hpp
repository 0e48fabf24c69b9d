// y = W x from float activations: dense weights, and quantized ones decoded to float first, as are
// dense ones for many rows.
//
// Every part of an output (matrix.hpp) is one chain of fused steps over its columns in order, in
// all sizes of tile.
#pragma once

#include "int8.hpp"

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
  } else if constexpr (T == DType::kBFloat16) {
    typedef uint32_t VecU __attribute__((vector_size(W * 4)));
    VecU pairs;
    __builtin_memcpy(&pairs, block + (k / 2 * kBlockRows + lane) * 4, sizeof pairs);
    return (VecF)(k % 2 == 0 ? pairs << 16 : pairs & 0xffff0000u);
  } else {
    return load<T>(block, k * kBlockRows + lane);
  }
}

inline constexpr int64_t kColumnsAStep = 16;  // with which something is fetched

// M rows of activations by B blocks; B > 1 keeps enough chains in flight when rows are few.
template <DType T, int M, int B>
void float_tile(const Matrix& w, const uint8_t* weights, int64_t block_bytes, const float* x,
                int64_t block, Ahead ahead, float* out, int64_t stride) {
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
      while (k < end) {
        ahead.fetch();
        for (const int64_t next = std::min(k + kColumnsAStep, end); k < next; k++) {
          for (int b = 0; b < B; b++) {
            for (int v = 0; v < kVecs; v++) {
              VecF weight = column<T>(weights + b * block_bytes, k, v * W);
              if constexpr (kIsScaled<T>) weight *= scale[b][v];
              for (int m = 0; m < M; m++) y[b][m][v] = fma(weight, x[m * w.cols + k], y[b][m][v]);
            }
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

// Tiles of as many rows as registers allow, or four, and one of what is left; `next` comes from
// memory meanwhile.
template <DType T, int B>
void float_rows(const Matrix& w, const uint8_t* weights, int64_t block_bytes, const float* x,
                int64_t rows, int64_t block, Upcoming next, float* out, int64_t stride) {
  constexpr int kMost = B == 1 && T == DType::kFloat32 && Ops::kMaxRows > 4 ? Ops::kMaxRows : 4;
  const int64_t steps = (w.cols + kColumnsAStep - 1) / kColumnsAStep;
  Fetching fetching(next, kFetchedBytes, (rows + kMost - 1) / kMost * steps);
  const auto tile = [&](auto size, int64_t row) {
    float_tile<T, size.value, B>(w, weights, block_bytes, x + row * w.cols, block,
                                 fetching.take(steps), out + row * stride, stride);
  };
  int64_t row = 0;
  if constexpr (B == 1) {
    for (; row + kMost <= rows; row += kMost) tile(std::integral_constant<int, kMost>{}, row);
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
                     float* out, int64_t stride, Upcoming upcoming) {
  int64_t b = begin;
  for (; b + B <= end; b += B) {
    const Upcoming next = rows > 1 ? next_blocks(w, b + B, B, end, upcoming) : Upcoming{};
    float_rows<T, B>(w, w.block(b), w.block_bytes(), x, rows, b, next, out, stride);
  }
  return b;
}

template <DType T>
void linear_dense(const Matrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                  float* out, int64_t stride, Upcoming upcoming) {
  int64_t b = begin;
  if (rows == 1) b = float_blocks<T, 4>(w, x, rows, b, end, out, stride, upcoming);
  if (rows < 4) b = float_blocks<T, 2>(w, x, rows, b, end, out, stride, upcoming);
  float_blocks<T, 1>(w, x, rows, b, end, out, stride, upcoming);
}

// A decoded block as floats: [cols][16] at `out`.
inline void panel_to_float(const Matrix& w, const Panel& panel, float* out) {
  typedef uint32_t VecU __attribute__((vector_size(W * 4)));
  const uint8_t* slab = panel.slabs;
  const float* scales = panel.scales;
  for (int64_t g = 0; g < w.groups(); g++, scales += 2 * kBlockRows) {
    for (int k = 0; k < w.group; k += 4, slab += 64, out += 4 * kBlockRows) {
      for (int lane = 0; lane < kBlockRows; lane += W) {
        const VecF scale = load(scales + lane), offset = load(scales + kBlockRows + lane);
        VecU four;
        __builtin_memcpy(&four, slab + 4 * lane, sizeof four);
        for (int j = 0; j < 4; j++) {
          const VecF q = __builtin_convertvector((VecI)(four >> (8 * j) & 255), VecF);
          exo::EXO_ISA::store(out + j * kBlockRows + lane, fma(q, scale, offset));
        }
      }
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

// A block as floats: [cols][16] at `out`; `panel` is room for what it is decoded to before.
inline void decode_to_float(const Matrix& w, int64_t block, const Panel& panel, float* out) {
  if (!w.is_quantized()) {
    return with_dtype(w.dtype,
                      [&](auto dtype) { decode_dense_to_float<dtype.value>(w, block, out); });
  }
  with_coding(w.coding(), [&](auto coding) {
    if constexpr (may_be_super(coding.value)) {
      if (w.is_super) return decode_super_to_groups<coding.value>(w, block, panel);
    }
    if constexpr (may_have_offsets(coding.value) || zero_shift(coding.value) >= 0) {
      decode_block<coding.value, true>(w, block, panel);
    }
  });
  panel_to_float(w, panel, out);
}

inline void linear_decoded(const Matrix& w, const float* x, int64_t rows, int64_t begin,
                           int64_t end, float* out, int64_t stride, Upcoming upcoming) {
  const int64_t slab_bytes = w.cols * kBlockRows, float_bytes = 4 * slab_bytes;
  uint8_t* memory = scratch(static_cast<size_t>(float_bytes + slab_bytes + w.groups() * 128));
  auto* floats = reinterpret_cast<float*>(memory);
  uint8_t* slabs = memory + float_bytes;
  const Panel panel{slabs, reinterpret_cast<float*>(slabs + slab_bytes)};
  for (int64_t b = begin; b < end; b++) {
    decode_to_float(w, b, panel, floats);
    const Upcoming next = next_blocks(w, b + 1, 1, end, upcoming);
    float_rows<DType::kFloat32, 1>(w, memory, 0, x, rows, b, next, out, stride);
  }
}

// Rows of activations from which it pays to decode dense weights once for all of them.
inline constexpr int64_t kDecodedFrom = 12;

inline void linear_float(const Matrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                         float* out, int64_t stride, Upcoming next) {
  const bool often = w.dtype != DType::kFloat32 && rows >= kDecodedFrom;
  if (w.is_quantized() || often) return linear_decoded(w, x, rows, begin, end, out, stride, next);
  with_dtype(w.dtype, [&](auto dtype) {
    linear_dense<dtype.value>(w, x, rows, begin, end, out, stride, next);
  });
}

}  // namespace exo::EXO_ISA

// The weights of one linear layer, laid out once at load for the kernels that stream them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "coding.hpp"
#include "super_form.hpp"

namespace exo {

inline constexpr int kMostParts = 8;

// kFloat8: E4M3 of the OCP 8-bit Floating Point Specification, without its NaN. kFloat4: E2M1 of
// the OCP Microscaling Formats.
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat8, kFloat4 };

// Of one value; not of kFloat4.
inline constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8 ? 1 : 2;
}

inline constexpr int kFloat4Cols = 16;  // columns that share a scale
inline constexpr int64_t kFloat4Values = kFloat4Cols * kBlockRows / 2;  // bytes
inline constexpr int64_t kFloat4Group = kFloat4Values + kBlockRows;

// Calls use with the type of dense values as a constant.
template <typename Use>
void with_dtype(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kFloat32:
      return use(std::integral_constant<DType, DType::kFloat32>{});
    case DType::kFloat16:
      return use(std::integral_constant<DType, DType::kFloat16>{});
    case DType::kBFloat16:
      return use(std::integral_constant<DType, DType::kBFloat16>{});
    case DType::kFloat8:
      return use(std::integral_constant<DType, DType::kFloat8>{});
    case DType::kFloat4:
      return use(std::integral_constant<DType, DType::kFloat4>{});
  }
}

float to_float(const void* values, DType dtype, int64_t index);

// Zeroed memory straight from the kernel, aligned to pages, in huge ones where it grants them.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  class Region;
  std::shared_ptr<Region> region_;
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

// A [rows, cols] matrix W; a linear layer computes y = W x + bias.
//
// Rows are taken in blocks of 16, the last one padded with zeros. Within a block memory runs in the
// order the kernels read it.
//
// Affine (bits 2, 3, 4, 5, 6 or 8; w = scale * q + offset per group of 32, 64 or 128 columns, as
// MLX quantizes): a block is its groups one after the other; a group is its units of 32 columns,
// then 16 scales, then 16 offsets. A unit is 8 slabs of 4 columns; a slab is 64 bytes, byte
// 4 * row + j holding column j, and is stored in 64-byte lines:
//   8, 4, 2 bits: a line is one, two or four slabs, the first in its lowest bits;
//   6 bits: three lines are slabs, and the upper two bits of all three a fourth one;
//   5 bits: five lines are slabs, and their upper three bits the other three;
//   3 bits: a line is two slabs, and the upper two bits of all three lines the other two.
// slabs.hpp says which bits go where. So a unit is `bits` lines, and 64 consecutive bytes feed 16
// rows at once. With a table (4 bits) q is its entry. Where the offset is always -zero * scale, as
// in most of GGUF's formats, there are no offsets: the scales of two groups come after the units of
// both.
//
// Super (the K formats of GGUF, bits 2, 3, 4, 5 or 6, and its IQ formats; groups of 16 or 32
// columns whose scale is a small integer times the float16 of their 256): a block is its
// super-blocks of 256 columns one after the other; a super-block is a header, then its 8 units. The
// header, up to a whole line:
//   16 float16 d; where there are offsets, 16 float16 of their factor;
//   16 bytes for each group, its codes; or SixBits.
// super_form() says which. w = unit * d * code * (q - zero) + factor * offset code.
//
// Dense: a block is [cols][16] values of `dtype`, of kBFloat16 [cols / 2][16][2]; of kFloat8, then
// 16 float32 scales for each group of columns, the last of which may be shorter. w = scale * value,
// rounded to float32; the scales are held 2^8 times larger, since kernels read the values so much
// smaller.
//
// Of kFloat4 a block is groups of 16 columns; a group is 8 lines of 16 bytes, byte r of line j
// holding columns 2j (its low half) and 2j + 1 of row r, then 16 E4M3 scales. w = (scale * `scale`)
// * value.
//
// A row's sum is that of equal parts of its columns, 8, 4 or 2 where their bounds are also bounds
// of what shares a scale, added as a binary tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). So
// whoever holds a half or a quarter of the columns can compute a term of the same sum.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  int bits = 0;  // 0: dense
  Table table = Table::kNone;
  int group = 0;  // columns that share a scale; 0: there is none
  int zero = 0;   // of plain groups: values stand for q - zero, and there are no offsets
  bool is_super = false;
  DType dtype = DType::kFloat32;  // of the scales and offsets, or of dense values
  float scale = 1.f;              // of all values of kFloat4
  int parts = 1;
  std::vector<float> bias;  // [blocks * 16], or empty
  Buffer data;

  // Memory for all blocks, once the rest is said.
  void allocate();

  bool is_quantized() const { return bits != 0; }
  bool is_in_pairs() const { return !is_quantized() && dtype == DType::kBFloat16; }
  Coding coding() const { return {bits, table}; }
  int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  int64_t groups() const { return group == 0 ? 0 : (cols + group - 1) / group; }
  // Where a block's group `index` begins, and its scales: 16 of these, then 16 offsets where `zero`
  // does not tell them.
  int64_t group_at(int64_t index) const {
    const int64_t values = 2 * group * bits, scales = 2 * kBlockRows * size_of(dtype);
    return index * values + (zero == 0 ? index : index / 2) * scales;
  }
  int64_t scales_at(int64_t index) const {
    const int64_t values = 2 * group * bits, scales = kBlockRows * size_of(dtype);
    if (zero == 0) return group_at(index) + values;
    return group_at(index / 2 * 2) + 2 * values + index % 2 * scales;
  }
  int64_t super_bytes() const {
    return super_form(coding()).bytes() + kSuperCols * kBlockRows * bits / 8;
  }
  int64_t block_bytes() const {
    if (is_super) return cols / kSuperCols * super_bytes();
    if (is_quantized()) return group_at(zero == 0 ? groups() : (groups() + 1) / 2 * 2);
    if (dtype == DType::kFloat4) return groups() * kFloat4Group;
    if (is_in_pairs()) return (cols + 1) / 2 * kBlockRows * 4;
    return cols * kBlockRows * size_of(dtype) + groups() * kBlockRows * 4;
  }
  // Of a block of kFloat8, group `index`: [16].
  const float* float8_scales(const uint8_t* block, int64_t index) const {
    return reinterpret_cast<const float*>(block + cols * kBlockRows) + index * kBlockRows;
  }
  const uint8_t* block(int64_t index) const { return data.data() + index * block_bytes(); }

  // Row `row` as float32 [cols]: the lookup of an embedding.
  void read_row(int64_t row, float* out) const;

 private:
  struct RowScale {
    float scale, offset;
    int zero;
  };
  RowScale affine_scale(const uint8_t* block, int row, int64_t group) const;
  RowScale super_scale(const uint8_t* block, int row, int64_t group) const;
  const uint8_t* unit(const uint8_t* block, int64_t column) const;
};

// Where rows [first, first + count) of a matrix lie in a checkpoint.
struct AffineSource {
  const uint8_t* values;   // [count, cols * bits / 8], little-endian bit stream of each row
  const uint8_t* scales;   // [count, cols / group]
  const uint8_t* offsets;  // [count, cols / group]
  DType dtype;
};

// All use all threads of the pool. Throw std::invalid_argument for a shape that cannot be packed.
std::shared_ptr<Matrix> pack_affine(const AffineSource& source, int64_t rows, int64_t cols,
                                    Coding coding, int group);

// Element (row, column) is values[row * row_step + column * column_step].
struct DenseSource {
  const uint8_t* values;
  DType dtype;
  int64_t row_step, column_step;
};

std::shared_ptr<Matrix> pack_dense(const DenseSource& source, int64_t rows, int64_t cols);

// `values` is [rows, cols / 2], the even column in the low half of a byte; `scales` [rows, cols /
// 16].
std::shared_ptr<Matrix> pack_float4(const uint8_t* values, const uint8_t* scales, float scale,
                                    int64_t rows, int64_t cols);

// `scales` is [rows, ceil(cols / group)].
std::shared_ptr<Matrix> pack_float8(const uint8_t* values, const float* scales, int64_t rows,
                                    int64_t cols, int group);

}  // namespace exo

// The weights of one linear layer, laid out once at load for the kernels that stream them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace exo {

inline constexpr int kBlockRows = 16;  // output features interleaved, one lane each
inline constexpr int kUnitCols = 32;   // input features decoded together, the smallest group

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16 };

inline constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

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
// 4 * row + j holding column j, and is stored in bit planes of 64-byte lines:
//   8 bits: 8 lines, a slab each;
//   the low 4 bits (of 4, 5, 6): 4 lines, line i holding slabs 2i and 2i + 1 in its nibbles;
//   the low 2 bits (of 2, 3): 2 lines, line i holding slabs 4i to 4i + 3;
//   above these, 1 bit (of 3, 5): 1 line, bit i for slab i; 2 bits (of 6): 2 lines as for the
//   low 2.
// So a unit is `bits` lines, and 64 consecutive bytes feed 16 rows at once.
//
// Dense: a block is [cols][16] values of `dtype`.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  int bits = 0;                   // 0: dense
  int group = 0;                  // columns that share a scale; 0: dense
  DType dtype = DType::kFloat32;  // of the scales and offsets, or of dense values
  std::vector<float> bias;        // [blocks * 16], or empty
  Buffer data;

  bool is_affine() const { return bits != 0; }
  int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  int64_t groups() const { return is_affine() ? cols / group : 0; }
  int64_t group_bytes() const { return 2 * group * bits + 2 * kBlockRows * size_of(dtype); }
  int64_t block_bytes() const {
    return is_affine() ? groups() * group_bytes() : cols * kBlockRows * size_of(dtype);
  }
  const uint8_t* block(int64_t index) const { return data.data() + index * block_bytes(); }

  // Row `row` as float32 [cols]: the lookup of an embedding.
  void read_row(int64_t row, float* out) const;
};

// Where rows [first, first + count) of a matrix lie in a checkpoint.
struct AffineSource {
  const uint8_t* values;   // [count, cols * bits / 8], little-endian bit stream of each row
  const uint8_t* scales;   // [count, cols / group]
  const uint8_t* offsets;  // [count, cols / group]
  DType dtype;
};

// Both use all threads of the pool. Throw std::invalid_argument for a shape that cannot be packed.
std::shared_ptr<Matrix> pack_affine(const AffineSource& source, int64_t rows, int64_t cols,
                                    int bits, int group);
std::shared_ptr<Matrix> pack_dense(const uint8_t* values, DType dtype, int64_t rows, int64_t cols);

}  // namespace exo

#include "matrix.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "thread_pool.hpp"
#include "units.hpp"

namespace exo {

void throw_bits(int bits) { throw std::invalid_argument("bits " + std::to_string(bits)); }

namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kRegion = 32 << 20;

float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    const uint32_t wide = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  // Multiplying by 2^112 moves the exponent's bias and normalizes subnormals.
  const uint32_t shifted = magnitude << 13;
  float value;
  std::memcpy(&value, &shifted, 4);
  value *= 0x1p112f;
  uint32_t wide;
  std::memcpy(&wide, &value, 4);
  wide |= sign;
  std::memcpy(&value, &wide, 4);
  return value;
}

template <int BITS>
void pack_affine_block(const Matrix& m, const AffineSource& source, int64_t index) {
  const int64_t unit_bytes = kLine * m.bits, stream_bytes = kUnitCols * m.bits / 8;
  const int64_t row_bytes = m.cols * m.bits / 8, width = size_of(m.dtype);
  uint8_t* block = m.data.data() + index * m.block_bytes();
  const int count = static_cast<int>(std::min<int64_t>(kBlockRows, m.rows - index * kBlockRows));
  for (int64_t g = 0; g < m.groups(); g++) {
    uint8_t* group = block + m.group_at(g);
    uint8_t* scales = block + m.scales_at(g);
    for (int r = 0; r < count; r++) {
      const int64_t row = index * kBlockRows + r;
      const uint8_t* stream = source.values + row * row_bytes + g * m.group * m.bits / 8;
      for (int u = 0; u < m.group / kUnitCols; u++) {
        pack_unit<BITS>(group + u * unit_bytes, r, stream + u * stream_bytes);
      }
      const int64_t at = (row * m.groups() + g) * width;
      std::memcpy(scales + r * width, source.scales + at, static_cast<size_t>(width));
      if (m.zero != 0) continue;
      std::memcpy(scales + (kBlockRows + r) * width, source.offsets + at,
                  static_cast<size_t>(width));
    }
  }
}

template <typename T>
void pack_dense_block(const Matrix& m, const DenseSource& source, int64_t index) {
  T* block = reinterpret_cast<T*>(m.data.data() + index * m.block_bytes());
  const int64_t count = std::min<int64_t>(kBlockRows, m.rows - index * kBlockRows);
  const int64_t size = sizeof(T), row_bytes = source.row_step * size;
  const uint8_t* column = source.values + index * kBlockRows * row_bytes;
  for (int64_t c = 0; c < m.cols; c++, column += source.column_step * size) {
    for (int64_t r = 0; r < count; r++) {
      std::memcpy(block + c * kBlockRows + r, column + r * row_bytes, sizeof(T));
    }
  }
}

// bfloat16: two columns of a row side by side.
void pack_pairs_block(const Matrix& m, const DenseSource& source, int64_t index) {
  uint8_t* block = m.data.data() + index * m.block_bytes();
  const int64_t count = std::min<int64_t>(kBlockRows, m.rows - index * kBlockRows);
  const uint8_t* column = source.values + index * kBlockRows * source.row_step * 2;
  for (int64_t c = 0; c < m.cols; c++, column += source.column_step * 2) {
    uint8_t* out = block + c / 2 * 4 * kBlockRows + c % 2 * 2;
    for (int64_t r = 0; r < count; r++) {
      std::memcpy(out + 4 * r, column + r * source.row_step * 2, 2);
    }
  }
}

void check_shape(bool fits, const char* what, int64_t rows, int64_t cols, int bits, int group) {
  if (!fits) {
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(rows) + " x " +
                                std::to_string(cols) + ", " + std::to_string(bits) +
                                " bits, group " + std::to_string(group));
  }
}

}  // namespace

// Memory that buffers are cut from: weights of many small matrices share huge pages, which a
// processor streams a third faster than single ones. Never used twice; unmapped with the last
// buffer in it.
class Buffer::Region {
 public:
  explicit Region(int64_t bytes) : mapped_(bytes + kHugePage) {
    void* p = mmap(nullptr, static_cast<size_t>(mapped_), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<uint8_t*>(p);
    const auto skipped = -reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(kHugePage);
    next_ = start_ + skipped;
    end_ = next_ + bytes;
#ifdef MADV_HUGEPAGE
    madvise(next_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
  }
  ~Region() { munmap(start_, static_cast<size_t>(mapped_)); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Null where the region has no room left.
  uint8_t* take(int64_t bytes) {
    if (end_ - next_ < bytes) return nullptr;
    return std::exchange(next_, next_ + bytes);
  }

 private:
  int64_t mapped_;
  uint8_t *start_, *next_, *end_;
};

Buffer::Buffer(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  static const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t room = (bytes + page - 1) / page * page;
  static std::mutex mutex;
  static std::weak_ptr<Region> latest;
  const std::lock_guard lock(mutex);
  region_ = latest.lock();
  if (region_ != nullptr) data_ = region_->take(room);
  if (data_ != nullptr) return;
  region_ =
      std::make_shared<Region>(std::max(kRegion, (room + kHugePage - 1) / kHugePage * kHugePage));
  data_ = region_->take(room);
  latest = region_;
}

Buffer::~Buffer() {
  // The region may live on with others in it; this part of its memory goes back now.
  if (data_ != nullptr) madvise(data_, static_cast<size_t>(bytes_), MADV_DONTNEED);
}

Buffer::Buffer(Buffer&& other) noexcept
    : region_(std::move(other.region_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(region_, other.region_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

float to_float(const void* values, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(values)[index];
  if (dtype == DType::kFloat8) {
    // Exponent and mantissa to their places; the factor moves the exponent's bias.
    const uint32_t byte = static_cast<const uint8_t*>(values)[index];
    const uint32_t bits = (byte & 0x80) << 24 | (byte & 0x7f) << 20;
    float value;
    std::memcpy(&value, &bits, 4);
    return value * 0x1p120f;
  }
  const uint16_t half = static_cast<const uint16_t*>(values)[index];
  if (dtype == DType::kFloat16) return half_to_float(half);
  const uint32_t wide = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

void Matrix::allocate() {
  const int64_t step = is_super ? kSuperCols : group > 0 ? group : is_in_pairs() ? 2 : 1;
  while (parts < kMostParts && cols % (2 * parts * step) == 0) parts *= 2;
  data = Buffer(blocks() * block_bytes());
}

const uint8_t* Matrix::unit(const uint8_t* block, int64_t column) const {
  if (!is_super) {
    return block + group_at(column / group) + column % group / kUnitCols * kLine * bits;
  }
  return block + column / kSuperCols * super_bytes() + super_form(coding()).bytes() +
         column % kSuperCols / kUnitCols * kLine * bits;
}

Matrix::RowScale Matrix::affine_scale(const uint8_t* block, int row, int64_t g) const {
  const uint8_t* scales = block + scales_at(g);
  const float scale = to_float(scales, dtype, row);
  if (zero != 0) return {scale, 0.f, zero};
  return {scale, to_float(scales, dtype, kBlockRows + row), 0};
}

Matrix::RowScale Matrix::super_scale(const uint8_t* block, int row, int64_t g) const {
  const int64_t per_super = kSuperCols / group;
  const SuperForm form = super_form(coding());
  const uint8_t* header = block + g / per_super * super_bytes();
  const uint8_t* codes = header + form.codes_at();
  const int in_super = static_cast<int>(g % per_super);
  const uint8_t code = codes[in_super * kBlockRows + row];
  const float d = form.unit * to_float(header, DType::kFloat16, row);
  if (form.kind == SuperKind::kCodes) return {d * static_cast<int8_t>(code), 0.f, form.zero};
  const float negative = to_float(header + 32, DType::kFloat16, row);
  if (form.kind == SuperKind::kNibbles) {
    return {d * static_cast<float>(code & 15), negative * static_cast<float>(code >> 4), 0};
  }
  return {d * static_cast<float>(SixBits::scale(codes, row, in_super)),
          negative * static_cast<float>(SixBits::offset(codes, row, in_super)), 0};
}

void Matrix::read_row(int64_t row, float* out) const {
  const uint8_t* start = block(row / kBlockRows);
  const int r = static_cast<int>(row % kBlockRows);
  if (dtype == DType::kFloat4) {
    for (int64_t c = 0; c < cols; c++) {
      const uint8_t* in_group = start + c / kFloat4Cols * kFloat4Group;
      const int pair = in_group[c % kFloat4Cols / 2 * kBlockRows + r];
      const int doubled = kE2m1Values[pair >> (c % 2 * 4) & 15] - kE2m1Zero;
      const float own = to_float(in_group + kFloat4Values, DType::kFloat8, r) * scale;
      out[c] = own * (0.5f * static_cast<float>(doubled));
    }
    return;
  }
  if (!is_quantized()) {
    for (int64_t c = 0; c < cols; c++) {
      const int64_t at =
          is_in_pairs() ? c / 2 * 2 * kBlockRows + 2 * r + c % 2 : c * kBlockRows + r;
      out[c] = to_float(start, dtype, at);
    }
    for (int64_t c = 0; group != 0 && c < cols; c++) {
      out[c] *= float8_scales(start, c / group)[r] * 0x1p-8f;
    }
    return;
  }
  for (int64_t g = 0; g < groups(); g++) {
    const RowScale s = is_super ? super_scale(start, r, g) : affine_scale(start, r, g);
    for (int i = 0; i < group; i++) {
      const int64_t column = g * group + i;
      int q = value_at(unit(start, column), bits, r, static_cast<int>(column % kUnitCols));
      if (table != Table::kNone) q = values_of(table)[q];
      out[column] = s.scale * static_cast<float>(q - s.zero) + s.offset;
    }
  }
}

std::shared_ptr<Matrix> pack_affine(const AffineSource& source, int64_t rows, int64_t cols,
                                    Coding coding, int group) {
  const int bits = coding.bits;
  const bool is_known =
      coding.table == Table::kNone ? (bits >= 2 && bits <= 6) || bits == 8 : bits == 4;
  const bool is_group =
      group == kUnitCols || (coding.table == Table::kNone && (group == 64 || group == 128));
  check_shape(is_known && is_group && rows > 0 && cols > 0 && cols % group == 0,
              "cannot pack these affine weights", rows, cols, bits, group);
  auto m = std::make_shared<Matrix>();
  m->rows = rows, m->cols = cols, m->bits = bits, m->group = group, m->dtype = source.dtype;
  m->table = coding.table;
  if (coding.table == Table::kE2m1) m->zero = kE2m1Zero;
  m->allocate();
  with_bits(bits, [&](auto constant) {
    thread_pool().run(m->blocks(),
                      [&](int64_t i) { pack_affine_block<constant.value>(*m, source, i); });
  });
  return m;
}

std::shared_ptr<Matrix> pack_dense(const DenseSource& source, int64_t rows, int64_t cols) {
  const DType dtype = source.dtype;
  check_shape(rows > 0 && cols > 0 && size_of(dtype) > 1 && dtype != DType::kFloat4,
              "cannot pack these weights", rows, cols, 0, 0);
  auto m = std::make_shared<Matrix>();
  m->rows = rows, m->cols = cols, m->dtype = dtype;
  m->allocate();
  thread_pool().run(m->blocks(), [&](int64_t i) {
    if (m->is_in_pairs()) return pack_pairs_block(*m, source, i);
    dtype == DType::kFloat32 ? pack_dense_block<uint32_t>(*m, source, i)
                             : pack_dense_block<uint16_t>(*m, source, i);
  });
  return m;
}

std::shared_ptr<Matrix> pack_float4(const uint8_t* values, const uint8_t* scales, float scale,
                                    int64_t rows, int64_t cols) {
  check_shape(rows > 0 && cols > 0 && cols % kFloat4Cols == 0, "cannot pack these weights", rows,
              cols, 4, kFloat4Cols);
  auto m = std::make_shared<Matrix>();
  m->rows = rows, m->cols = cols, m->dtype = DType::kFloat4, m->group = kFloat4Cols;
  m->scale = scale;
  m->allocate();
  thread_pool().run(m->blocks(), [&](int64_t i) {
    uint8_t* group = m->data.data() + i * m->block_bytes();
    const int64_t count = std::min<int64_t>(kBlockRows, rows - i * kBlockRows);
    for (int64_t g = 0; g < m->groups(); g++, group += kFloat4Group) {
      for (int64_t r = 0; r < count; r++) {
        const int64_t at = (i * kBlockRows + r) * m->groups() + g;
        for (int j = 0; j < kFloat4Cols / 2; j++) {
          group[j * kBlockRows + r] = values[at * kFloat4Cols / 2 + j];
        }
        group[kFloat4Values + r] = scales[at];
      }
    }
  });
  return m;
}

std::shared_ptr<Matrix> pack_float8(const uint8_t* values, const float* scales, int64_t rows,
                                    int64_t cols, int group) {
  check_shape(rows > 0 && cols > 0 && group > 0, "cannot pack these weights", rows, cols, 8, group);
  auto m = std::make_shared<Matrix>();
  m->rows = rows, m->cols = cols, m->dtype = DType::kFloat8, m->group = group;
  m->allocate();
  thread_pool().run(m->blocks(), [&](int64_t i) {
    pack_dense_block<uint8_t>(*m, {values, DType::kFloat8, cols, 1}, i);
    float* block =
        reinterpret_cast<float*>(m->data.data() + i * m->block_bytes() + cols * kBlockRows);
    for (int64_t r = 0; r < std::min<int64_t>(kBlockRows, rows - i * kBlockRows); r++) {
      const float* row = scales + (i * kBlockRows + r) * m->groups();
      for (int64_t g = 0; g < m->groups(); g++) block[g * kBlockRows + r] = row[g] * 0x1p8f;
    }
  });
  return m;
}

}  // namespace exo

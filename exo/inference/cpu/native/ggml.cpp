// From the blocks of a file, which ggml/ reads, to those of a Matrix.
#include "ggml.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "ggml/codebooks.hpp"
#include "ggml/super_blocks.hpp"
#include "thread_pool.hpp"
#include "units.hpp"

namespace exo {

namespace {

using namespace ggml;

template <typename Format>
bool has_grid() {
  if constexpr (requires { Format::kGrid; }) return !grids[static_cast<int>(Format::kGrid)].empty();
  return true;
}

template <typename Format>
constexpr Coding coding_of() {
  if constexpr (requires { Format::kTable; }) return {Format::kBits, Format::kTable};
  return {Format::kBits};
}

template <typename Format>
void pack_plain_block(const Matrix& m, const uint8_t* data, int64_t index) {
  uint8_t* block = m.data.data() + index * m.block_bytes();
  const int count = static_cast<int>(std::min<int64_t>(kBlockRows, m.rows - index * kBlockRows));
  const uint8_t* first = data + index * kBlockRows * m.groups() * Format::kBytes;
  for (int64_t g = 0; g < m.groups(); g++) {
    uint8_t* group = block + m.group_at(g);
    uint8_t* scales = block + m.scales_at(g);
    for (int r = 0; r < count; r++) {
      uint8_t values[kUnitCols];
      const Pair pair = Format::unpack(first + (r * m.groups() + g) * Format::kBytes, values);
      put_unit<Format::kBits>(group, r, values);
      std::memcpy(scales + 2 * r, &pair.scale, 2);
      if (m.zero == 0) std::memcpy(scales + 2 * (kBlockRows + r), &pair.offset, 2);
    }
  }
}

template <typename Format>
void pack_super_block(const Matrix& m, const uint8_t* data, int64_t index) {
  constexpr SuperForm form = super_form(coding_of<Format>());
  constexpr int groups = kSuperCols / form.group, units = kSuperCols / kUnitCols;
  constexpr int unit_bytes = kLine * Format::kBits;
  const int64_t supers = m.cols / kSuperCols;
  uint8_t* header = m.data.data() + index * m.block_bytes();
  const int count = static_cast<int>(std::min<int64_t>(kBlockRows, m.rows - index * kBlockRows));
  const uint8_t* first = data + index * kBlockRows * supers * Format::kBytes;
  for (int64_t s = 0; s < supers; s++, header += m.super_bytes()) {
    for (int r = 0; r < count; r++) {
      uint8_t values[kSuperCols];
      SuperRow row;
      Format::unpack(first + (r * supers + s) * Format::kBytes, values, row);
      for (int u = 0; u < units; u++) {
        put_unit<Format::kBits>(header + form.bytes() + u * unit_bytes, r, values + u * kUnitCols);
      }
      std::memcpy(header + 2 * r, &row.d, 2);
      if (form.has_offsets()) std::memcpy(header + 32 + 2 * r, &row.factor, 2);
      uint8_t* codes = header + form.codes_at();
      if (form.kind == SuperKind::kSixBits) {
        SixBits::put(codes, r, row.codes, row.mins);
        continue;
      }
      for (int g = 0; g < groups; g++) codes[g * kBlockRows + r] = row.codes[g];
    }
  }
}

template <typename Format, typename = void>
struct IsSuper : std::true_type {};
template <typename Format>
struct IsSuper<Format, std::void_t<decltype(Format::kDType)>> : std::false_type {};

template <typename Format>
std::shared_ptr<Matrix> pack(const uint8_t* data, int64_t rows, int64_t cols) {
  if (!has_grid<Format>()) throw std::invalid_argument("the format's codebook was not given");
  auto m = std::make_shared<Matrix>();
  m->rows = rows, m->cols = cols, m->bits = Format::kBits, m->is_super = IsSuper<Format>::value;
  m->table = coding_of<Format>().table;
  if constexpr (IsSuper<Format>::value) {
    m->group = super_form(m->coding()).group;
  } else {
    m->group = kUnitCols;
    m->dtype = Format::kDType;
    if constexpr (requires { Format::kZero; }) {
      static_assert(Format::kZero == 1 << zero_shift(coding_of<Format>()));
      m->zero = Format::kZero;
    }
  }
  m->allocate();
  thread_pool().run(m->blocks(), [&](int64_t i) {
    if constexpr (IsSuper<Format>::value) {
      pack_super_block<Format>(*m, data, i);
    } else {
      pack_plain_block<Format>(*m, data, i);
    }
  });
  return m;
}

struct Packer {
  GgmlFormat format;
  std::shared_ptr<Matrix> (*pack)(const uint8_t*, int64_t, int64_t);
};

template <typename Format>
Packer packer(const char* name) {
  return {{name, IsSuper<Format>::value ? kSuperCols : kUnitCols, Format::kBytes}, pack<Format>};
}

const std::vector<Packer>& packers() {
  static const std::vector<Packer> all = {
      packer<Q4_0>("Q4_0"),   packer<Q4_1>("Q4_1"),       packer<Q5_0>("Q5_0"),
      packer<Q5_1>("Q5_1"),   packer<Q8_0>("Q8_0"),       packer<IQ4_NL>("IQ4_NL"),
      packer<Q2_K>("Q2_K"),   packer<Q3_K>("Q3_K"),       packer<Q4_K>("Q4_K"),
      packer<Q5_K>("Q5_K"),   packer<Q6_K>("Q6_K"),       packer<IQ4_XS>("IQ4_XS"),
      packer<MXFP4>("MXFP4"), packer<IQ2_XXS>("IQ2_XXS"), packer<IQ2_XS>("IQ2_XS"),
      packer<IQ2_S>("IQ2_S"), packer<IQ3_XXS>("IQ3_XXS"), packer<IQ3_S>("IQ3_S"),
      packer<IQ1_S>("IQ1_S"), packer<IQ1_M>("IQ1_M"),
  };
  return all;
}

}  // namespace

const std::vector<GgmlFormat>& ggml_formats() {
  static const std::vector<GgmlFormat> all = [] {
    std::vector<GgmlFormat> found;
    for (const Packer& packer : packers()) found.push_back(packer.format);
    return found;
  }();
  return all;
}

void set_grid(Grid grid, std::vector<uint8_t> places) {
  const GridShape shape = kGridShapes[static_cast<int>(grid)];
  if (static_cast<int>(places.size()) != shape.entries * shape.width) {
    throw std::invalid_argument("a codebook of " + std::to_string(places.size()) + " numbers");
  }
  for (uint8_t& place : places) place &= 7;
  grids[static_cast<int>(grid)] = std::move(places);
}

std::shared_ptr<Matrix> pack_ggml(const uint8_t* data, const std::string& format, int64_t rows,
                                  int64_t cols) {
  for (const Packer& packer : packers()) {
    if (packer.format.name != format) continue;
    if (rows <= 0 || cols <= 0 || cols % packer.format.cols != 0) {
      throw std::invalid_argument(format + " of " + std::to_string(rows) + " x " +
                                  std::to_string(cols) + ": its blocks have " +
                                  std::to_string(packer.format.cols) + " columns");
    }
    return packer.pack(data, rows, cols);
  }
  throw std::invalid_argument("no format " + format);
}

}  // namespace exo

// Blocks as https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h defines them (block_q4_0
// and so on), their values as dequantize_row_* in ggml-quants.c reads them.
#include "ggml.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "thread_pool.hpp"
#include "units.hpp"

namespace exo {

namespace {

uint16_t read_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

// A float that a float16 holds exactly; infinity for one that is too large.
uint16_t half_of(float value) {
  // Multiplying by 2^-112 moves the exponent's bias, and makes what is subnormal so.
  const float magnitude = std::fabs(value) * 0x1p-112f;
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  return static_cast<uint16_t>((std::signbit(value) ? 0x8000 : 0) |
                               (std::min(bits, 0x7c00u << 13) >> 13));
}

uint16_t bfloat_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Formats with one scale in 32 columns. `unpack` writes the 32 values and returns scale and offset
// as kDType: w = scale * value + offset.
struct Pair {
  uint16_t scale, offset;
};

// Of w = scale * (value - 2^power).
Pair about(int power, const uint8_t* block) {
  const uint16_t scale = read_u16(block);
  const int exponent = scale & 0x7c00, more = power << 10;
  if (exponent != 0 && exponent + more < 0x7c00) {
    return {scale, static_cast<uint16_t>((scale + more) ^ 0x8000)};
  }
  const float zero = static_cast<float>(1 << power);
  return {scale, half_of(-zero * to_float(block, DType::kFloat16, 0))};
}

void unpack_nibbles(const uint8_t* quants, uint8_t* values) {
  for (int i = 0; i < 16; i++) {
    values[i] = quants[i] & 15;
    values[i + 16] = quants[i] >> 4;
  }
}

void unpack_five_bits(const uint8_t* high, const uint8_t* quants, uint8_t* values) {
  unpack_nibbles(quants, values);
  for (int i = 0; i < 4; i++) {
    // Eight bits to the lowest ones of eight bytes.
    const uint64_t apart = high[i] * 0x0101010101010101u & 0x8040201008040201u;
    const uint64_t bits = (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    uint64_t eight;
    std::memcpy(&eight, values + 8 * i, 8);
    eight |= bits << 4;
    std::memcpy(values + 8 * i, &eight, 8);
  }
}

struct Q4_0 {
  static constexpr int kBits = 4, kBytes = 18;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 2, values);
    return about(3, block);
  }
};

struct Q4_1 {
  static constexpr int kBits = 4, kBytes = 20;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 4, values);
    return {read_u16(block), read_u16(block + 2)};
  }
};

struct Q5_0 {
  static constexpr int kBits = 5, kBytes = 22;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_five_bits(block + 2, block + 6, values);
    return about(4, block);
  }
};

struct Q5_1 {
  static constexpr int kBits = 5, kBytes = 24;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_five_bits(block + 4, block + 8, values);
    return {read_u16(block), read_u16(block + 2)};
  }
};

struct Q8_0 {
  static constexpr int kBits = 8, kBytes = 34;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    for (int i = 0; i < 32; i++) values[i] = block[2 + i] ^ 0x80;
    return about(7, block);
  }
};

struct IQ4_NL {
  static constexpr int kBits = 4, kBytes = 18;
  static constexpr Table kTable = Table::kIq4;
  static constexpr DType kDType = DType::kFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 2, values);
    return about(7, block);
  }
};

// The scale is a power of two.
struct MXFP4 {
  static constexpr int kBits = 4, kBytes = 17;
  static constexpr Table kTable = Table::kE2m1;
  static constexpr DType kDType = DType::kBFloat16;
  static Pair unpack(const uint8_t* block, uint8_t* values) {
    unpack_nibbles(block + 1, values);
    const float scale = std::ldexp(1.f, block[0] - 128);
    return {bfloat_of(scale), bfloat_of(-12.f * scale)};
  }
};

// Formats with super-blocks of 256 columns. `unpack` writes 256 values and what a header holds of
// one row (matrix.hpp): the codes of 16 or of 8 groups.
struct SuperRow {
  uint16_t d;
  uint16_t factor;
  uint8_t codes[16];
  uint8_t mins[8];
};

uint16_t negated(uint16_t half) { return half ^ 0x8000; }

// Q4_K and Q5_K hold 8 scales and 8 minima of 6 bits in 12 bytes.
void unpack_six_bits(const uint8_t* packed, SuperRow& row) {
  for (int i = 0; i < 4; i++) {
    row.codes[i] = packed[i] & 63;
    row.mins[i] = packed[i + 4] & 63;
    row.codes[i + 4] = static_cast<uint8_t>((packed[i + 8] & 15) | packed[i] >> 6 << 4);
    row.mins[i + 4] = static_cast<uint8_t>(packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4);
  }
}

struct Q2_K {
  static constexpr int kBits = 2, kBytes = 84;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t* quants = block + 16;
    std::memcpy(row.codes, block, 16);
    row.d = read_u16(block + 80), row.factor = negated(read_u16(block + 82));
    for (int half = 0; half < 2; half++, quants += 32) {
      for (int shift = 0; shift < 8; shift += 2, values += 32) {
        for (int i = 0; i < 32; i++) values[i] = quants[i] >> shift & 3;
      }
    }
  }
};

struct Q3_K {
  static constexpr int kBits = 3, kBytes = 110;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *high = block, *quants = block + 32, *packed = block + 96;
    row.d = read_u16(block + 108);
    for (int i = 0; i < 16; i++) {
      const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
      const int above = packed[8 + i % 4] >> (i / 4 * 2) & 3;
      row.codes[i] = static_cast<uint8_t>((low | above << 4) - 32);
    }
    for (int j = 0; j < 8; j++, values += 32) {
      const uint8_t* low = quants + j / 4 * 32;
      for (int i = 0; i < 32; i++) {
        values[i] = static_cast<uint8_t>((low[i] >> (j % 4 * 2) & 3) | (high[i] >> j & 1) << 2);
      }
    }
  }
};

struct Q4_K {
  static constexpr int kBits = 4, kBytes = 144;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block), row.factor = negated(read_u16(block + 2));
    unpack_six_bits(block + 4, row);
    const uint8_t* quants = block + 16;
    for (int j = 0; j < 4; j++, quants += 32, values += 64) {
      for (int i = 0; i < 32; i++) {
        values[i] = quants[i] & 15;
        values[i + 32] = quants[i] >> 4;
      }
    }
  }
};

struct Q5_K {
  static constexpr int kBits = 5, kBytes = 176;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block), row.factor = negated(read_u16(block + 2));
    unpack_six_bits(block + 4, row);
    const uint8_t *high = block + 16, *quants = block + 48;
    for (int j = 0; j < 4; j++, quants += 32, values += 64) {
      for (int i = 0; i < 32; i++) {
        const int fifth = high[i] >> (2 * j);
        values[i] = static_cast<uint8_t>((quants[i] & 15) | (fifth & 1) << 4);
        values[i + 32] = static_cast<uint8_t>(quants[i] >> 4 | (fifth & 2) << 3);
      }
    }
  }
};

struct Q6_K {
  static constexpr int kBits = 6, kBytes = 210;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *low = block, *high = block + 128;
    std::memcpy(row.codes, block + 192, 16);
    row.d = read_u16(block + 208);
    for (int half = 0; half < 2; half++, low += 64, high += 32, values += 128) {
      for (int i = 0; i < 32; i++) {
        values[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
        values[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] & 12) << 2);
        values[i + 64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] & 48));
        values[i + 96] = static_cast<uint8_t>(low[i + 32] >> 4 | (high[i] & 192) >> 2);
      }
    }
  }
};

struct IQ4_XS {
  static constexpr int kBits = 4, kBytes = 136;
  static constexpr Table kTable = Table::kIq4;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    const int high = read_u16(block + 2);
    for (int i = 0; i < 8; i++) {
      const int low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
      row.codes[i] = static_cast<uint8_t>((low | (high >> (2 * i) & 3) << 4) - 32);
      unpack_nibbles(block + 8 + 16 * i, values + 32 * i);
    }
  }
};

// The IQ formats of less than four bits: entries of a codebook, with signs. The first of a unit's
// values is the entry's first, and bit j of `signs` is of its j-th.
struct GridShape {
  int entries, width;
};

constexpr GridShape kGridShapes[kGrids] = {{256, 8}, {512, 8}, {1024, 8},
                                           {256, 4}, {512, 4}, {2048, 8}};

std::vector<uint8_t> grids[kGrids];

template <Grid G>
void look_up(int entry, int signs, uint8_t* values) {
  constexpr int kWidth = kGridShapes[static_cast<int>(G)].width;
  const uint8_t* places = grids[static_cast<int>(G)].data() + entry * kWidth;
  for (int j = 0; j < kWidth; j++) {
    values[j] = static_cast<uint8_t>(places[j] | (signs >> j & 1) << 3);
  }
}

// Seven of eight signs: an even number of all is negative.
int eight_signs(uint32_t seven) {
  const int known = static_cast<int>(seven & 127);
  return known | (__builtin_popcount(static_cast<unsigned>(known)) & 1) << 7;
}

uint32_t read_u32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// All scales are odd.
uint8_t odd(uint32_t code) { return static_cast<uint8_t>(2 * code + 1); }

// Four bits each, the lower ones first.
void unpack_odd_nibbles(const uint8_t* packed, int count, uint8_t* codes) {
  for (int i = 0; i < count; i++) codes[i] = odd(packed[i / 2] >> (4 * (i % 2)) & 15);
}

struct IQ2_XXS {
  static constexpr int kBits = 4, kBytes = 66;
  static constexpr Table kTable = Table::kIq2;
  static constexpr Grid kGrid = Grid::kIq2Xxs;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    for (int g = 0; g < 8; g++) {
      const uint8_t* quants = block + 2 + 8 * g;
      const uint32_t more = read_u32(quants + 4);
      row.codes[2 * g] = row.codes[2 * g + 1] = odd(more >> 28);
      for (int i = 0; i < 4; i++, values += 8) {
        look_up<kGrid>(quants[i], eight_signs(more >> (7 * i)), values);
      }
    }
  }
};

struct IQ2_XS {
  static constexpr int kBits = 4, kBytes = 74;
  static constexpr Table kTable = Table::kIq2;
  static constexpr Grid kGrid = Grid::kIq2Xs;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    unpack_odd_nibbles(block + 66, 16, row.codes);
    for (int i = 0; i < 32; i++, values += 8) {
      const uint32_t quant = read_u16(block + 2 + 2 * i);
      look_up<kGrid>(static_cast<int>(quant & 511), eight_signs(quant >> 9), values);
    }
  }
};

struct IQ2_S {
  static constexpr int kBits = 4, kBytes = 82;
  static constexpr Table kTable = Table::kIq2;
  static constexpr Grid kGrid = Grid::kIq2S;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *quants = block + 2, *signs = block + 34, *high = block + 66;
    row.d = read_u16(block);
    unpack_odd_nibbles(block + 74, 16, row.codes);
    for (int i = 0; i < 32; i++, values += 8) {
      look_up<kGrid>(quants[i] | (high[i / 4] >> (2 * (i % 4)) & 3) << 8, signs[i], values);
    }
  }
};

struct IQ3_XXS {
  static constexpr int kBits = 4, kBytes = 98;
  static constexpr Table kTable = Table::kIq3;
  static constexpr Grid kGrid = Grid::kIq3Xxs;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t* quants = block + 2;
    row.d = read_u16(block);
    for (int g = 0; g < 8; g++) {
      const uint32_t more = read_u32(block + 66 + 4 * g);
      row.codes[g] = odd(more >> 28);
      for (int i = 0; i < 4; i++, quants += 2, values += 8) {
        const int signs = eight_signs(more >> (7 * i));
        look_up<kGrid>(quants[0], signs, values);
        look_up<kGrid>(quants[1], signs >> 4, values + 4);
      }
    }
  }
};

struct IQ3_S {
  static constexpr int kBits = 4, kBytes = 110;
  static constexpr Table kTable = Table::kIq3s;
  static constexpr Grid kGrid = Grid::kIq3S;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *quants = block + 2, *high = block + 66, *signs = block + 74;
    row.d = read_u16(block);
    unpack_odd_nibbles(block + 106, 8, row.codes);
    for (int i = 0; i < 64; i++, values += 4) {
      const int entry = quants[i] | (high[i / 8] >> (i % 8) & 1) << 8;
      look_up<kGrid>(entry, signs[i / 2] >> (4 * (i % 2)), values);
    }
  }
};

struct IQ1_S {
  static constexpr int kBits = 4, kBytes = 50;
  static constexpr Table kTable = Table::kIq1;
  static constexpr Grid kGrid = Grid::kIq1;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    row.d = read_u16(block);
    for (int g = 0; g < 8; g++) {
      const uint32_t high = read_u16(block + 34 + 2 * g);
      row.codes[2 * g] = row.codes[2 * g + 1] = odd(high >> 12 & 7);
      for (int i = 0; i < 4; i++, values += 8) {
        const int entry = block[2 + 4 * g + i] | static_cast<int>(high >> (3 * i) & 7) << 8;
        look_up<kGrid>(entry, high & 0x8000 ? 255 : 0, values);
      }
    }
  }
};

// The float16 stands in the upper bits of four words of scales.
struct IQ1_M {
  static constexpr int kBits = 4, kBytes = 56;
  static constexpr Table kTable = Table::kIq1;
  static constexpr Grid kGrid = Grid::kIq1;
  static void unpack(const uint8_t* block, uint8_t* values, SuperRow& row) {
    const uint8_t *high = block + 32, *scales = block + 48;
    int d = 0;
    for (int i = 0; i < 4; i++) d |= read_u16(scales + 2 * i) >> 12 << (4 * i);
    row.d = static_cast<uint16_t>(d);
    for (int i = 0; i < 16; i++) {
      row.codes[i] = odd(read_u16(scales + i / 4 * 2) >> (3 * (i % 4)) & 7);
    }
    for (int i = 0; i < 32; i++, values += 8) {
      const int more = high[i / 2] >> (4 * (i % 2));
      look_up<kGrid>(block[i] | (more & 7) << 8, more & 8 ? 255 : 0, values);
    }
  }
};

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
  uint8_t* group = m.data.data() + index * m.block_bytes();
  const int count = static_cast<int>(std::min<int64_t>(kBlockRows, m.rows - index * kBlockRows));
  const uint8_t* first = data + index * kBlockRows * m.groups() * Format::kBytes;
  for (int64_t g = 0; g < m.groups(); g++, group += m.group_bytes()) {
    uint8_t* scales = group + kLine * Format::kBits;
    for (int r = 0; r < count; r++) {
      uint8_t values[kUnitCols];
      const Pair pair = Format::unpack(first + (r * m.groups() + g) * Format::kBytes, values);
      put_unit<Format::kBits>(group, r, values);
      std::memcpy(scales + 2 * r, &pair.scale, 2);
      std::memcpy(scales + 2 * (kBlockRows + r), &pair.offset, 2);
    }
  }
}

template <typename Format>
void pack_super_block(const Matrix& m, const uint8_t* data, int64_t index) {
  constexpr SuperForm form = super_form(coding_of<Format>());
  constexpr int groups = kSuperCols / form.group;
  const int64_t supers = m.cols / kSuperCols;
  uint8_t* header = m.data.data() + index * m.block_bytes();
  const int count = static_cast<int>(std::min<int64_t>(kBlockRows, m.rows - index * kBlockRows));
  const uint8_t* first = data + index * kBlockRows * supers * Format::kBytes;
  for (int64_t s = 0; s < supers; s++, header += m.super_bytes()) {
    for (int r = 0; r < count; r++) {
      uint8_t values[kSuperCols];
      SuperRow row;
      Format::unpack(first + (r * supers + s) * Format::kBytes, values, row);
      for (int u = 0; u < kSuperCols / kUnitCols; u++) {
        put_unit<Format::kBits>(header + kSuperHeader + u * kLine * Format::kBits, r,
                                values + u * kUnitCols);
      }
      std::memcpy(header + 2 * r, &row.d, 2);
      if (form.kind != SuperKind::kCodes) std::memcpy(header + 32 + 2 * r, &row.factor, 2);
      for (int g = 0; g < groups; g++) {
        header[form.codes_at + g * kBlockRows + r] = row.codes[g];
        if (form.kind == SuperKind::kCodesAndMins) {
          header[form.codes_at + (groups + g) * kBlockRows + r] = row.mins[g];
        }
      }
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

// What tiles of int8 activations by packed or decoded weights have in common, whatever the form of
// the weights (matrix.hpp).
//
// `Ops` brings the instruction set: 16 outputs at a time, see ops/portable.hpp for what it must
// have.
#pragma once

#include <climits>
#include <cstdlib>
#include <type_traits>

#include "../../slabs.hpp"
#include "../vector.hpp"

namespace exo::EXO_ISA {

// Entries by the lower four bits of bytes.
template <Coding C, typename O = Ops>
EXO_INLINE typename O::Bytes look_up(typename O::Bytes indices) {
  static_assert(C.bits == 4);
  return O::permuted_entries(values_of(C.table), indices);
}

// Whether there are kernels that look entries up so: of the tables that many files have.
template <Coding C, typename O = Ops>
constexpr bool may_permute() {
  const bool common = C.table == Table::kIq4 || C.table == Table::kE2m1;
  return common && requires { O::permuted_entries; };
}

// One slab of the unit at `p`.
template <Coding C, int SLAB>
EXO_INLINE Ops::Bytes decode_slab(const uint8_t* p) {
  constexpr Pieces kPieces = pieces_of(C.bits, SLAB);
  const auto shifted = [&](auto index) __attribute__((always_inline)) {
    constexpr Piece kPiece = kPieces.piece[index.value];
    constexpr int kRight = kPiece.low - kPiece.at;
    static_assert(kRight >= 0);
    const Ops::Bytes line = Ops::load(p + kLine * kPiece.line);
    if constexpr (kRight == 0) return line;
    return Ops::shift_right(line, kRight);
  };
  Ops::Bytes value = shifted(std::integral_constant<int, 0>{});
  const auto join = [&](auto index) __attribute__((always_inline)) {
    if constexpr (index.value < kPieces.count) {
      value = Ops::select((1 << kPieces.piece[index.value].at) - 1, value, shifted(index));
    }
  };
  join(std::integral_constant<int, 1>{});
  join(std::integral_constant<int, 2>{});
  if constexpr (C.permutes) {
    return look_up<C>(value);
  } else {
    if constexpr (C.bits < 8) value = Ops::and_mask(value, (1 << C.bits) - 1);
    if constexpr (C.table != Table::kNone) value = Ops::entries(values_of(C.table), value);
    return value;
  }
}

// Calls use(slab, Bytes[B]) for the 8 slabs of a unit (matrix.hpp) of B blocks, `apart` bytes from
// one to the next.
template <Coding C, int B, typename Use>
EXO_INLINE void decode_units(const uint8_t* unit, int64_t apart, const Use& use) {
  const auto decode = [&](auto slab) __attribute__((always_inline)) {
    Ops::Bytes weights[B];
    for (int b = 0; b < B; b++) weights[b] = decode_slab<C, slab.value>(unit + b * apart);
    use(slab.value, weights);
  };
  decode(std::integral_constant<int, 0>{});
  decode(std::integral_constant<int, 1>{});
  decode(std::integral_constant<int, 2>{});
  decode(std::integral_constant<int, 3>{});
  decode(std::integral_constant<int, 4>{});
  decode(std::integral_constant<int, 5>{});
  decode(std::integral_constant<int, 6>{});
  decode(std::integral_constant<int, 7>{});
}

// The same of one block: use(slab, Bytes).
template <Coding C, typename Use>
EXO_INLINE void decode_unit(const uint8_t* unit, const Use& use) {
  decode_units<C, 1>(unit, 0,
                     [&](int slab, const Ops::Bytes(&weights)[1])
                         __attribute__((always_inline)) { use(slab, weights[0]); });
}

EXO_INLINE Ops::Float load_scales(const uint8_t* p, DType dtype, int half) {
  if (dtype == DType::kFloat16)
    return Ops::from_f16(reinterpret_cast<const uint16_t*>(p) + 16 * half);
  if (dtype == DType::kBFloat16)
    return Ops::from_bf16(reinterpret_cast<const uint16_t*>(p) + 16 * half);
  return Ops::from_f32(reinterpret_cast<const float*>(p) + 16 * half);
}

// Offsets of the group whose scales are at `p`.
EXO_INLINE Ops::Float load_offsets(const Matrix& w, const uint8_t* p, Ops::Float scale) {
  if (w.zero == 0) return load_scales(p, w.dtype, 1);
  return Ops::mul(scale, Ops::from_one(-static_cast<float>(w.zero)));
}

// Adds the bias and writes the outputs of a block that exist.
EXO_INLINE void finish(const Matrix& w, int64_t block, Ops::Float y, float* row) {
  alignas(64) float lanes[kBlockRows];
  if (!w.bias.empty()) y = Ops::add(y, Ops::from_f32(w.bias.data() + block * kBlockRows));
  const int64_t left = w.rows - block * kBlockRows;
  if (left >= kBlockRows) return Ops::store(row + block * kBlockRows, y);
  Ops::store(lanes, y);
  std::memcpy(row + block * kBlockRows, lanes, static_cast<size_t>(left) * 4);
}

// The sum of a row's parts (matrix.hpp).
template <typename Part>
EXO_INLINE Ops::Float joined(int parts, const Part& part) {
  const auto pair = [&](int i) { return Ops::add(part(i), part(i + 1)); };
  if (parts == 1) return part(0);
  if (parts == 2) return pair(0);
  if (parts == 4) return Ops::add(pair(0), pair(2));
  return Ops::add(Ops::add(pair(0), pair(2)), Ops::add(pair(4), pair(6)));
}

// The sums of M rows over each part of the columns.
template <int M>
class PartSums {
 public:
  // `steps`: groups, super-blocks or other equal pieces that all parts consist of.
  EXO_INLINE PartSums(int parts, int64_t steps)
      : parts_(parts), steps_(steps / parts), left_(steps_), now_(part_[0]) {}

  // Where the piece at hand is added: [M]. Holds nothing where `begins` says so.
  EXO_INLINE Ops::Float* now() { return now_; }
  EXO_INLINE bool begins() const { return left_ == steps_; }

  // To the next piece. Without a branch: parts are short, and one that is not foreseen costs more
  // than all that is done here.
  EXO_INLINE void next() {
    const int64_t ends = -static_cast<int64_t>(--left_ == 0);
    left_ += steps_ & ends;
    now_ += M & ends;
  }

  // The same where y held what was added.
  EXO_INLINE void close(Ops::Float* y) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      now_[m] = y[m];
      y[m] = Ops::zero_float();
    }
    next();
  }

  // What was added to a part apart.
  EXO_INLINE void join(int64_t part, const Ops::Float* y) {
    for (int m = 0; m < M; m++) part_[part][m] = Ops::add(part_[part][m], y[m]);
  }

  // Row m's whole sum.
  EXO_INLINE Ops::Float total(int m) const {
    return joined(parts_, [&](int i) { return part_[i][m]; });
  }

 private:
  Ops::Float part_[kMostParts][M];
  int parts_;
  int64_t steps_, left_;
  Ops::Float* now_;
};

// Fetches lines ahead in the stream of weights. Those that are read once, for one row or two: on
// x86 processors to the second level, and from there to the first, whose buffers for lines under
// way are few, shortly before; for one row where `vendor.weights_pass_by` past the shared cache.
inline constexpr int64_t kFetchedAhead = 8192, kFetchedSoon = 3072;  // bytes
#ifdef __x86_64__
inline constexpr bool kFetchesToSecond = true;
#else
inline constexpr bool kFetchesToSecond = false;
#endif
template <int M, int LINES>
EXO_INLINE void prefetch(const uint8_t* p, bool pass_by = vendor.weights_pass_by) {
#pragma GCC unroll 8
  for (int line = 0; line < LINES; line++) {
    const uint8_t* at = p + kFetchedAhead + 64 * line;
    if (M == 1 && pass_by) {
      __builtin_prefetch(at, 0, 0);
    } else if (M <= 2 && kFetchesToSecond) {
      __builtin_prefetch(at, 0, 2);
      __builtin_prefetch(p + kFetchedSoon + 64 * line);
    } else {
      __builtin_prefetch(at);
    }
  }
}

// A group (of super-blocks a unit) that is fine in some row of a tile, and a bit for each of these
// rows.
struct FineGroup {
  int32_t index;
  uint32_t rows;
};

inline constexpr int kMostRows = 16;  // of any tile

// Those of `rows` rows from `row` on, in order, and one past all groups; `list` has room for all
// and this one.
inline void list_fine_groups(const QuantizedRows& x, int64_t row, int64_t rows, FineGroup* list) {
  const int64_t groups = x.cols / x.flag_cols();
  const uint8_t* flags = x.is_fine + row * groups;
  for (int64_t g = 0; g < groups; g += 8) {
    uint64_t found[kMostRows / 8] = {};  // a byte a group, in it a bit for each of eight rows
    for (int64_t m = 0; m < rows; m++) {
      uint64_t eight;  // past a row's end those of the next one (QuantizedRows)
      __builtin_memcpy(&eight, flags + m * groups + g, sizeof eight);
      found[m / 8] |= eight << m % 8;
    }
    uint64_t in_some = found[0] | found[1];
    if (groups - g < 8) in_some &= (uint64_t{1} << 8 * (groups - g)) - 1;
    while (in_some != 0) {
      const int byte = __builtin_ctzll(in_some) / 8;
      in_some &= ~(uint64_t{255} << 8 * byte);
      const auto of = [&](uint64_t rows) { return static_cast<uint32_t>(rows >> 8 * byte & 255); };
      *list++ = {static_cast<int32_t>(g + byte), of(found[0]) | of(found[1]) << 8};
    }
  }
  *list = {static_cast<int32_t>(groups), 0};
}

// Calls add(R, first, distance, own) for the R rows of a tile of M in which a group is fine, whose
// sums [B * R] `own` are, of `sums` [B * M]. Most often these are one or two, `first` and the one
// at `distance`; where they are more it calls for all M.
template <int M, int B, typename Sum, typename Add>
EXO_INLINE void with_fine_rows(const FineGroup& fine, Sum* sums, const Add& add) {
  const auto few = [&](auto rows) __attribute__((always_inline)) {
    constexpr int R = rows.value;
    const int first = __builtin_ctz(fine.rows);
    const int distance = R == 1 ? 0 : __builtin_ctz(fine.rows & (fine.rows - 1)) - first;
    Sum* from = sums + first;
    Sum own[B * R];
    for (int b = 0; b < B; b++) {
      for (int r = 0; r < R; r++) own[b * R + r] = from[b * M + r * distance];
    }
    add(rows, first, distance, own);
    for (int b = 0; b < B; b++) {
      for (int r = 0; r < R; r++) from[b * M + r * distance] = own[b * R + r];
    }
  };
  if constexpr (M > 2) {
    const uint32_t others = fine.rows & (fine.rows - 1);
    if (others == 0) return few(std::integral_constant<int, 1>{});
    if ((others & (others - 1)) == 0) return few(std::integral_constant<int, 2>{});
  }
  add(std::integral_constant<int, M>{}, 0, 1, sums);
}

// Into how many bits the weights of a coding fit, as the dot products of this instruction set tell
// them apart.
template <Coding C>
constexpr int weight_bits() {
  if (C.bits == 8 || C.table == Table::kIq4 || Ops::kWeightBits == 8) return 8;
  if (C.table == Table::kIq3 || C.table == Table::kIq2) return 7;
  if (C.bits == 6) return 6;
  return C.bits <= 4 && C.table == Table::kNone ? 4 : 5;
}

// Whether dot products of 8 bits take 128 from each weight.
template <typename O = Ops>
constexpr bool slabs_less_128() {
  return requires { O::kTakes128; };
}

// Whether sums begin with what the values' zero takes from them, where that costs nothing:
// elsewhere it is made up for at their end.
template <typename O = Ops>
constexpr bool begins_less() {
  return requires { O::shifted_left; };
}

// Of how many slabs an instruction set adds products before they are widened; 1: it has no such
// sums.
template <int BITS, typename O = Ops>
constexpr int slabs_at_once() {
  if constexpr (requires { O::slabs_in_16_bits(BITS); }) {
    return O::slabs_in_16_bits(BITS);
  } else {
    return 1;
  }
}

// The latency of a dot product is hidden by several sums a row where there are few rows.
constexpr int sums_of_few(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// Memory of this thread for panels and lists, kept from call to call.
inline uint8_t* scratch(size_t bytes) {
  static thread_local struct Scratch {
    uint8_t* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
  } held;
  if (held.size < bytes) {
    std::free(held.data);
    held.size = (bytes + 4095) / 4096 * 4096;
    held.data = static_cast<uint8_t*>(std::aligned_alloc(4096, held.size));
  }
  return held.data;
}

// Packed weights of a set of blocks: those of the next one, fetched meanwhile, stay in an L2 cache
// beside them.
inline constexpr int64_t kSetBytes = 256 << 10;
// Of what comes next so many bytes are: a pair of wide blocks is larger than a set.
inline constexpr int64_t kFetchedBytes = 512 << 10;

// A block decoded once for many rows: slabs as bytes, scales and offsets as floats.
struct Panel {
  uint8_t* slabs;  // [cols / 4][64]
  float* scales;   // [groups][2][16], without offsets [groups][16]; of super-blocks see SuperScales
};

// What is fetched from memory meanwhile: so many lines with each step. To the second level: there
// are more of them than the first one holds, where they would take the place of what is multiplied.
struct Ahead {
  const uint8_t* at = nullptr;
  int lines = 0;

  EXO_INLINE void fetch() {
    for (int i = 0; i < lines; i++, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Leaves a loop's sum in its register, where gcc 12 would move each of a dozen to another one and
// back in every round.
template <typename V>
EXO_INLINE void stay([[maybe_unused]] V& sum) {
#ifdef __AVX512F__
  asm("" : "+v"(sum));
#endif
}

// `count` blocks from `block` on, or what comes after all, where `end` is the last one's end.
inline Upcoming next_blocks(const Matrix& w, int64_t block, int64_t count, int64_t end,
                            Upcoming after_all) {
  if (block >= end) return after_all;
  return {w.block(block), (end - block < count ? end - block : count) * w.block_bytes()};
}

// The first bytes of what is multiplied next, up to `most`, spread evenly over `steps`; no more
// than `most_lines` with one of them.
class Fetching {
 public:
  Fetching(Upcoming next, int64_t most, int64_t steps, int64_t most_lines = INT_MAX)
      : at_(next.weights) {
    const int64_t lines = (next.bytes < most ? next.bytes : most) / 64;
    end_ = at_ + 64 * lines;
    const int64_t each = steps > 0 ? (lines + steps - 1) / steps : 0;
    lines_ = static_cast<int>(each < most_lines ? each : most_lines);
  }

  // What the next `steps` fetch.
  Ahead take(int64_t steps) {
    if (at_ >= end_) return {};
    const Ahead taken{at_, lines_};
    at_ += steps * lines_ * 64;
    return taken;
  }

 private:
  const uint8_t *at_, *end_;
  int lines_;
};

}  // namespace exo::EXO_ISA

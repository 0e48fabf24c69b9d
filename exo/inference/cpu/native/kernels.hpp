// What the model calls: one table of functions for each instruction set, chosen at run time.
//
// Batch invariance, to the bit, is every kernel's promise: what it writes for one row depends on
// that row alone, not on how many rows share the call. So all sizes of tile do the same float
// operations in the same order for a row (integer sums may take any order).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "matrix.hpp"

namespace exo {

// Signed bytes for rows of activations: x ~ scale * q, one scale for each `group` columns.
//   values: int8 [rows, stride], `cols` of them used; groups: [rows, cols / group].
struct QuantizedGroup {
  float scale;
  float sum;     // scale * the total of its bytes: what an affine weight's offset multiplies
  int32_t less;  // -total
};

// The same for super-blocks (matrix.hpp), whose sums stay integers over all of their 256 columns:
// x ~ scale * multiple * q, the multiple that of a unit of 32 columns. It is at most 8, so that
// multiple * total of a unit needs 16 bits and what a super-block adds up 32. The bytes of 16
// columns, each without its sign, add up to kMostOfHalf at most: so their products with weights of
// up to 6 bits need 16 bits, too, as do those of 32 columns with weights of 4 bits.
struct alignas(64) QuantizedSuper {
  static constexpr int kUnits = kSuperCols / kUnitCols, kHalves = 2 * kUnits, kMostOfHalf = 1023;
  int32_t multiples[kUnits];
  int16_t half_multiples[kHalves];                // each twice
  int16_t unit_sums[kUnits], half_sums[kHalves];  // multiple * total, of 32 and of 16 columns
  // With what a sum begins where values stand for what is so much less.
  int32_t unit_less[kUnits];    // -kUnitZero * total
  int32_t half_less[kHalves];   // -kHalfZero * total
  int32_t second_less[kUnits];  // of second halves, and kBias (linear/super_halves.hpp)
  alignas(64) float scale;      // a line by itself makes their number odd (scale_stride)
  static constexpr int kUnitZero = 128, kHalfZero = 32, kBias = 1 << 15;
};
inline constexpr int kMostMultiple = 8;

struct QuantizedPart {
  int8_t* values;
  QuantizedGroup* groups;
  QuantizedSuper* supers;  // instead of groups: [rows, scale_stride]

  // The same where group `index` is the first; its values too where `columns` says how many each
  // has.
  QuantizedPart from(int64_t index, int columns = 0) const {
    return {values + index * columns, groups + index, nullptr};
  }
};

inline constexpr int kPairCols = 2;  // as a group of columns: for bfloat16 weights

// Bytes from one row's values to the next one's: an odd number of cache lines. Kernels read the
// same columns of several rows, and an L1 cache has room for few lines whose addresses are a power
// of two apart (of 16 rows 2,048 bytes apart Zen 5 reads a quarter as many a cycle, of 8 as many).
inline constexpr int64_t row_stride(int64_t cols, int group) {
  const int64_t bytes = group == kPairCols ? (cols + 1) / 2 * 8 : cols;
  return ((bytes + 63) / 64 | 1) * 64;
}

// From one row's groups or super-blocks to the next one's: of super-blocks an odd number of lines,
// too.
inline constexpr int64_t scale_stride(int64_t cols, int group) {
  return group == kSuperCols ? cols / group | 1 : cols / group;
}
static_assert(sizeof(QuantizedSuper) / 64 % 2 == 1);

inline constexpr int kSplitCols = 64;
inline constexpr int64_t split_stride(int64_t cols) { return row_stride(2 * cols, kSuperCols); }

// Rows of activations, quantized. Where one value dwarfs the others of its group, a byte leaves
// these nothing: such a group is marked in `is_fine` [rows, cols / flag_cols()], and `fine` holds
// what `coarse` left over. In other groups `fine` has the scale (or the multiple) and the sum 0 and
// no values. Memory goes on for 15 rows past the last: a kernel that takes 16 at a time reads, not
// uses, them.
//
// For bfloat16 weights, `group` being kPairCols, rows are rounded to bfloat16: `coarse.values`
// holds them two by two, or as floats, as the instruction set wants them, and there is nothing
// else.
struct QuantizedRows {
  QuantizedPart coarse;
  QuantizedPart fine;
  uint8_t* is_fine;
  int64_t cols, stride;
  int group;  // kSuperCols: as super-blocks read them, in units; kPairCols: bfloat16
  // multiple * byte of what is coarse, in two bytes: int8 [rows, split_stride(cols)], of each
  // kSplitCols columns the low bytes, unsigned, then the high ones. Null: no kernel reads it.
  int8_t* split;

  // A part from `row` on.
  QuantizedPart from_row(const QuantizedPart& part, int64_t row) const {
    const int64_t scales = row * scale_stride(cols, group);
    if (group == kSuperCols) return {part.values + row * stride, nullptr, part.supers + scales};
    return {part.values + row * stride, part.groups + scales, nullptr};
  }
  int64_t flag_cols() const { return group == kSuperCols ? kUnitCols : group; }
};

inline constexpr float kPeakShare = 0.9f;  // of a group's energy in one value that makes it fine

// xIELU (arXiv:2411.13010, eq. 13) with alphas that are softplus of what was learned, plus `beta`
// the negative one: alpha_p x^2 + beta x above 0, alpha_n (e^min(x, eps) - 1 - x) + beta x below.
struct Xielu {
  float alpha_p, alpha_n, beta, eps;
};

enum class Activation : uint8_t { kSilu, kGeluTanh, kGelu, kClampedSwiglu, kSigmoid, kRelu2 };

inline constexpr int kPageTokens = 64;    // tokens in a page of the KV cache
inline constexpr int kChunkTokens = 256;  // keys whose softmax is one partial result
inline constexpr int kKeyBlock = 16;      // keys interleaved in a page

// What a key or value is kept as. A byte stands for scale * byte, one float32 scale for each
// kKVGroup values along the head, the last of which may be shorter.
enum class KVType : uint8_t { kFloat32, kFloat16, kInt8 };

inline constexpr int kKVGroup = 64;

inline constexpr int64_t kv_groups(int64_t head_dim) {
  return (head_dim + kKVGroup - 1) / kKVGroup;
}
inline constexpr int64_t size_of(KVType type) {
  return type == KVType::kFloat32 ? 4 : type == KVType::kFloat16 ? 2 : 1;
}

// The keys and values of one layer and one KV head, in pages.
//   page(i) + key_offset: [kPageTokens / 16][head_dim][16] keys; + value_offset: [64][value_dim].
// Where they are bytes, scales follow: of keys [kPageTokens / 16][groups][16], of values
// [64][groups].
struct KVView {
  uint8_t* const* pages;
  int64_t key_offset;    // bytes
  int64_t value_offset;  // bytes
  KVType type;
  int head_dim, value_dim;

  // Bytes that the keys, or the values, of one page take.
  static constexpr int64_t half_bytes(KVType type, int64_t head_dim) {
    return kPageTokens * (head_dim * size_of(type) +
                          (type == KVType::kInt8 ? kv_groups(head_dim) * int64_t{4} : 0));
  }
};

struct AttentionRule {
  float soft_cap;  // 0: none; else scores become cap * tanh(score / cap)
  int window;      // 0: all earlier tokens; else the newest `window`, the token itself included
  bool in_chunks;  // those of its own chunk of `window` tokens instead

  // The first position that a query at `position` sees; below 0: all.
  [[gnu::always_inline]] int64_t first_seen(int64_t position) const {
    if (in_chunks) return position - position % window;
    return window > 0 ? position + 1 - window : 0;
  }
};

// Softmax over the keys of one chunk, for one query row: what a later merge needs.
struct Partial {
  float max;
  float sum;
};

// What is quicker on one vendor's x86 processors than on another's. Results are the same. Of
// processors nobody measured, those the next year brings too, these are guesses: so where kernels
// have two ways they try both before they settle (kernels/linear/quicker.hpp), unless
// EXO_CPU_VENDOR `is_told`.
struct Vendor {
  // Weights that are read once a step, as those of one row are, are prefetched
  // non-temporally. On AMD that leaves the shared cache to all else: the interpreter's part of a
  // step takes a quarter less time. Intel's prefetchnta leaves out the second level and with it
  // what fetches ahead there: decoding takes twice as long (Sapphire Rapids). There prefetches to
  // the second level are best, and shortly before to the first, whose buffers for lines under way
  // are few.
  bool weights_pass_by;

  // Shifts are done in units that do not multiply: AMD's have enough to do with dot products.
  // Intel's two do everything, so the fewest operations of any kind are best
  // (linear/super_rows.hpp).
  bool shifts_aside;

  // AVX512-BF16's dot products are quicker than two fused steps of floats: AMD's, one of which
  // begins in each cycle. Intel's begin in every second one, and four fused steps meanwhile
  // (Emerald Rapids).
  bool uses_bfloat16_dots;

  // Entries of a table are looked up by AVX512-VBMI's instruction, where `has_vbmi`, which
  // needs no mask of the indices: in Intel's units that is an operation less of those that
  // multiply.
  bool permutes_bytes;

  bool has_vbmi, is_told;
};
extern Vendor vendor;

// Of a clock that only goes on.
int64_t nanoseconds();

// A recurrent state: float32 in blocks of kStateLanes rows, [keys][kStateLanes], so that a row's
// sums stay in one lane. The last block's rows that do not exist are zeros.
inline constexpr int kStateLanes = 16;
inline constexpr int64_t state_size(int64_t rows, int64_t keys) {
  return (rows + kStateLanes - 1) / kStateLanes * kStateLanes * keys;
}

// What a token changes of it: rate * value, or by the delta rule rate * (value - what the faded
// state has for its key). All of the state fades alike, or each key's column by itself.
enum class Recurrence : uint8_t { kSum, kDelta, kDeltaByKey };

// One token for some of its rows: state = decay * state + change (outer) key, and out = state
// query.
struct StateStep {
  const float *key, *query;  // [keys]
  const float* value;        // [rows]
  float decay, rate;
  float* out;                     // [rows]
  const float* decays = nullptr;  // [keys], kDeltaByKey's instead of `decay`
};

// Weights that a thread multiplies after those at hand: fetched from memory meanwhile.
struct Upcoming {
  const uint8_t* weights = nullptr;
  int64_t bytes = 0;
};

// Of a selective scan kStateLanes channels at their first token. Each remembers `keys` numbers,
// which fade by exp(-rate * step) and gain step * x * b, where step is the softplus of what is
// told; c reads them, and skip * x is added.
struct Scan {
  const float *rates, *skip;  // [keys][kStateLanes], [kStateLanes]
  const float *step, *x;      // [kStateLanes]; the next token's come `width` later
  const float *b, *c;         // [keys], of all channels; the next token's come `apart` later
  float* out;                 // as x
  int64_t width, apart;
};

struct KernelTable {
  const char* name;

  // x: float32 [rows, cols] -> out from row `first`. Rounds half to even. `all_fine` marks all
  // groups.
  void (*quantize_rows)(const float* x, int64_t rows, const QuantizedRows& out, int64_t first,
                        bool all_fine);
  // Of quantized rows [first, first + rows), what tiles read of super-blocks for at least
  // `split_from` rows.
  void (*split_rows)(const QuantizedRows& x, int64_t first, int64_t rows);
  int64_t split_from;

  // out[row * stride + n] = W x + bias for n in the rows of blocks [begin, end).
  void (*linear_int8)(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                      int64_t end, float* out, int64_t stride, Upcoming next);
  // The same of bfloat16 weights.
  void (*linear_bfloat16)(const Matrix& w, const QuantizedRows& x, int64_t rows, int64_t begin,
                          int64_t end, float* out, int64_t stride, Upcoming next);
  // The same from float activations: x float32 [rows, cols].
  void (*linear_float)(const Matrix& w, const float* x, int64_t rows, int64_t begin, int64_t end,
                       float* out, int64_t stride, Upcoming next);

  // out = x / sqrt(mean(x^2) + eps) * weight; in place is fine.
  void (*rms_norm)(const float* x, const float* weight, float* out, int64_t cols, float eps);
  // out = (x - mean) / sqrt(variance + eps) * weight + bias, a null bias being 0; in place is fine.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float* out,
                     int64_t cols, float eps);
  // x += scale * y
  void (*add_scaled)(float* x, const float* y, float scale, int64_t count);
  // gate = activation(gate) * up, a null up being 1
  void (*gate)(Activation activation, float* gate, const float* up, int64_t count);
  // Rotates pairs of the first 2 * pairs values of each of `heads` heads by cos, sin [pairs].
  void (*rotate)(float* x, int heads, int head_dim, int pairs, bool interleaved, const float* cos,
                 const float* sin);
  // Writes a key or value row [head_dim] as token `slot` of its page.
  void (*store_key)(const float* key, uint8_t* keys, int slot, int head_dim, KVType type);
  void (*store_value)(const float* value, uint8_t* values, int slot, int head_dim, KVType type);

  // One chunk of attention for `count` query rows that share a KV head.
  //   queries[i]: float32 [head_dim], scaled already; positions[i]: its token's position.
  //   out: float32 [count, value_dim], unnormalized; partials: [count], sum 0 where no key is seen.
  void (*attend_chunk)(const KVView& kv, const AttentionRule& rule, int64_t chunk,
                       const float* const* queries, const int64_t* positions, int count, float* out,
                       Partial* partials);
  // Folds a later chunk's (or a sink's, out null) partial result into an earlier one's.
  void (*merge)(float* out, Partial& partial, const float* other, const Partial& other_partial,
                int value_dim);
  // out *= 1 / sum
  void (*normalize)(float* out, const Partial& partial, int value_dim);
  // out[j] = sum over `count` queries of weights[i] * max(0, queries[i] . key j), for the first
  // `keys` keys of a chunk; out has room for keys up to the next multiple of 16.
  void (*score_chunk)(const KVView& kv, int64_t chunk, const float* const* queries,
                      const float* weights, int count, int keys, float* out);
  // out[i * apart + j] = queries[i] . key j, for the same keys and with as much room each.
  void (*multiply_chunk)(const KVView& kv, int64_t chunk, const float* const* queries, int count,
                         int keys, float* out, int64_t apart);

  // out[c] = sum over taps of weights[tap][c] * x[tap * stride + c] (+ bias[c]), c < channels, a
  // null bias being none; through SiLU where `silu`.
  void (*convolve)(const float* x, int64_t stride, const float* weights, const float* bias,
                   int64_t channels, int taps, bool silu, float* out);
  // Tokens one after the other through `state`, keys a multiple of 4.
  void (*recur)(float* state, const StateStep* steps, int64_t tokens, int keys, int64_t rows,
                Recurrence kind);
  // A selective scan (Mamba, arXiv:2312.00752, algorithm 2) of kStateLanes channels over `tokens`
  // tokens, with `keys` numbers of state each, a multiple of 4.
  void (*scan)(float* state, const Scan& channels, int64_t tokens, int keys);
  // x = exp(-rate * softplus(x + bias)), or where `bound` is below 0
  // exp(bound * sigmoid(rate * (x + bias)))
  void (*fade)(float* x, const float* bias, float rate, float bound, int64_t count);
  void (*xielu)(float* x, const Xielu& numbers, int64_t count);
};

// The table for this processor: its best, or what EXO_CPU_ISA names; the first call also takes the
// vendor that EXO_CPU_VENDOR names. Throws std::runtime_error for a name that is unknown or that
// the processor cannot run.
const KernelTable& kernels();

// Switches to another table ("" for the best); not while a model computes. Throws as above.
void choose_kernels(const std::string& name);
// Names of the tables this processor can run, best first.
std::vector<std::string> runnable_kernels();

// Sets `vendor` to "amd" or "intel" ("" for this processor's); not while a model computes. Throws
// std::runtime_error for others.
void choose_vendor(const std::string& name);

}  // namespace exo

// What a layer of a transformer may consist of: the parts that attend, those that remember a state,
// mixtures, and what stands around them.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "expert_memory.hpp"
#include "kv_cache.hpp"
#include "matrix.hpp"

namespace exo {

using MatrixPtr = std::shared_ptr<Matrix>;

// Rotary positions: pair i of a head turns by position * frequencies[i]; cos and sin are scaled.
struct Rope {
  std::vector<float> frequencies;
  float scale = 1.f;
  bool interleaved = false;  // pairs (2i, 2i + 1) instead of (i, i + pairs)
};

enum class Routing : uint8_t {
  kSoftmaxThenTop,         // probabilities over all experts, the top ones as they are
  kSoftmaxThenTopSummed1,  // the same, divided by their sum
  kTopThenSoftmax,         // probabilities over the top ones
  kTopThenSigmoid,         // of each of the top ones by itself
  kSigmoid,                // of each by itself, the top ones as they are
  kSigmoidSummed1,         // the same, divided by their sum
  kRootSoftplusSummed1,    // the root of softplus of each by itself, divided by their sum
  kSparseMixer,            // of each of the top ones, among those that are left and near it
};

// A convolution of each channel over the last `taps` tokens, weights [taps, channels].
struct Convolution {
  std::vector<float> weights, bias;  // an empty bias: none
  int taps = 0;
};

// A gated delta net (arXiv:2412.06464, eq. 10): each value head remembers a matrix [value_dim,
// key_dim], which fades by exp(-exp(A) softplus(a x + dt_bias)) and is corrected towards v by
// sigmoid(b x). What is read is normed and multiplied by silu(z x).
// Kimi's (arXiv:2510.26692, eq. 6) is one `by_key`: each column of that matrix fades by itself, and
// what is read is multiplied by sigmoid(z x).
struct DeltaNet {
  // Rows, of all together: [key_heads, key_dim] twice, [value_heads, value_dim].
  std::vector<MatrixPtr> qkv;
  MatrixPtr z, a, b, out;
  MatrixPtr z_down, a_down;    // what z and a read of x; null: x itself
  Convolution convolution;     // of qkv's rows
  std::vector<float> decay;    // exp(A) [value_heads]
  std::vector<float> dt_bias;  // [value_heads], `by_key` [value_heads, key_dim]
  std::vector<float> norm;     // [value_dim]
  bool by_key = false;
  float fading_bound = 0.f;  // see KernelTable::fade
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  bool sigmoid_gate = false;  // in silu's place; `by_key` too
  bool regroups = false;      // `tiled`, but for `out`, which reads those of a key head together
  bool tiled = false;  // value head i goes with key head i % key_heads, not i * key_heads / heads

  int64_t channels() const {
    return int64_t{2} * key_heads * key_dim + int64_t{value_heads} * value_dim;
  }
};

// A state space (Mamba-2, arXiv:2405.21060, 7.1): each head remembers a matrix [head_dim,
// state_dim], which fades by exp(-exp(A) dt) and gains dt x (outer) B, where dt = softplus(its row
// + dt_bias) within `steps`; C reads it, and D x is added. What is read goes through the gate's
// SiLU and a norm of `norm_groups` parts (an empty one: none).
struct StateSpace {
  MatrixPtr xbc, gate, dt, out;  // rows of xbc: [heads, head_dim], [groups, state_dim] twice
  Convolution convolution;       // of xbc's rows
  std::vector<float> decay;      // exp(A) [heads]
  std::vector<float> dt_bias;    // [heads]
  std::vector<float> skip;       // D [heads]
  std::vector<float> norm;       // [heads * head_dim]
  int heads = 0, groups = 0, head_dim = 0, state_dim = 0, norm_groups = 1;
  float least_step = 0.f, most_step = 1e30f;
};

// A selective state space (Mamba, arXiv:2312.00752, 3.2), see KernelTable::scan: steps, b and c are
// linear in the convolution of x, steps by way of `rank` numbers; with norms (Jamba, Falcon Mamba)
// of these, of b and of c. What is read goes through the gate's SiLU.
struct SelectiveScan {
  MatrixPtr x, gate, step_b_c, step, out;  // rows of step_b_c: [rank], [state_dim] twice
  Convolution convolution;                 // of x
  std::vector<float> rates;                // exp(A_log) [channels / kStateLanes][state_dim][lanes]
  std::vector<float> skip;                 // D [channels]
  std::vector<float> step_norm, b_norm, c_norm;  // [rank], [state_dim]; empty: there are none
  int state_dim = 0;
  float norm_eps = 1e-6f;

  int64_t channels() const { return x->rows; }
  int64_t rank() const { return step->cols; }
};

// LFM2's: c * convolution(b * x), all three linear in the layer's input.
struct ShortConvolution {
  MatrixPtr b, c, x, out;
  Convolution convolution;
};

// Makes entries that stand for `ratio` tokens each (DeepSeek V4): of each number a mean of the
// tokens' own, weighed by the softmax of what `gate` and `bias` give them; then normed (an empty
// norm: not) and turned by the position of the first. Where they overlap, a token has two numbers,
// of which the first is for the entry after its own.
struct Compressor {
  MatrixPtr kv, gate;       // [dim], or where they overlap [2 * dim]; no gate: all weigh the same
  std::vector<float> bias;  // [ratio, rows of kv]; without a gate none
  std::vector<float> norm;  // [dim]
  int dim = 0, ratio = 0;
  bool overlaps = false;
  bool turns_first = false;  // numbers of an entry, not the last ones

  int64_t width() const { return overlaps ? int64_t{2} * dim : dim; }
  int64_t kept() const { return overlaps ? int64_t{2} * ratio : ratio; }  // tokens
  // Of a token that later entries are made of.
  int64_t token_floats() const { return gate ? 2 * width() : width(); }
  int64_t state_floats() const { return kept() * token_floats(); }
};

// DeepSeek V3.2's: of all keys a query sees which it attends to, the best by a sum over `heads` of
// weights(x) * max(0, q . k). One k for all heads, normed, in the KV cache. GLM 5.3's chooses among
// `pools` of tokens, whose entries are made of their k, and its queries attend to all tokens of
// these, and to those after the last whole pool.
struct Indexer {
  MatrixPtr q, k, weights;            // q reads what LatentAttention::q_b does
  std::shared_ptr<Compressor> pools;  // without kv; null: single tokens
  std::vector<float> k_norm, k_norm_bias;
  int heads = 0, dim = 0;
  bool interleaved = false;  // see Rope
  bool turns_last = false;   // numbers of a head, not the first ones
  float norm_eps = 1e-6f;
};

// Qwen3.8 Flash Next's: of all keys a query sees those of the best pools of tokens, by a sum over
// `heads` of max(0, q . k), with one k for all of them: the mean of what `pools` makes of a pool's
// tokens, normed and turned; and those after the last whole pool.
struct PoolIndexer {
  MatrixPtr q;                // [heads, dim]
  std::vector<float> q_norm;  // [dim]
  std::shared_ptr<Compressor> pools;
  int heads = 0, dim = 0, most = 0;  // `most`: keys of whole pools

  int64_t all_below() const { return int64_t{most} + pools->ratio - 1; }
};

// MiniMax M3's: of all keys a query sees, for each KV head by itself, those in the `most` best
// blocks of `size` tokens, a whole number of pages: best by the largest q . k in them, and before
// all others the `local` newest, at least its own. One k for all heads, normed, in the KV cache.
struct BlockIndexer {
  MatrixPtr q, k;  // rows of q: [KV heads, dim]
  std::vector<float> q_norm, k_norm;
  int dim = 0, size = 0, most = 0, local = 1;

  // Positions that attend to all; later ones choose.
  int64_t all_below() const { return int64_t{most} * size; }
};

// Attention over latents (DeepSeek V2, arXiv:2405.04434, 2.1): the cache holds, for all heads
// together, what is turned by position and a latent [rank]; of each head `embed` [rank, nope] takes
// a query there and `unembed` [value_dim, rank] what was attended back.
struct LatentAttention {
  MatrixPtr q_a, q_b, kv_a;  // q_b reads the norm of q_a's output, or the layer's input
  std::vector<float> q_a_norm, kv_a_norm;
  std::vector<MatrixPtr> embed, unembed;
  float norm_eps = 1e-6f;
  int nope = 0, turned = 0, rank = 0, value_dim = 0;
  int most = 0;                      // keys that a query attends to; 0: all
  int pool = 1;                      // of how many tokens each: `most` is that of whole pools
  std::shared_ptr<Indexer> indexer;  // null: those that the layer before did

  // Positions that attend to all; later ones choose. At most so many are chosen.
  int64_t all_below() const { return most > 0 ? int64_t{most} + pool - 1 : INT64_MAX; }
};

// DeepSeek V4's attention. One key of `dim` numbers, its last ones turned by position, is the value
// too, for all heads. A query sees those of the newest `window` tokens, and entries that stand for
// several tokens each: all that are complete, or the `most` of them that an indexer chooses, which
// scores entries of its own. What is attended is turned back, and parts of the heads go each
// through a matrix of its own before they are joined.
struct CompressedAttention {
  MatrixPtr q_a, q_b, kv;
  std::vector<float> q_a_norm, kv_norm;
  std::vector<MatrixPtr> out;
  std::shared_ptr<Compressor> compressor, index_compressor;  // null: there is none
  std::shared_ptr<Indexer> indexer;                          // without k
  int dim = 0, window = 0, most = 0;

  int ratio() const { return compressor ? compressor->ratio : 0; }
  int64_t window_pages() const { return (window + kPageTokens - 2) / kPageTokens + 1; }
  // The first one that a query at `position` sees.
  int64_t first_page(int64_t position) const {
    return std::max<int64_t>(0, position + 1 - window) / kPageTokens;
  }
  // A page has keys and values.
  int64_t page_bytes(KVType type) const { return 2 * KVView::half_bytes(type, dim); }
  int64_t window_floats(KVType type) const {
    return window_pages() * page_bytes(type) / static_cast<int64_t>(sizeof(float));
  }
};

// DeepSeek V4's residuals (arXiv:2512.24880): a token has several hidden states. `mix` makes of all
// of them, normed as one, how a layer's part reads them, how what it gives is added to each, and a
// matrix whose rows and columns sum to 1, by which they go over into one another. In Hy4 they stay
// apart. In Qwen3.8 Flash Next they do, too, each normed by itself: there a part reads the mean of
// them number by number weighed, by sigmoid(up silu(down of all / streams)), and `mix` has the rows
// for what it gives alone, the last one none.
struct HyperConnection {
  // [rows, streams * hidden]: streams * (2 + streams) rows, or 2 * streams; the last one's streams
  MatrixPtr mix;
  std::vector<float> base;    // of each row of mix
  std::vector<float> scales;  // of the rows for each of the three
  MatrixPtr down, up;         // null: DeepSeek's or Hy4's
  std::vector<float> norm;    // [streams * hidden], with these
};

// Qwen3.8 Flash Next's, in one layer: what sequences of up to `orders` tokens that end with this
// one bring, each by several rows of a table that stays on disk. Of all of them `value` makes one
// more hidden state and `key` one for each stream, which says by its product with the stream how
// much of `value` that gets; and a convolution over tokens that are `dilation` apart.
struct Ngrams {
  using Rows = std::function<MatrixPtr(const std::vector<int64_t>& rows)>;

  Rows rows;                           // of the table, packed
  std::vector<int64_t> multipliers;    // [orders]: of the token itself, of the one before, ...
  std::vector<int64_t> sizes, starts;  // of the table's parts, those of two tokens first
  int end = 0;                         // a token that what comes before it does not reach past
  MatrixPtr key, value;
  std::vector<float> key_norm, query_norm, convolution_norm;  // [streams * hidden]
  Convolution convolution;                                    // of as many channels
  int dilation = 1;

  int64_t orders() const { return static_cast<int64_t>(multipliers.size()); }
  int64_t rows_before() const { return int64_t{convolution.taps - 1} * dilation; }
  int64_t channels() const { return static_cast<int64_t>(convolution_norm.size()); }
  // Rows of the convolution, and the last tokens, each as its number and 1.
  int64_t state_floats() const { return rows_before() * channels() + orders() - 1; }
};

// Gemma 3n's and 4's: beside its hidden state each token has, for each layer, `dim` numbers of its
// own; x grows by a norm of out (gelu(gate x) * them).
struct TokenInput {
  MatrixPtr gate, out;
  std::vector<float> norm;
};

// Gemma 3n's: the hidden state is several streams, of which a layer predicts all (a matrix of
// numbers that depend on the active one), computes with the active one, and corrects all by what
// came of it (AltUp, arXiv:2301.13310). Beside the attention `left` and `right` are a second way of
// low rank (LAuReL, arXiv:2411.07501).
struct AltUp {
  MatrixPtr router;  // [streams, hidden]
  std::vector<float> router_norm;
  std::vector<float> predict;  // [streams, streams, streams]: to, from, routed
  std::vector<float> correct;  // [streams, streams]: to, routed
  std::vector<float> scale;    // [hidden]: of the active stream that TokenInput reads, or empty
  MatrixPtr left, right;
  std::vector<float> laurel_norm;
};

// How streams begin and end, but for the first: what makes them of the first one, and back.
struct Streams {
  std::vector<MatrixPtr> begin, end;
  int active = 0;
};

// Where they come from, in the first shard: the token's row of `embedding` [vocabulary, layers *
// dim] and norms of each layer's part of what `projection` makes of its hidden state.
struct TokenInputs {
  MatrixPtr embedding, projection;
  std::vector<float> norm;  // [dim]
  float embedding_scale = 1.f, projection_scale = 1.f, scale = 1.f;
};

// Around a mixture's parts, where they have norms of their own: what the router and the experts
// read of x, and what is added of the experts and of the MLP beside them.
struct MixtureNorms {
  std::vector<float> router, experts, after_experts, after_mlp;
};

// An empty vector or null pointer: the layer does without, be it a gate (down activation(up x)),
// the whole MLP or all that mixes tokens. Beside a router, gate, up and down are an expert that
// every token goes through, scaled by shared_scale and, where there is one, sigmoid(shared_gate x).
struct Layer {
  std::vector<float> attention_norm, after_attention_norm, mlp_norm, after_mlp_norm;
  std::vector<float> attention_norm_bias, mlp_norm_bias;    // where Spec::layer_norm
  std::vector<float> attention_inner_norm, mlp_inner_norm;  // of what o and down read (BitNet)
  bool parallel = false;  // the MLP reads what the attention reads, not what it gives
  MatrixPtr q, k, v, o;
  // What is attended is multiplied by its sigmoid, or its softplus, which has a row for each number
  // or for each head.
  MatrixPtr output_gate;
  bool softplus_gate = false;
  // [head_dim], or [heads * head_dim] over all heads at once
  std::vector<float> q_norm, k_norm, v_norm;
  float value_scale = 1.f;  // of what `v` gives
  // Where layers differ; 0: Spec's. Without `v` the values are what `k` gives.
  int heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  int kv_from = -1;  // the layer of this shard whose keys and values these queries read
  bool norm_after_rope = false;
  std::vector<float> sinks;  // [heads]
  int rope = -1;             // index into Model::ropes; -1: no positions
  int window = 0;            // 0: all earlier tokens
  bool in_chunks = false;    // see AttentionRule
  MatrixPtr gate, up, down;
  std::shared_ptr<Xielu> xielu;  // in Spec::activation's place, without a gate
  MatrixPtr router, shared_gate;
  // Where tokens tell their experts: [vocabulary, experts_per_token].
  std::vector<int32_t> experts_of_tokens;
  float shared_scale = 1.f;
  std::vector<float> router_bias;   // added where experts are chosen, not where they are weighed
  MatrixPtr expert_in, expert_out;  // around the experts, where these are narrower than x
  std::vector<Expert> experts;
  // Where not all of them are in memory: `experts` has the first alone, to tell what they are like.
  std::shared_ptr<ExpertMemory> expert_memory;
  int number = 0;                    // of this layer, in expert_memory
  std::vector<float> expert_scales;  // [experts]: of what they are weighed with
  std::shared_ptr<MixtureNorms> mixture_norms;
  std::shared_ptr<TokenInput> token_input;
  std::shared_ptr<AltUp> alt_up;
  // Of what the gate gives only what lies so many deviations above its mean goes on.
  bool sparse = false;
  float deviations = 0.f;
  // Of what a SiLU gives in experts, and in any other MLP; what it is multiplied by keeps within
  // both ways. 0: no limit.
  float expert_limit = 0.f, limit = 0.f;
  float scale = 1.f;                     // of x after all else
  std::shared_ptr<BlockIndexer> blocks;  // null: attends to all keys it sees
  std::shared_ptr<PoolIndexer> pooled;   // or these
  std::shared_ptr<Ngrams> ngrams;
  std::shared_ptr<LatentAttention> latent;
  std::shared_ptr<CompressedAttention> compressed;
  std::shared_ptr<HyperConnection> attention_streams, mlp_streams;
  std::shared_ptr<DeltaNet> delta_net;
  std::shared_ptr<ShortConvolution> short_convolution;
  std::shared_ptr<StateSpace> state_space;
  std::shared_ptr<SelectiveScan> selective_scan;
  // Queries grow by 1 + query_growth log(1 + floor((position + query_ahead) / query_span)), as in
  // Llama 4.
  float query_growth = 0.f;
  int query_span = 1, query_ahead = 0;

  bool attends() const { return q || latent; }
  // Attends and has a state; both read the layer's input.
  bool mixes_twice() const { return attends() && state_space; }
  bool caches() const { return attends() && kv_from < 0; }
  // Numbers of the key that an indexer has of each token in the KV cache; 0: there is none.
  int index_dim() const;
  const Compressor* pools() const {
    if (pooled) return pooled->pools.get();
    return latent && latent->indexer ? latent->indexer->pools.get() : nullptr;
  }
  // How many tokens its entries stand for, and their shapes; 0: there are none.
  int entry_ratio() const;
  std::vector<HeadShape> entries() const;
  // What a sequence takes beside the KV cache, whose numbers are of `type`; of `ngrams` at the end.
  int64_t state_floats(KVType type) const {
    return mixer_floats(type) + (ngrams ? ngrams->state_floats() : 0);
  }
  int64_t mixer_floats(KVType type) const;
};

}  // namespace exo

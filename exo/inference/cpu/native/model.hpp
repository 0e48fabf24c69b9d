// A shard of a transformer: its layers, and a step of a ragged batch through them in one call.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kv_cache.hpp"
#include "layer.hpp"
#include "linear.hpp"
#include "state_cache.hpp"

namespace exo {

struct Spec {
  int hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;
  bool layer_norm = false;  // norms of layers and the final one subtract the mean
  float norm_eps = 1e-5f;
  float after_norm_eps = 1e-5f;  // of norms of what a layer's parts give
  float attention_scale = 1.f;
  float attention_soft_cap = 0.f;
  Activation activation = Activation::kSilu;
  float embedding_scale = 1.f;
  float residual_scale = 1.f;
  float logits_scale = 1.f;
  float logits_soft_cap = 0.f;
  int experts_per_token = 0;
  Routing routing = Routing::kTopThenSoftmax;
  float expert_scale = 1.f;
  float expert_band = 0.f;     // kSparseMixer: how near, as a part of the larger of both
  bool weighs_inputs = false;  // what experts read is weighed, not what they give
  bool limits_inputs = false;  // Layer's limits are those of what the activation reads
  // Only the best groups of neighbouring experts are chosen from, by the sum of their best ones.
  int expert_groups = 1, groups_per_token = 1, judged_per_group = 1;
  int streams = 1;  // hidden states of a token
  // That bring rows and columns of a HyperConnection's matrix to 1; 0: there is none.
  int sinkhorn_rounds = 20;
  float stream_eps = 1e-6f;
  // What a part gives is added to each state by so much, or less, and so much more.
  float stream_magnitude = 2.f, stream_least = 0.f;
  bool precise = false;  // float activations everywhere
  int kv_bits = 16;      // of a key or value in the cache: 32, 16, or 8 and scales
  int64_t cache_limit_bytes = 0;
};

struct Slice {
  std::string sequence;
  int64_t start;
  int64_t length;
  int64_t logits;      // of how many of its last tokens
  bool keeps = false;  // what recurrent layers remember at its end stays, to begin from again
};

// The places of the `most` best of `count` scores, in their order; of equal ones the first.
void choose_best(const float* scores, int64_t count, int64_t most, int32_t* chosen);

class Model {
 public:
  explicit Model(const Spec& spec) : spec_(spec) {}

  // What this shard holds; set before the first step.
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  MatrixPtr embedding;                // first shard: [vocabulary, hidden]
  std::vector<float> embedding_norm;  // first shard: [hidden], or empty
  MatrixPtr head;                     // last shard: [vocabulary, hidden]
  std::shared_ptr<TokenInputs> token_inputs;
  std::shared_ptr<Streams> streams;  // such a model is one shard
  // Last shard: what makes one state of several; null: their mean.
  std::shared_ptr<HyperConnection> last_streams;
  std::vector<float> final_norm, final_norm_bias;  // last shard
  int norm_every = 0;                              // final_norm between so many layers, too; 0: not

  // All linear layers are stored turned, and the embedding where `embedding`.
  void set_hadamard(std::shared_ptr<const Hadamard> hadamard, bool embedding);

  // Throws std::invalid_argument, which says what does not fit what. For before the first step.
  void check_sizes() const;
  // One step. `tokens` [rows]; `hidden` float32 [rows, width()], null in the first shard. Writes
  // hidden states [rows, width()], or on the last shard logits [rows that are wanted, vocabulary].
  // Throws CacheMissError, CacheFullError, std::out_of_range (a token id).
  void forward(const std::vector<Slice>& slices, const int32_t* tokens, const float* hidden,
               float* out);
  // What the head would read of the step computed last: x after the final norm, float32
  // [rows, hidden]. Last shard only.
  void final_states(float* out) const;
  void release(const std::string& sequence);
  // Sequences that begin alike share the KV cache, see KVCache. Throws CacheMissError.
  void take_over(const std::string& sequence, const std::string& source, int64_t tokens);

  const Spec& spec() const { return spec_; }
  int64_t width() const { return int64_t{spec_.streams} * spec_.hidden; }  // between shards
  int64_t rows() const { return rows_; }  // of the step computed last
  int64_t sequences() const { return cache_ ? cache_->sequences() : 0; }
  int64_t cache_bytes() const { return cache_ ? held_bytes() : 0; }
  int64_t cache_pages() const { return cache_ ? cache_->used_bytes() / cache_->page_bytes() : 0; }
  int64_t states() const { return states_ ? states_->count() : 0; }
  // What kPageTokens tokens of a sequence take.
  int64_t page_bytes() const;
  // What a sequence takes beside its pages, and each moment that is kept of it.
  int64_t state_bytes() const;

 private:
  struct Row {
    int64_t position;
    size_t slice;
  };

  // Entries of all layers that stand for so many tokens each, counted as a KVCache counts tokens.
  struct Entries {
    int ratio;
    std::unique_ptr<KVCache> cache;
    std::vector<uint8_t* const*> pages;  // of each slice of the step

    std::vector<KVView> views(int place) const;  // of each slice
  };
  // One of a row's experts.
  struct ExpertSlot {
    int64_t row, expert;
    float weight;
    int64_t place;  // among all slots, ordered by expert
  };
  struct Routed {
    std::vector<ExpertSlot> slots;  // [rows, experts_per_token]
    std::vector<int64_t> first;     // [experts + 1]: places, where each expert's begin
    std::vector<int> asked;         // experts that have any
  };
  // Keys of one sequence that a query at `position` of them sees by `rule`.
  struct Seen {
    KVView kv;
    AttentionRule rule;
    int64_t position;
  };
  // So many heads of a row, from `head` on, and the sets of keys that they see.
  struct SeeingHeads {
    int64_t row, head, heads;
    std::vector<Seen> seen;
  };

  KVType kv_type() const;
  CacheShape cache_shape() const;
  CacheShape entries_shape(int ratio) const;
  std::vector<int> ratios() const;
  int64_t held_bytes() const;
  void extend(const Slice& slice);
  void prepare(const std::vector<Slice>& slices);
  void embed(const int32_t* tokens);
  void norm_row(const float* x, const std::vector<float>& norm, const std::vector<float>& bias,
                float* out) const;
  // In place, `x` of as many numbers as the norm, if it has any.
  void norm_inner(const std::vector<float>& norm, float* x) const;
  // The rows of `x`, normed (an empty norm leaves them) and quantized for `groups`, into normed_.
  void norm_rows(const float* x, const std::vector<float>& norm, const std::vector<float>& bias,
                 const std::vector<int>& groups);
  // For what mixes tokens, and for the MLP.
  void norm_for_mixer(const Layer& layer, std::initializer_list<const Matrix*> readers);
  void norm_for_mlp(const Layer& layer, std::initializer_list<const Matrix*> readers);
  HeadShape shape_of(const Layer& layer) const;
  // What each layer's TokenInput reads, from the tokens and their embeddings in x_.
  void read_token_inputs(const int32_t* tokens);
  void add_token_input(const Layer& layer, size_t index);
  float* stream(int64_t number, int64_t row) {
    return streams_.data() + (number * rows_ + row) * spec_.hidden;
  }
  void begin_streams();
  void end_streams();
  void predict_streams(const AltUp& up);
  void correct_streams(const AltUp& up);
  // tanh of the router's view of x_: [rows, streams] in router_out_.
  void route_streams(const AltUp& up);
  void add_laurel(const AltUp& up);
  // Rows of the table for each token, in its order; at `state` what is remembered for the next.
  std::vector<int64_t> rows_of_ngrams(const Ngrams& ngrams, int64_t state);
  void add_ngrams(const Ngrams& ngrams, int64_t state);
  // `index` among the layers that cache, `pools` among the entries of its indexer; `state` where
  // its part of a sequence's state begins.
  void attention(const Layer& layer, int index, int pools, int64_t state);
  // Of tokens at positions below so many.
  void attend(const Layer& layer, int index, int64_t positions_below = INT64_MAX);
  void activate(float limit, float* row, const float* up, int64_t width) const;
  float query_scale(const Layer& layer, int64_t position) const;
  void gate_output(const Layer& layer, float* gate, int64_t width, int64_t row);
  // `place` in the KV cache, `pools` among the entries of its indexer.
  void latent_attention(const Layer& layer, int place, int pools, int64_t state);
  // An indexer's queries of all rows, not yet turned, and the weights of their heads.
  void ask_indexer(const Indexer& indexer);
  void index_pools(const Layer& layer, int place, int64_t state);
  // The same beside heads of keys and values.
  void index_means(const Layer& layer, int place, int64_t state);
  // Numbers of `most` / `pool` pools chosen become the positions of their tokens.
  void expand_pools(int64_t most, int64_t pool);
  // `place` among the entries of the layer's ratio.
  void compressed_attention(const Layer& layer, int place, int64_t state);
  // `kv` and `gate` (null without one) of all rows to what is kept of them at `state` of each
  // sequence, and complete entries into place `place`, as keys or, `with_values`, as values too.
  void compress(const Compressor& compressor, const Rope& rope, const float* kv, const float* gate,
                int64_t state, Entries& entries, int place, bool with_values);
  void score_entries(const Layer& layer, Entries& entries, int place);
  // Of each slice pages with the keys of its step and of the window before; by position.
  std::vector<std::vector<uint8_t*>> window_pages(const Layer& layer, int64_t state);
  void keep_windows(const Layer& layer, int64_t state);
  Entries& entries_of(int ratio);
  // From q_, where a row has `heads`, into attended_.
  void attend_rows(int64_t heads, const std::vector<SeeingHeads>& each,
                   const std::vector<float>& sinks);
  // Copies of `count` keys, at these places.
  KVView copy_chosen(const KVView& from, const int32_t* chosen, int64_t count);
  // Streams into x_ as a layer's part reads them, and that part's result, in x_, to them.
  void collapse(const HyperConnection& connection);
  void collapse_gated(const HyperConnection& connection);
  void expand();
  // All of them into x_, after the last layer.
  void join_streams();
  // An indexer's keys into place `index` of the KV cache, and what it chooses for tokens that see
  // more keys than `most`: positions, in their order, of row i from chosen_[i * all_below()] on.
  void index(const Layer& layer, int index);
  // Of each row that sees more keys than `most`, of which one stands for `every` tokens; row i's
  // from chosen_[i * stride] on.
  void choose_keys(int heads, int64_t dim, int64_t most, int every, int64_t stride,
                   const std::vector<KVView>& keys_of_slices);
  std::vector<int64_t> choosing_rows(int64_t most, int every) const;
  // Each with all keys of the chosen `most` in pools of `pool`, and those after the last whole one.
  void attend_chosen(const Layer& layer, int index, int64_t most, int64_t pool);
  // The same where blocks are chosen, whose keys are at `index`.
  void index_blocks(const Layer& layer, int index);
  void score_keys(const BlockIndexer& indexer, int index, std::span<const int64_t> rows,
                  int64_t apart);
  void choose_blocks(const BlockIndexer& indexer, std::span<const int64_t> rows, int64_t apart);
  void attend_blocks(const Layer& layer, int index);
  void delta_net(const Layer& layer, int64_t state);
  // out = up (down normed_)
  void through_both(const Matrix& down, const Matrix& up, bool precise, float* out);
  void short_convolution(const Layer& layer, int64_t state);
  void state_space(const Layer& layer, int64_t state);
  void selective_scan(const Layer& layer, int64_t state);
  std::vector<int64_t> first_rows() const;  // of each slice
  // state_steps_ [heads, rows] through each slice's states of `values` rows (kernels.hpp) a head,
  // at `matrices`.
  void recur(int64_t heads, int64_t values, int64_t keys, int64_t matrices, Recurrence kind);
  // Where a convolution's rows [rows, channels] are to be written: behind what the only slice
  // remembers, or where there are several, by themselves.
  float* rows_to_convolve(const Convolution& convolution, int64_t channels);
  // These -> convolved_, with what came before each slice from its state.
  void convolve(const Convolution& convolution, int64_t channels, bool silu, int64_t state);
  // x += norm(out attended_)
  void project_out(const Matrix& out, const Layer& layer);
  void mlp(const Layer& layer);
  void experts(const Layer& layer);
  const Activations& read_for_experts(const Layer& layer);
  void score_experts(const Layer& layer);
  Routed route(const Layer& layer);
  void run_experts(const Layer& layer, const Routed& routed, const Activations& read);
  void add_experts(const Layer& layer, const Routed& routed);
  void logits(const std::vector<Slice>& slices, float* out);
  std::vector<int> groups_of(std::initializer_list<const Matrix*> weights) const;
  // x += residual_scale * (norm of y), or of y itself
  void add_residual(float* x, float* y, const std::vector<float>& norm) const;
  float* x(int64_t row) { return x_.data() + row * spec_.hidden; }

  Spec spec_;
  std::shared_ptr<const Hadamard> hadamard_;
  bool turned_embedding_ = false;
  std::unique_ptr<KVCache> cache_;
  std::unique_ptr<StateCache> states_;
  std::vector<Entries> entries_;

  // The step now running.
  int64_t rows_ = 0;
  const int32_t* tokens_ = nullptr;  // [rows]
  std::vector<Slice> const* slices_ = nullptr;
  std::vector<Row> row_;
  std::vector<uint8_t* const*> pages_;   // of each slice
  std::vector<float*> state_;            // of each slice
  std::vector<Lines<float>> cos_, sin_;  // of each rope: [rows, pairs]
  Lines<float> x_, before_, q_, k_, v_, up_, y_, partial_out_, router_out_, expert_out_,
      shared_out_;
  Lines<float> in_, window_, convolved_, z_;
  Lines<float> index_q_, index_weights_, index_scores_;
  std::vector<int32_t> chosen_;
  Lines<uint8_t> chosen_pages_, window_memory_;
  std::vector<uint8_t*> chosen_places_;
  std::vector<StateStep> state_steps_;
  std::vector<Partial> partials_;
  Lines<float> token_inputs_;  // [rows, layers * dim]
  Lines<float> streams_;       // [streams, rows, hidden]; Spec::streams' [rows, streams, hidden]
  Lines<float> mixes_;         // of each row, as HyperConnection::mix has them
  std::vector<float> ones_;    // [streams * hidden]
  Activations normed_, attended_, gated_, gathered_, shared_, by_head_, routed_, for_experts_;
};

}  // namespace exo

// A shard of a transformer: its layers, and a step of a ragged batch through them in one call.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kv_cache.hpp"
#include "linear.hpp"

namespace exo {

using MatrixPtr = std::shared_ptr<Matrix>;

// Rotary positions: pair i of a head turns by position * frequencies[i]; cos and sin are scaled.
struct Rope {
  std::vector<float> frequencies;
  float scale = 1.f;
  bool interleaved = false;  // pairs (2i, 2i + 1) instead of (i, i + pairs)
};

struct Expert {
  MatrixPtr gate, up, down;
};

enum class Routing : uint8_t {
  kSoftmaxThenTop,         // probabilities over all experts, the top ones as they are
  kSoftmaxThenTopSummed1,  // the same, divided by their sum
  kTopThenSoftmax,         // probabilities over the top ones
};

// An empty vector or null pointer: the layer does without.
struct Layer {
  std::vector<float> attention_norm, after_attention_norm, mlp_norm, after_mlp_norm;
  MatrixPtr q, k, v, o;
  std::vector<float> q_norm, k_norm;  // [head_dim], or [heads * head_dim] over all heads at once
  std::vector<float> sinks;           // [heads]
  int rope = -1;                      // index into Model::ropes; -1: no positions
  int window = 0;                     // 0: all earlier tokens
  MatrixPtr gate, up, down;
  MatrixPtr router;
  std::vector<Expert> experts;
};

struct Spec {
  int hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;
  float norm_eps = 1e-5f;
  float attention_scale = 1.f;
  float attention_soft_cap = 0.f;
  Activation activation = Activation::kSilu;
  float embedding_scale = 1.f;
  float residual_scale = 1.f;
  float logits_scale = 1.f;
  float logits_soft_cap = 0.f;
  int experts_per_token = 0;
  Routing routing = Routing::kTopThenSoftmax;
  bool precise = false;  // float activations everywhere
  bool float32_cache = false;
  int64_t cache_limit_bytes = 0;
};

struct Slice {
  std::string sequence;
  int64_t start;
  int64_t length;
  int64_t logits;  // of how many of its last tokens
};

class Model {
 public:
  explicit Model(const Spec& spec) : spec_(spec) {}

  // What this shard holds; set before the first step.
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  MatrixPtr embedding;            // first shard: [vocabulary, hidden]
  MatrixPtr head;                 // last shard: [vocabulary, hidden]
  std::vector<float> final_norm;  // last shard

  // One step. `tokens` [rows] where this is the first shard, else `hidden` float32 [rows, hidden].
  // Writes hidden states [rows, hidden], or on the last shard logits [rows that are wanted,
  // vocabulary]. Throws CacheMissError, CacheFullError, std::out_of_range (a token id).
  void forward(const std::vector<Slice>& slices, const int32_t* tokens, const float* hidden,
               float* out);
  // What the head would read of the step computed last: x after the final norm, float32
  // [rows, hidden]. Last shard only.
  void final_states(float* out) const;
  void release(const std::string& sequence);
  // Sequences that begin alike share the KV cache, see KVCache. Throws CacheMissError.
  void take_over(const std::string& sequence, const std::string& source, int64_t tokens);

  const Spec& spec() const { return spec_; }
  int64_t rows() const { return rows_; }  // of the step computed last
  int64_t sequences() const { return cache_ ? cache_->sequences() : 0; }
  int64_t cache_bytes() const { return cache_ ? cache_->used_bytes() : 0; }
  int64_t page_bytes() const { return KVCache(cache_shape()).page_bytes(); }

 private:
  struct Row {
    int64_t position;
    size_t slice;
  };

  CacheShape cache_shape() const {
    return {static_cast<int>(layers.size()), spec_.kv_heads, spec_.head_dim,
            spec_.float32_cache ? DType::kFloat32 : DType::kFloat16, spec_.cache_limit_bytes};
  }
  void prepare(const std::vector<Slice>& slices);
  void embed(const int32_t* tokens);
  // The rows of x, normed (an empty norm leaves them) and quantized for `groups`, into normed_.
  void norm_rows(const std::vector<float>& norm, const std::vector<int>& groups);
  void attention(const Layer& layer, int index);
  void attend(const Layer& layer, int index);
  void mlp(const Layer& layer);
  void experts(const Layer& layer);
  void logits(const std::vector<Slice>& slices, float* out);
  std::vector<int> groups_of(std::initializer_list<const Matrix*> weights) const;
  // x += residual_scale * (norm of y), or of y itself
  void add_residual(float* x, float* y, const std::vector<float>& norm) const;
  float* x(int64_t row) { return x_.data() + row * spec_.hidden; }

  Spec spec_;
  std::unique_ptr<KVCache> cache_;

  // The step now running.
  int64_t rows_ = 0;
  std::vector<Slice> const* slices_ = nullptr;
  std::vector<Row> row_;
  std::vector<uint8_t* const*> pages_;         // of each slice
  std::vector<std::vector<float>> cos_, sin_;  // of each rope: [rows, pairs]
  std::vector<float> x_, q_, k_, v_, up_, y_, partial_out_, router_out_, expert_out_;
  std::vector<Partial> partials_;
  Activations normed_, attended_, gated_, gathered_;
};

}  // namespace exo

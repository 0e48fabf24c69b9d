// Whether all that a model is made of fits together. What computes relies on it: a file may say
// anything. (Products of matrices look for themselves, see run_linear.)
#include <algorithm>
#include <stdexcept>

#include "model.hpp"

namespace exo {

namespace {

using Floats = std::vector<float>;

class Sizes {
 public:
  Sizes(const Spec& spec, std::string place) : spec_(spec), place_(std::move(place)) {}

  void check(const Layer& layer) const {
    const int64_t hidden = spec_.hidden;
    const auto own = [](int layers, int usual) { return int64_t{layers > 0 ? layers : usual}; };
    const int64_t heads = own(layer.heads, spec_.heads), dim = own(layer.head_dim, spec_.head_dim);
    const int64_t kv_heads = own(layer.kv_heads, spec_.kv_heads);
    for (const auto* norm :
         {&layer.attention_norm, &layer.after_attention_norm, &layer.mlp_norm,
          &layer.after_mlp_norm, &layer.attention_norm_bias, &layer.mlp_norm_bias}) {
      maybe("a norm", *norm, hidden);
    }
    if (layer.q && !layer.compressed && !layer.latent) {
      const int64_t value_dim = own(layer.value_dim, static_cast<int>(dim));
      matrix("the queries' projection", layer.q, heads * dim, hidden);
      matrix("the keys' projection", layer.k, kv_heads * dim, hidden);
      matrix("the values' projection", layer.v, kv_heads * value_dim, hidden);
      matrix("the attention's way out", layer.o, hidden, heads * value_dim);
      of_heads("the queries' norm", layer.q_norm, heads, dim);
      of_heads("the keys' norm", layer.k_norm, kv_heads, dim);
      of_heads("the values' norm", layer.v_norm, kv_heads, dim);
    }
    if (layer.o) maybe("the norm of what was attended", layer.attention_inner_norm, layer.o->cols);
    if (layer.down) maybe("the MLP's inner norm", layer.mlp_inner_norm, layer.down->cols);
    maybe("the sinks", layer.sinks, heads);
    check_mlp(layer);
    if (layer.token_input) maybe("the norm of token inputs", layer.token_input->norm, hidden);
    if (layer.alt_up) check(*layer.alt_up);
    for (const auto& streams : {layer.attention_streams, layer.mlp_streams}) {
      if (streams) check(*streams);
    }
    if (layer.blocks) {
      maybe("the indexer's norm", layer.blocks->q_norm, layer.blocks->dim);
      maybe("the indexer's norm", layer.blocks->k_norm, layer.blocks->dim);
    }
    if (layer.pooled) {
      maybe("the indexer's norm", layer.pooled->q_norm, layer.pooled->dim);
      check(*layer.pooled->pools);
    }
    if (layer.latent) check(*layer.latent, heads);
    if (layer.compressed) check(*layer.compressed);
    if (layer.delta_net) check(*layer.delta_net);
    if (layer.state_space) check(*layer.state_space);
    if (layer.selective_scan) check(*layer.selective_scan);
    if (const auto& conv = layer.short_convolution) check(conv->convolution, conv->x->rows);
    if (layer.ngrams) check(*layer.ngrams);
  }

  void check(const HyperConnection& streams) const {
    const int64_t all = int64_t{spec_.streams} * spec_.hidden;
    if (streams.mix && !streams.down) {
      exactly("a connection's base", streams.base, streams.mix->rows);
      exactly("a connection's scales", streams.scales, streams.mix->rows);
    }
    maybe("a connection's norm", streams.norm, all);
  }

  void matrix(const char* what, const MatrixPtr& found, int64_t rows, int64_t cols) const {
    if (found && (found->rows != rows || found->cols != cols)) {
      fail(what, std::to_string(found->rows) + " x " + std::to_string(found->cols),
           std::to_string(rows) + " x " + std::to_string(cols));
    }
  }

  void exactly(const char* what, const Floats& found, int64_t size) const {
    expect(what, static_cast<int64_t>(found.size()), size);
  }

  // Or there is none.
  void maybe(const char* what, const Floats& found, int64_t size) const {
    if (!found.empty()) exactly(what, found, size);
  }

 private:
  void expect(const char* what, int64_t found, int64_t size) const {
    if (found != size) fail(what, std::to_string(found), std::to_string(size));
  }

  [[noreturn]] void fail(const std::string& what, const std::string& found,
                         const std::string& wanted) const {
    throw std::invalid_argument(place_ + what + " is of " + found + ", not of " + wanted);
  }

  // Of each head, or of all at once.
  void of_heads(const char* what, const Floats& found, int64_t heads, int64_t dim) const {
    if (static_cast<int64_t>(found.size()) != heads * dim) maybe(what, found, dim);
  }

  void check_mlp(const Layer& layer) const {
    if (layer.up) {
      const int64_t hidden = spec_.hidden, width = layer.up->rows;
      matrix("the MLP's way up", layer.up, width, hidden);
      matrix("the MLP's gate", layer.gate, width, hidden);
      matrix("the MLP's way down", layer.down, hidden, width);
    }
    if (layer.router) {
      const int64_t experts = layer.router->rows;
      if (!layer.expert_memory) {
        expect("the router", experts, static_cast<int64_t>(layer.experts.size()));
      }
      maybe("the router's bias", layer.router_bias, experts);
      maybe("the experts' scales", layer.expert_scales, experts);
      for (const int32_t expert : layer.experts_of_tokens) {
        if (expert < 0 || expert >= experts) {
          fail("an expert of a token", std::to_string(expert), std::to_string(experts));
        }
      }
    }
    for (const Expert& expert : layer.experts) {
      if (expert.gate) expect("an expert's gate", expert.gate->rows, expert.up->rows);
      expect("an expert's way down", expert.down->cols, expert.up->rows);
      expect("an expert's way up", expert.up->rows, layer.experts.front().up->rows);
    }
    if (const auto& norms = layer.mixture_norms) {
      for (const auto* norm :
           {&norms->router, &norms->experts, &norms->after_experts, &norms->after_mlp}) {
        maybe("a mixture's norm", *norm, spec_.hidden);
      }
    }
  }

  void check(const AltUp& up) const {
    const int64_t streams = up.router->rows;
    maybe("the router's norm", up.router_norm, spec_.hidden);
    exactly("what predicts streams", up.predict, streams * streams * streams);
    exactly("what corrects streams", up.correct, streams * streams);
    maybe("a stream's scale", up.scale, spec_.hidden);
    maybe("a norm", up.laurel_norm, spec_.hidden);
  }

  void check(const Convolution& convolution, int64_t channels) const {
    exactly("a convolution", convolution.weights, convolution.taps * channels);
    maybe("a convolution's bias", convolution.bias, channels);
  }

  void check(const DeltaNet& net) const {
    check(net.convolution, net.channels());
    exactly("what fades", net.decay, net.value_heads);
    const int64_t each = net.by_key ? net.key_dim : 1;
    exactly("the bias of what fades", net.dt_bias, net.value_heads * each);
    exactly("a delta net's norm", net.norm, net.value_dim);
  }

  void check(const StateSpace& space) const {
    check(space.convolution, space.xbc->rows);
    exactly("what fades", space.decay, space.heads);
    exactly("a step's bias", space.dt_bias, space.heads);
    exactly("what is added", space.skip, space.heads);
    maybe("a state space's norm", space.norm, int64_t{space.heads} * space.head_dim);
  }

  void check(const SelectiveScan& scan) const {
    const int64_t channels = scan.channels();
    check(scan.convolution, channels);
    exactly("what fades", scan.rates, channels * scan.state_dim);
    exactly("what is added", scan.skip, channels);
    maybe("a step's norm", scan.step_norm, scan.rank());
    maybe("a norm", scan.b_norm, scan.state_dim);
    maybe("a norm", scan.c_norm, scan.state_dim);
  }

  void check(const Compressor& made) const {
    if (made.gate) exactly("an entry's bias", made.bias, made.ratio * made.width());
    maybe("an entry's norm", made.norm, made.dim);
  }

  void check(const Indexer& indexer) const {
    maybe("the indexer's norm", indexer.k_norm, indexer.dim);
    maybe("the indexer's norm", indexer.k_norm_bias, indexer.dim);
    if (indexer.pools) check(*indexer.pools);
  }

  void check(const LatentAttention& latent, int64_t heads) const {
    if (latent.q_a) exactly("the queries' norm", latent.q_a_norm, latent.q_a->rows);
    exactly("the latents' norm", latent.kv_a_norm, latent.rank);
    expect("attention over latents", static_cast<int64_t>(latent.embed.size()), heads);
    expect("attention over latents", static_cast<int64_t>(latent.unembed.size()), heads);
    if (latent.indexer) check(*latent.indexer);
  }

  void check(const CompressedAttention& own) const {
    exactly("the queries' norm", own.q_a_norm, own.q_a->rows);
    exactly("the keys' norm", own.kv_norm, own.dim);
    for (const auto& made : {own.compressor, own.index_compressor}) {
      if (made) check(*made);
    }
    if (own.indexer) check(*own.indexer);
  }

  void check(const Ngrams& ngrams) const {
    const int64_t all = int64_t{spec_.streams} * spec_.hidden;
    for (const auto* norm : {&ngrams.key_norm, &ngrams.query_norm, &ngrams.convolution_norm}) {
      exactly("a norm of tokens that come together", *norm, all);
    }
    check(ngrams.convolution, all);
  }

  const Spec& spec_;
  std::string place_;
};

}  // namespace

void Model::check_sizes() const {
  for (size_t i = 0; i < layers.size(); i++) {
    Sizes(spec_, "layer " + std::to_string(i) + " of the shard: ").check(layers[i]);
  }
  const Sizes sizes(spec_, "");
  for (const auto& words : {embedding, head}) {
    if (words) sizes.matrix("the embedding or the head", words, words->rows, spec_.hidden);
  }
  for (const auto* norm : {&embedding_norm, &final_norm, &final_norm_bias}) {
    sizes.maybe("a norm", *norm, spec_.hidden);
  }
  if (token_inputs && !layers.empty() && layers[0].token_input) {
    const int64_t dim = layers[0].token_input->gate->rows;
    const MatrixPtr& all = token_inputs->embedding;
    const int64_t parts = std::max(all->cols / dim, static_cast<int64_t>(layers.size()));
    sizes.exactly("the norm of token inputs", token_inputs->norm, dim);
    sizes.matrix("what tokens bring to layers", all, all->rows, parts * dim);
  }
  if (last_streams) sizes.check(*last_streams);
}

}  // namespace exo

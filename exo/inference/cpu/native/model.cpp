#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>

#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

namespace {

// What lies so many deviations above the mean, less that; else 0.
void drop_below(float* x, int64_t count, float deviations) {
  double sum = 0, squares = 0;
  for (int64_t d = 0; d < count; d++) sum += double{x[d]};
  const double mean = sum / static_cast<double>(count);
  for (int64_t d = 0; d < count; d++) squares += (x[d] - mean) * (x[d] - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(count));
  const float least = static_cast<float>(mean + deviation * double{deviations});
  for (int64_t d = 0; d < count; d++) x[d] = std::max(0.f, x[d] - least);
}

}  // namespace

KVType Model::kv_type() const {
  const int bits = spec_.kv_bits;
  return bits == 32 ? KVType::kFloat32 : bits == 8 ? KVType::kInt8 : KVType::kFloat16;
}

CacheShape Model::cache_shape() const {
  std::vector<HeadShape> shapes;
  for (const Layer& layer : layers) {
    if (layer.caches()) shapes.push_back(shape_of(layer));
    if (const int dim = layer.index_dim()) shapes.push_back({1, dim, 0});
  }
  // Pages are what a cache is counted in, also where no layer has keys of each token in it.
  if (shapes.empty() && !ratios().empty()) shapes.push_back({1, kKeyBlock, 0});
  if (shapes.empty()) shapes.push_back({spec_.kv_heads, spec_.head_dim, spec_.head_dim});
  return {std::move(shapes), kv_type(), spec_.cache_limit_bytes};
}

CacheShape Model::entries_shape(int ratio) const {
  std::vector<HeadShape> shapes;
  for (const Layer& layer : layers) {
    if (layer.entry_ratio() != ratio) continue;
    for (const HeadShape& shape : layer.entries()) shapes.push_back(shape);
  }
  return {std::move(shapes), kv_type(), spec_.cache_limit_bytes, ratio};
}

std::vector<int> Model::ratios() const {
  std::vector<int> found;
  for (const Layer& layer : layers) {
    const int own = layer.entry_ratio();
    if (own > 0 && std::find(found.begin(), found.end(), own) == found.end()) found.push_back(own);
  }
  return found;
}

int64_t Model::page_bytes() const {
  int64_t bytes = KVCache(cache_shape()).page_bytes();
  for (const int ratio : ratios()) {
    bytes += (KVCache(entries_shape(ratio)).page_bytes() + ratio - 1) / ratio;
  }
  return bytes;
}

int64_t Model::held_bytes() const {
  int64_t bytes = cache_->used_bytes() + states_->used_bytes();
  for (const Entries& entries : entries_) bytes += entries.cache->used_bytes();
  return bytes;
}

HeadShape Model::shape_of(const Layer& layer) const {
  const int dim = layer.head_dim > 0 ? layer.head_dim : spec_.head_dim;
  return {layer.kv_heads > 0 ? layer.kv_heads : spec_.kv_heads, dim,
          layer.latent          ? layer.latent->rank
          : layer.value_dim > 0 ? layer.value_dim
                                : dim};
}

int64_t Model::state_bytes() const {
  int64_t floats = 0;
  for (const Layer& layer : layers) floats += layer.state_floats(kv_type());
  return floats * static_cast<int64_t>(sizeof(float));
}

void Model::set_hadamard(std::shared_ptr<const Hadamard> hadamard, bool embedding) {
  hadamard_ = std::move(hadamard);
  turned_embedding_ = embedding;
  for (Activations* x :
       {&normed_, &attended_, &gated_, &gathered_, &shared_, &by_head_, &routed_, &for_experts_}) {
    x->set_hadamard(hadamard_.get());
  }
}

void Model::release(const std::string& sequence) {
  if (!cache_) return;
  cache_->release(sequence);
  states_->release(sequence);
  for (Entries& entries : entries_) entries.cache->release(sequence);
}

void Model::take_over(const std::string& sequence, const std::string& source, int64_t tokens) {
  if (!cache_) throw CacheMissError(source, tokens, 0);
  if (states_->state_bytes() > 0) states_->take_over(sequence, source, tokens);
  cache_->take_over(sequence, source, tokens);
  for (Entries& entries : entries_) {
    entries.cache->take_over(sequence, source, tokens / entries.ratio);
  }
}

void Model::extend(const Slice& slice) {
  const auto beside = [this](const KVCache& one) { return held_bytes() - one.used_bytes(); };
  cache_->extend(slice.sequence, slice.start, slice.length, beside(*cache_));
  for (Entries& entries : entries_) {
    const int64_t first = slice.start / entries.ratio;
    const int64_t last = (slice.start + slice.length) / entries.ratio;
    entries.cache->extend(slice.sequence, first, last - first, beside(*entries.cache));
  }
}

std::vector<int> Model::groups_of(std::initializer_list<const Matrix*> weights) const {
  std::vector<int> groups;
  for (const Matrix* w : weights) {
    if (w == nullptr) continue;
    const int group = activation_group(*w, spec_.precise);
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  }
  return groups;
}

void Model::prepare(const std::vector<Slice>& slices) {
  if (!cache_) {
    cache_ = std::make_unique<KVCache>(cache_shape());
    states_ = std::make_unique<StateCache>(state_bytes() / static_cast<int64_t>(sizeof(float)));
    for (const int ratio : ratios()) {
      entries_.push_back({ratio, std::make_unique<KVCache>(entries_shape(ratio)), {}});
    }
  }
  slices_ = &slices;
  row_.clear();
  pages_.clear();
  state_.clear();
  for (size_t s = 0; s < slices.size(); s++) {
    if (states_->state_bytes() > 0) {
      state_.push_back(states_->at(slices[s].sequence, slices[s].start));
    }
    extend(slices[s]);
    for (int64_t i = 0; i < slices[s].length; i++) row_.push_back({slices[s].start + i, s});
  }
  for (const Slice& slice : slices) pages_.push_back(cache_->pages(slice.sequence));
  for (Entries& entries : entries_) {
    entries.pages.clear();
    for (const Slice& slice : slices) entries.pages.push_back(entries.cache->pages(slice.sequence));
  }
  rows_ = static_cast<int64_t>(row_.size());
  grow(x_, rows_ * spec_.hidden);
  if (spec_.streams > 1) grow(streams_, rows_ * width());
  cos_.resize(ropes.size());
  sin_.resize(ropes.size());
  for (size_t r = 0; r < ropes.size(); r++) {
    const int64_t pairs = static_cast<int64_t>(ropes[r].frequencies.size());
    grow(cos_[r], rows_ * pairs);
    grow(sin_[r], rows_ * pairs);
    each_row(rows_, [&](int64_t row) {
      for (int64_t i = 0; i < pairs; i++) {
        const double angle = static_cast<double>(row_[at_least(row)].position) *
                             static_cast<double>(ropes[r].frequencies[at_least(i)]);
        const auto [sin, cos] = same::sin_cos(angle);
        cos_[r][at_least(row * pairs + i)] = ropes[r].scale * cos;
        sin_[r][at_least(row * pairs + i)] = ropes[r].scale * sin;
      }
    });
  }
}

void Model::forward(const std::vector<Slice>& slices, const int32_t* tokens, const float* hidden,
                    float* out) {
  prepare(slices);
  tokens_ = tokens;
  Lines<float>& between = spec_.streams > 1 ? streams_ : x_;  // shards
  if (hidden == nullptr) {
    embed(tokens);
    if (token_inputs) read_token_inputs(tokens);
    if (streams) begin_streams();
    for (int64_t i = 0; spec_.streams > 1 && i < rows_ * spec_.streams; i++) {
      std::copy_n(x(i / spec_.streams), spec_.hidden, streams_.data() + i * spec_.hidden);
    }
  } else {
    std::memcpy(between.data(), hidden, at_least(rows_ * width()) * sizeof(float));
  }
  std::vector<int> cached;  // of each layer so far: its place in the KV cache
  int caching = 0;
  std::map<int, int> entries;  // of layers so far, by their ratio
  int64_t state = 0;
  for (const Layer& layer : layers) {
    const size_t index = cached.size();
    cached.push_back(layer.kv_from >= 0 ? cached[at_least(layer.kv_from)] : caching);
    caching += (layer.caches() ? 1 : 0) + (layer.index_dim() > 0 ? 1 : 0);
    if (layer.alt_up) predict_streams(*layer.alt_up);
    if (layer.ngrams) add_ngrams(*layer.ngrams, state + layer.mixer_floats(kv_type()));
    if (layer.parallel || layer.mixes_twice())
      before_.assign(x_.begin(), x_.begin() + rows_ * spec_.hidden);
    if (layer.attention_streams) collapse(*layer.attention_streams);
    int& place = entries[layer.entry_ratio()];
    if (layer.compressed) {
      compressed_attention(layer, place, state);
    } else if (layer.latent) {
      latent_attention(layer, cached[index], place, state);
    } else if (layer.q) {
      attention(layer, cached[index], place, state);
    }
    if (layer.delta_net) {
      delta_net(layer, state);
    } else if (layer.short_convolution) {
      short_convolution(layer, state);
    } else if (layer.state_space) {
      state_space(layer, state);
    } else if (layer.selective_scan) {
      selective_scan(layer, state);
    }
    place += static_cast<int>(layer.entries().size());
    state += layer.state_floats(kv_type());
    if (layer.alt_up) add_laurel(*layer.alt_up);
    if (layer.attention_streams) expand();
    if (layer.mlp_streams) collapse(*layer.mlp_streams);
    if (layer.router) {
      experts(layer);
    } else if (layer.up) {
      mlp(layer);
    }
    if (layer.mlp_streams) expand();
    if (layer.alt_up) correct_streams(*layer.alt_up);
    if (layer.token_input) add_token_input(layer, index);
    if (layer.scale != 1.f) {
      each_row(rows_, [&](int64_t i) {
        for (int d = 0; d < spec_.hidden; d++) x(i)[d] *= layer.scale;
      });
    }
    const size_t done = index + 1;
    if (norm_every > 0 && done < layers.size() && done % at_least(norm_every) == 0) {
      each_row(rows_, [&](int64_t i) { norm_row(x(i), final_norm, final_norm_bias, x(i)); });
    }
  }
  if (streams) end_streams();
  for (size_t s = 0; s < state_.size(); s++) {
    states_->advance(slices[s].sequence, slices[s].start + slices[s].length, slices[s].keeps);
  }
  if (head) {
    if (spec_.streams > 1) join_streams();
    logits(slices, out);
  } else {
    std::memcpy(out, between.data(), at_least(rows_ * width()) * sizeof(float));
  }
}

void Model::embed(const int32_t* tokens) {
  for (int64_t i = 0; i < rows_; i++) {
    if (tokens[i] < 0 || tokens[i] >= embedding->rows) {
      throw std::out_of_range("token " + std::to_string(tokens[i]) + " of a vocabulary of " +
                              std::to_string(embedding->rows));
    }
  }
  each_row(rows_, [&](int64_t i) {
    embedding->read_row(tokens[i], x(i));
    if (turned_embedding_) hadamard_->turn_back(x(i), spec_.hidden);
    if (!embedding_norm.empty()) norm_row(x(i), embedding_norm, {}, x(i));
    if (spec_.embedding_scale != 1.f) {
      for (int d = 0; d < spec_.hidden; d++) x(i)[d] *= spec_.embedding_scale;
    }
  });
}

void Model::read_token_inputs(const int32_t* tokens) {
  const KernelTable& k = kernels();
  const TokenInputs& in = *token_inputs;
  const int64_t width = in.embedding->cols, dim = static_cast<int64_t>(in.norm.size());
  norm_rows(x_.data(), {}, {}, groups_of({in.projection.get()}));
  grow(token_inputs_, rows_ * width);
  grow(up_, rows_ * width);
  run_linear({{in.projection.get(), &normed_, 0, rows_, token_inputs_.data(), width}},
             spec_.precise);
  each_row(rows_, [&](int64_t i) {
    float* row = token_inputs_.data() + i * width;
    float* own = up_.data() + i * width;
    // Fewer tokens than there are may bring something; the others what the first does.
    in.embedding->read_row(tokens[i] < in.embedding->rows ? tokens[i] : 0, own);
    for (int64_t d = 0; d < width; d++) row[d] *= in.projection_scale;
    for (int64_t d = 0; d < width; d += dim) {
      k.rms_norm(row + d, in.norm.data(), row + d, dim, spec_.norm_eps);
    }
    k.add_scaled(row, own, in.embedding_scale, width);
    for (int64_t d = 0; d < width; d++) row[d] *= in.scale;
  });
}

void Model::add_token_input(const Layer& layer, size_t index) {
  const KernelTable& k = kernels();
  const TokenInput& in = *layer.token_input;
  const int64_t dim = in.gate->rows, width = token_inputs->embedding->cols;
  norm_rows(x_.data(), {}, {}, groups_of({in.gate.get()}));
  gated_.resize(rows_, dim, groups_of({in.out.get()}));
  run_linear({{in.gate.get(), &normed_, 0, rows_, gated_.row(0), dim}}, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    const float* own = token_inputs_.data() + i * width + static_cast<int64_t>(index) * dim;
    k.gate(spec_.activation, gated_.row(i), own, dim);
    gated_.quantize(i, 1);
  });
  grow(y_, rows_ * spec_.hidden);
  run_linear({{in.out.get(), &gated_, 0, rows_, y_.data(), spec_.hidden}}, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    float* y = y_.data() + i * spec_.hidden;
    if (!layer.alt_up) return add_residual(x(i), y, in.norm);
    k.rms_norm(y, in.norm.data(), y, spec_.hidden, spec_.norm_eps);
    for (int64_t s = 1; s < layer.alt_up->router->rows; s++) {
      k.add_scaled(stream(s, i), y, 1.f, spec_.hidden);
    }
  });
}

void Model::add_residual(float* row, float* y, const std::vector<float>& norm) const {
  const KernelTable& k = kernels();
  if (!norm.empty()) k.rms_norm(y, norm.data(), y, spec_.hidden, spec_.after_norm_eps);
  k.add_scaled(row, y, spec_.residual_scale, spec_.hidden);
}

void Model::project_out(const Matrix& out, const Layer& layer) {
  grow(y_, rows_ * spec_.hidden);
  run_linear({{&out, &attended_, 0, rows_, y_.data(), spec_.hidden}}, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    add_residual(x(i), y_.data() + i * spec_.hidden, layer.after_attention_norm);
  });
}

void Model::norm_row(const float* x, const std::vector<float>& norm, const std::vector<float>& bias,
                     float* out) const {
  const KernelTable& k = kernels();
  if (norm.empty()) {
    std::memcpy(out, x, at_least(spec_.hidden) * sizeof(float));
  } else if (spec_.layer_norm) {
    const float* shift = bias.empty() ? nullptr : bias.data();
    k.layer_norm(x, norm.data(), shift, out, spec_.hidden, spec_.norm_eps);
  } else {
    k.rms_norm(x, norm.data(), out, spec_.hidden, spec_.norm_eps);
  }
}

void Model::norm_inner(const std::vector<float>& norm, float* x) const {
  if (norm.empty()) return;
  kernels().rms_norm(x, norm.data(), x, static_cast<int64_t>(norm.size()), spec_.norm_eps);
}

void Model::norm_rows(const float* x, const std::vector<float>& norm,
                      const std::vector<float>& bias, const std::vector<int>& groups) {
  normed_.resize(rows_, spec_.hidden, groups);
  each_row(rows_, [&](int64_t i) {
    norm_row(x + i * spec_.hidden, norm, bias, normed_.row(i));
    normed_.quantize(i, 1);
  });
}

void Model::norm_for_mixer(const Layer& layer, std::initializer_list<const Matrix*> readers) {
  const bool apart = layer.mixes_twice() || layer.attention_streams;
  const float* from = apart ? before_.data() : x_.data();
  norm_rows(from, layer.attention_norm, layer.attention_norm_bias, groups_of(readers));
}

void Model::norm_for_mlp(const Layer& layer, std::initializer_list<const Matrix*> readers) {
  const float* from = layer.parallel || layer.mlp_streams ? before_.data() : x_.data();
  norm_rows(from, layer.mlp_norm, layer.mlp_norm_bias, groups_of(readers));
}

void Model::activate(float limit, float* row, const float* up, int64_t width) const {
  if (limit <= 0.f) return kernels().gate(spec_.activation, row, up, width);
  for (int64_t d = 0; d < width; d++) {
    const float read = spec_.limits_inputs ? std::min(row[d], limit) : row[d];
    const float gate = read * same::sigmoid(read);
    row[d] =
        (spec_.limits_inputs ? gate : std::min(gate, limit)) * std::clamp(up[d], -limit, limit);
  }
}

void Model::mlp(const Layer& layer) {
  const int64_t width = layer.up->rows;
  norm_for_mlp(layer, {layer.gate.get(), layer.up.get()});
  gated_.resize(rows_, width, groups_of({layer.down.get()}));
  grow(up_, rows_ * width);
  std::vector<LinearJob> jobs = {{layer.up.get(), &normed_, 0, rows_, up_.data(), width}};
  if (layer.gate) {
    jobs.insert(jobs.begin(), {layer.gate.get(), &normed_, 0, rows_, gated_.row(0), width});
  } else {
    jobs.front().out = gated_.row(0);
  }
  run_linear(jobs, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    const float* up = layer.gate ? up_.data() + i * width : nullptr;
    if (layer.sparse) drop_below(gated_.row(i), width, layer.deviations);
    if (layer.xielu) {
      kernels().xielu(gated_.row(i), *layer.xielu, width);
    } else {
      activate(layer.limit, gated_.row(i), up, width);
    }
    norm_inner(layer.mlp_inner_norm, gated_.row(i));
    gated_.quantize(i, 1);
  });
  grow(y_, rows_ * spec_.hidden);
  run_linear({{layer.down.get(), &gated_, 0, rows_, y_.data(), spec_.hidden}}, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    add_residual(x(i), y_.data() + i * spec_.hidden, layer.after_mlp_norm);
  });
}

void Model::final_states(float* out) const {
  each_row(rows_, [&](int64_t row) {
    norm_row(x_.data() + row * spec_.hidden, final_norm, final_norm_bias, out + row * spec_.hidden);
  });
}

void Model::logits(const std::vector<Slice>& slices, float* out) {
  std::vector<int64_t> wanted;
  int64_t row = 0;
  for (const Slice& slice : slices) {
    row += slice.length;
    for (int64_t i = slice.logits; i > 0; i--) wanted.push_back(row - i);
  }
  if (wanted.empty()) return;
  const int64_t count = static_cast<int64_t>(wanted.size()), vocabulary = head->rows;
  normed_.resize(count, spec_.hidden, groups_of({head.get()}));
  for (int64_t i = 0; i < count; i++) {
    norm_row(x(wanted[at_least(i)]), final_norm, final_norm_bias, normed_.row(i));
    // Half of what rounding does to the choice of a token happens here, and a head is bound by
    // memory, not by arithmetic.
    normed_.quantize(i, 1, true);
  }
  run_linear({{head.get(), &normed_, 0, count, out, vocabulary}}, spec_.precise);
  if (spec_.logits_scale != 1.f || spec_.logits_soft_cap > 0.f) {
    for (int64_t i = 0; i < count * vocabulary; i++) {
      out[i] *= spec_.logits_scale;
      const float cap = spec_.logits_soft_cap;
      if (cap > 0.f) out[i] = cap * same::tanh(out[i] / cap);
    }
  }
}

}  // namespace exo

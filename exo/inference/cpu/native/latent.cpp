// A layer's attention where the cache holds a latent for all heads together.
#include <algorithm>
#include <cstring>

#include "model.hpp"
#include "rows.hpp"

namespace exo {

// A cached key is what is turned, then the latent, then zeros up to head_dim; a value the latent.
void Model::latent_attention(const Layer& layer, int place, int pools, int64_t state) {
  const KernelTable& k = kernels();
  const LatentAttention& latent = *layer.latent;
  const int64_t heads = spec_.heads, hd = spec_.head_dim, nope = latent.nope, rank = latent.rank;
  const int64_t turned = latent.turned, own = nope + turned, q_width = heads * own;
  const MatrixPtr& first = latent.q_a ? latent.q_a : latent.q_b;
  const Indexer* indexer = latent.indexer.get();
  norm_for_mixer(layer, {first.get(), latent.kv_a.get(), layer.output_gate.get(),
                         indexer ? indexer->k.get() : nullptr,
                         layer.pools() ? layer.pools()->gate.get() : nullptr});
  grow(in_, rows_ * first->rows);
  grow(up_, rows_ * (rank + turned));
  run_linear({{first.get(), &normed_, 0, rows_, in_.data(), first->rows},
              {latent.kv_a.get(), &normed_, 0, rows_, up_.data(), rank + turned}},
             spec_.precise);
  const float* queries = in_.data();
  if (latent.q_a) {
    const int64_t width = latent.q_a->rows;
    gated_.resize(rows_, width,
                  groups_of({latent.q_b.get(), indexer ? indexer->q.get() : nullptr}));
    each_row(rows_, [&](int64_t i) {
      k.rms_norm(in_.data() + i * width, latent.q_a_norm.data(), gated_.row(i), width,
                 latent.norm_eps);
      gated_.quantize(i, 1);
    });
    grow(z_, rows_ * q_width);
    run_linear({{latent.q_b.get(), &gated_, 0, rows_, z_.data(), q_width}}, spec_.precise);
    queries = z_.data();
    if (layer.pools() != nullptr) {
      index_pools(layer, pools, state);
    } else if (indexer) {
      index(layer, place + 1);
    }
  }

  // Each head's part through a matrix of its own.
  const auto through = [&](const std::vector<MatrixPtr>& matrices, Lines<float>& out) {
    const int64_t width = matrices.front()->rows;
    each_row(rows_ * heads, [&](int64_t i) { by_head_.quantize(i, 1); });
    grow(out, rows_ * heads * width);
    std::vector<LinearJob> jobs;
    for (int64_t h = 0; h < heads; h++) {
      jobs.push_back({matrices[at_least(h)].get(), &by_head_, h * rows_, rows_,
                      out.data() + h * rows_ * width, width});
    }
    run_linear(jobs, spec_.precise);
  };
  const auto copy = [](float* to, const float* from, int64_t count) {
    std::memcpy(to, from, at_least(count) * sizeof(float));
  };
  by_head_.resize(rows_ * heads, nope, groups_of({latent.embed.front().get()}));
  each_row(rows_, [&](int64_t i) {
    for (int64_t h = 0; h < heads; h++) {
      copy(by_head_.row(h * rows_ + i), queries + i * q_width + h * own, nope);
    }
  });
  through(latent.embed, convolved_);

  grow(q_, rows_ * heads * hd);
  grow(k_, rows_ * hd);
  grow(v_, rows_ * rank);
  each_row(rows_, [&](int64_t i) {
    float *q = q_.data() + i * heads * hd, *key = k_.data() + i * hd, *value = v_.data() + i * rank;
    std::fill(q, q + heads * hd, 0.f);
    for (int64_t h = 0; h < heads; h++) {
      copy(q + h * hd, queries + i * q_width + h * own + nope, turned);
      copy(q + h * hd + turned, convolved_.data() + (h * rows_ + i) * rank, rank);
    }
    const float* compressed = up_.data() + i * (rank + turned);
    std::fill(key, key + hd, 0.f);
    copy(key, compressed + rank, turned);
    k.rms_norm(compressed, latent.kv_a_norm.data(), value, rank, latent.norm_eps);
    copy(key + turned, value, rank);
    if (layer.rope >= 0) {
      const size_t r = static_cast<size_t>(layer.rope);
      const int pairs = static_cast<int>(ropes[r].frequencies.size());
      const float *cos = cos_[r].data() + i * pairs, *sin = sin_[r].data() + i * pairs;
      k.rotate(q, spec_.heads, spec_.head_dim, pairs, ropes[r].interleaved, cos, sin);
      k.rotate(key, 1, spec_.head_dim, pairs, ropes[r].interleaved, cos, sin);
    }
    const Row& row = row_[at_least(i)];
    const float scale = query_scale(layer, row.position);
    for (int64_t d = 0; d < heads * hd; d++) q[d] *= scale;
    uint8_t* page = pages_[row.slice][row.position / kPageTokens];
    const int slot = static_cast<int>(row.position % kPageTokens);
    const KVView kv = cache_->view(nullptr, place, 0);
    k.store_key(key, page + kv.key_offset, slot, spec_.head_dim, kv.type);
    k.store_value(value, page + kv.value_offset, slot, latent.rank, kv.type);
  });
  attended_.resize(rows_, heads * rank, {});
  attend(layer, place, latent.all_below());
  if (latent.most > 0) attend_chosen(layer, place, latent.most, latent.pool);

  by_head_.resize(rows_ * heads, rank, groups_of({latent.unembed.front().get()}));
  each_row(rows_, [&](int64_t i) {
    for (int64_t h = 0; h < heads; h++) {
      copy(by_head_.row(h * rows_ + i), attended_.row(i) + h * rank, rank);
    }
  });
  through(latent.unembed, convolved_);
  const int64_t width = latent.value_dim, gates = layer.output_gate ? layer.output_gate->rows : 0;
  if (gates > 0) {
    grow(z_, rows_ * gates);
    run_linear({{layer.output_gate.get(), &normed_, 0, rows_, z_.data(), gates}}, spec_.precise);
  }
  attended_.resize(rows_, heads * width, groups_of({layer.o.get()}));
  each_row(rows_, [&](int64_t i) {
    for (int64_t h = 0; h < heads; h++) {
      copy(attended_.row(i) + h * width, convolved_.data() + (h * rows_ + i) * width, width);
    }
    if (gates > 0) gate_output(layer, z_.data() + i * gates, heads * width, i);
    attended_.quantize(i, 1);
  });
  project_out(*layer.o, layer);
}

}  // namespace exo

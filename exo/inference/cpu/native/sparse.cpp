// Attention to the keys that an indexer chose (DeepSeek V3.2, arXiv:2512.02556, 2.1).
//
// Chosen keys and values are copied, in the order of their positions, to pages of their own, and
// attended to as if these were a whole context: what a token computes depends on it alone, decoded
// or prefilled. Tokens that see no more keys than are chosen attend to all of them, which is the
// same.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "model.hpp"
#include "rows.hpp"

namespace exo {

namespace {

constexpr int64_t kChoosingTogether = 16;  // tokens whose scores are in memory at once
constexpr int kHeadsPerTask = 16;

template <typename T>
void copy_interleaved(const uint8_t* from, int64_t slot, uint8_t* to, int64_t place, int64_t dim) {
  const auto start = [dim](int64_t key) {
    return key / kKeyBlock * kKeyBlock * dim + key % kKeyBlock;
  };
  const T* source = reinterpret_cast<const T*>(from) + start(slot);
  T* target = reinterpret_cast<T*>(to) + start(place);
  for (int64_t d = 0; d < dim; d++) target[d * kKeyBlock] = source[d * kKeyBlock];
}

// Token `slot` of a page becomes token `place` of another one.
void copy_token(const KVView& from, const uint8_t* page, int64_t slot, const KVView& to,
                uint8_t* other, int64_t place) {
  const uint8_t *keys = page + from.key_offset, *values = page + from.value_offset;
  uint8_t *own_keys = other + to.key_offset, *own_values = other + to.value_offset;
  const int64_t dim = from.head_dim, width = from.value_dim * size_of(from.type);
  if (from.type == KVType::kFloat32) copy_interleaved<float>(keys, slot, own_keys, place, dim);
  if (from.type == KVType::kFloat16) copy_interleaved<uint16_t>(keys, slot, own_keys, place, dim);
  if (from.type == KVType::kInt8) {
    copy_interleaved<uint8_t>(keys, slot, own_keys, place, dim);
    copy_interleaved<float>(keys + kPageTokens * dim, slot, own_keys + kPageTokens * dim, place,
                            kv_groups(dim));
    const int64_t scales = kv_groups(from.value_dim) * int64_t{sizeof(float)};
    std::memcpy(own_values + kPageTokens * width + place * scales,
                values + kPageTokens * width + slot * scales, at_least(scales));
  }
  std::memcpy(own_values + place * width, values + slot * width, at_least(width));
}

}  // namespace

void choose_best(const float* scores, int64_t count, int64_t most, int32_t* chosen) {
  thread_local std::vector<int32_t> order;
  order.resize(at_least(count));
  std::iota(order.begin(), order.end(), 0);
  const auto better = [scores](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  };
  std::nth_element(order.begin(), order.begin() + most - 1, order.end(), better);
  std::sort(order.begin(), order.begin() + most);
  std::copy_n(order.begin(), most, chosen);
}

void Model::ask_indexer(const Indexer& indexer) {
  const int64_t heads = indexer.heads, width = heads * indexer.dim;
  grow(index_q_, rows_ * width);
  grow(index_weights_, rows_ * heads);
  float* weights = index_weights_.data();
  run_linear({{indexer.q.get(), &gated_, 0, rows_, index_q_.data(), width}}, spec_.precise);
  run_linear({{indexer.weights.get(), &normed_, 0, rows_, weights, heads}}, true);
  const float scale = 1.f / std::sqrt(static_cast<float>(width));
  for (int64_t i = 0; i < rows_ * heads; i++) weights[i] *= scale;
}

void Model::index(const Layer& layer, int index) {
  const KernelTable& k = kernels();
  const Indexer& indexer = *layer.latent->indexer;
  const int64_t most = layer.latent->most, dim = indexer.dim, width = indexer.heads * dim;
  const bool chooses = !choosing_rows(most, 1).empty();
  grow(k_, rows_ * dim);
  run_linear({{indexer.k.get(), &normed_, 0, rows_, k_.data(), dim}}, spec_.precise);
  if (chooses) ask_indexer(indexer);
  const size_t r = static_cast<size_t>(layer.rope);
  const int pairs = static_cast<int>(ropes[r].frequencies.size());
  const int64_t turned = indexer.turns_last ? dim - 2 * pairs : 0;
  each_row(rows_, [&](int64_t i) {
    float* key = k_.data() + i * dim;
    k.layer_norm(key, indexer.k_norm.data(), indexer.k_norm_bias.data(), key, dim,
                 indexer.norm_eps);
    const float *cos = cos_[r].data() + i * pairs, *sin = sin_[r].data() + i * pairs;
    k.rotate(key + turned, 1, indexer.dim, pairs, indexer.interleaved, cos, sin);
    if (chooses) {
      k.rotate(index_q_.data() + i * width + turned, indexer.heads, indexer.dim, pairs,
               indexer.interleaved, cos, sin);
    }
    const Row& row = row_[at_least(i)];
    const KVView kv = cache_->view(nullptr, index, 0);
    k.store_key(key, pages_[row.slice][row.position / kPageTokens] + kv.key_offset,
                static_cast<int>(row.position % kPageTokens), indexer.dim, kv.type);
  });
  if (!chooses) return;
  std::vector<KVView> keys;
  for (uint8_t* const* pages : pages_) keys.push_back(cache_->view(pages, index, 0));
  choose_keys(indexer.heads, dim, most, 1, most, keys);
}

// GLM 5.3's: one key for `pool` tokens, of which a query sees those that are whole.
void Model::index_pools(const Layer& layer, int place, int64_t state) {
  const KernelTable& k = kernels();
  const LatentAttention& latent = *layer.latent;
  const Indexer& indexer = *latent.indexer;
  const int64_t dim = indexer.dim, pools = latent.most / latent.pool;
  const bool chooses = !choosing_rows(pools, latent.pool).empty();
  grow(k_, rows_ * dim);
  grow(v_, rows_ * dim);
  run_linear({{indexer.k.get(), &normed_, 0, rows_, k_.data(), dim},
              {indexer.pools->gate.get(), &normed_, 0, rows_, v_.data(), dim}},
             spec_.precise);
  each_row(rows_, [&](int64_t i) {
    float* key = k_.data() + i * dim;
    k.layer_norm(key, indexer.k_norm.data(), indexer.k_norm_bias.data(), key, dim,
                 indexer.norm_eps);
  });
  Entries& entries = entries_of(latent.pool);
  compress(*indexer.pools, {}, k_.data(), v_.data(), state, entries, place, false);
  if (!chooses) return;
  ask_indexer(indexer);
  choose_keys(indexer.heads, indexer.dim, pools, latent.pool, latent.all_below(),
              entries.views(place));
  expand_pools(latent.most, latent.pool);
}

// Qwen3.8 Flash Next's: a pool's key is the mean of its tokens'.
void Model::index_means(const Layer& layer, int place, int64_t state) {
  const KernelTable& k = kernels();
  const PoolIndexer& indexer = *layer.pooled;
  const int64_t dim = indexer.dim, width = indexer.heads * dim, pool = indexer.pools->ratio;
  const int64_t pools = indexer.most / pool;
  const bool chooses = !choosing_rows(pools, static_cast<int>(pool)).empty();
  grow(k_, rows_ * dim);
  std::vector<LinearJob> jobs = {{indexer.pools->kv.get(), &normed_, 0, rows_, k_.data(), dim}};
  if (chooses) {
    grow(index_q_, rows_ * width);
    jobs.push_back({indexer.q.get(), &normed_, 0, rows_, index_q_.data(), width});
  }
  run_linear(jobs, spec_.precise);
  const Rope& rope = ropes[at_least(layer.rope)];
  Entries& entries = entries_of(static_cast<int>(pool));
  compress(*indexer.pools, rope, k_.data(), nullptr, state, entries, place, false);
  if (!chooses) return;
  const int pairs = static_cast<int>(rope.frequencies.size());
  each_row(rows_, [&](int64_t i) {
    float* q = index_q_.data() + i * width;
    for (int64_t h = 0; h < width; h += dim) {
      k.rms_norm(q + h, indexer.q_norm.data(), q + h, dim, spec_.norm_eps);
    }
    k.rotate(q, indexer.heads, indexer.dim, pairs, rope.interleaved,
             cos_[at_least(layer.rope)].data() + i * pairs,
             sin_[at_least(layer.rope)].data() + i * pairs);
  });
  index_weights_.assign(at_least(rows_ * indexer.heads), 1.f);
  choose_keys(indexer.heads, indexer.dim, pools, static_cast<int>(pool), indexer.all_below(),
              entries.views(place));
  expand_pools(indexer.most, pool);
}

// What was chosen are numbers of pools; these become the positions of their tokens, and those after
// the last whole pool follow.
void Model::expand_pools(int64_t most, int64_t pool) {
  const int64_t pools = most / pool;
  for (const int64_t row : choosing_rows(pools, static_cast<int>(pool))) {
    int32_t* chosen = chosen_.data() + row * (most + pool - 1);
    for (int64_t p = pools - 1; p >= 0; p--) {
      const int32_t first = chosen[p] * static_cast<int32_t>(pool);
      for (int64_t i = pool - 1; i >= 0; i--)
        chosen[p * pool + i] = first + static_cast<int32_t>(i);
    }
    const int64_t position = row_[at_least(row)].position, tail = (position + 1) % pool;
    for (int64_t i = 0; i < tail; i++) {
      chosen[most + i] = static_cast<int32_t>(position + 1 - tail + i);
    }
  }
}

std::vector<int64_t> Model::choosing_rows(int64_t most, int every) const {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < rows_; i++) {
    if ((row_[at_least(i)].position + 1) / every > most) found.push_back(i);
  }
  return found;
}

void Model::choose_keys(int heads, int64_t dim, int64_t most, int every, int64_t stride,
                        const std::vector<KVView>& keys_of_slices) {
  const KernelTable& k = kernels();
  const std::vector<int64_t> choosing = choosing_rows(most, every);
  const auto seen_by = [&](int64_t row) { return (row_[at_least(row)].position + 1) / every; };
  const auto chunks_of = [&](int64_t row) {
    return (seen_by(row) + kChunkTokens - 1) / kChunkTokens;
  };
  chosen_.resize(at_least(rows_ * stride));
  struct Task {
    int64_t row, chunk;
    float* out;
  };
  std::vector<Task> tasks;
  for (size_t first = 0; first < choosing.size(); first += kChoosingTogether) {
    const size_t last = std::min(choosing.size(), first + kChoosingTogether);
    int64_t longest = 0;
    for (size_t c = first; c < last; c++) longest = std::max(longest, chunks_of(choosing[c]));
    grow(index_scores_, kChoosingTogether * longest * kChunkTokens);
    tasks.clear();
    for (size_t c = first; c < last; c++) {
      float* scores =
          index_scores_.data() + static_cast<int64_t>(c - first) * longest * kChunkTokens;
      for (int64_t chunk = 0; chunk < chunks_of(choosing[c]); chunk++) {
        tasks.push_back({choosing[c], chunk, scores + chunk * kChunkTokens});
      }
    }
    thread_pool().run(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const Task& task = tasks[at_least(t)];
      std::vector<const float*> queries(at_least(heads));
      for (int h = 0; h < heads; h++) {
        queries[at_least(h)] = index_q_.data() + (task.row * heads + h) * dim;
      }
      const int64_t keys =
          std::min<int64_t>(kChunkTokens, seen_by(task.row) - task.chunk * kChunkTokens);
      k.score_chunk(keys_of_slices[row_[at_least(task.row)].slice], task.chunk, queries.data(),
                    index_weights_.data() + task.row * heads, heads, static_cast<int>(keys),
                    task.out);
    });
    thread_pool().run(static_cast<int64_t>(last - first), [&](int64_t c) {
      const int64_t row = choosing[first + at_least(c)];
      const float* scores = index_scores_.data() + c * longest * kChunkTokens;
      choose_best(scores, seen_by(row), most, chosen_.data() + row * stride);
    });
  }
}

KVView Model::copy_chosen(const KVView& from, const int32_t* chosen, int64_t count) {
  const int64_t half = KVView::half_bytes(from.type, from.head_dim);
  const int64_t page_bytes = half + KVView::half_bytes(from.type, from.value_dim);
  const int64_t pages = (count + kPageTokens - 1) / kPageTokens;
  // Zeros where there is no key: a weight of 0 hides numbers that are finite.
  chosen_pages_.resize(at_least(pages * page_bytes));
  chosen_places_.clear();
  for (int64_t p = 0; p < pages; p++) {
    chosen_places_.push_back(chosen_pages_.data() + p * page_bytes);
  }
  const KVView own{chosen_places_.data(), 0, half, from.type, from.head_dim, from.value_dim};
  thread_pool().run(pages, [&](int64_t p) {
    const int64_t end = std::min<int64_t>(count, (p + 1) * kPageTokens);
    for (int64_t i = p * kPageTokens; i < end; i++) {
      copy_token(from, from.pages[chosen[i] / kPageTokens], chosen[i] % kPageTokens, own,
                 chosen_places_[at_least(p)], i % kPageTokens);
    }
  });
  return own;
}

void Model::attend_chosen(const Layer& layer, int index, int64_t most, int64_t pool) {
  const AttentionRule rule{spec_.attention_soft_cap, 0, false};
  const int64_t heads = layer.heads > 0 ? layer.heads : spec_.heads;
  const int kv_heads = shape_of(layer).heads;
  const int64_t each = heads / kv_heads;
  for (const int64_t row : choosing_rows(most / pool, static_cast<int>(pool))) {
    const Row& at = row_[at_least(row)];
    const int64_t count = most + (at.position + 1) % pool;
    for (int h = 0; h < kv_heads; h++) {
      const KVView from = cache_->view(pages_[at.slice], index, h);
      const KVView chosen = copy_chosen(from, chosen_.data() + row * (most + pool - 1), count);
      attend_rows(heads, {{row, h * each, each, {{chosen, rule, count - 1}}}}, layer.sinks);
    }
  }
}

// Tasks are (chunk of keys, some heads), merged in order.
void Model::attend_rows(int64_t heads, const std::vector<SeeingHeads>& each,
                        const std::vector<float>& sinks) {
  const KernelTable& k = kernels();
  const Seen& first = each.front().seen.front();
  const int64_t hd = first.kv.head_dim, vd = first.kv.value_dim;
  struct Task {
    const Seen* seen;
    int64_t chunk, row, head;
    int heads;
    int64_t place;  // of its partial results
  };
  struct Merging {
    int64_t row, head, heads;
    int64_t place, count;  // partial results of all these heads, so many times
  };
  thread_local std::vector<Task> tasks;
  thread_local std::vector<Merging> merging;
  tasks.clear(), merging.clear();
  int64_t place = 0;
  for (const SeeingHeads& some : each) {
    const int64_t end = some.head + some.heads;
    for (int64_t head = some.head; head < end; head += kHeadsPerTask) {
      const int64_t own = std::min<int64_t>(kHeadsPerTask, end - head);
      merging.push_back({some.row, head, own, place, 0});
      for (const Seen& one : some.seen) {
        const int64_t oldest = std::max<int64_t>(0, one.rule.first_seen(one.position));
        for (int64_t c = oldest / kChunkTokens; c <= one.position / kChunkTokens; c++) {
          tasks.push_back({&one, c, some.row, head, static_cast<int>(own), place});
          merging.back().count++;
          place += own;
        }
      }
    }
  }
  grow(partial_out_, place * vd);
  if (partials_.size() < at_least(place)) partials_.resize(at_least(place));
  const Task* all = tasks.data();
  thread_pool().run(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    const Task& task = all[t];
    const float* queries[kHeadsPerTask];
    int64_t positions[kHeadsPerTask];
    for (int h = 0; h < task.heads; h++) {
      queries[h] = q_.data() + (task.row * heads + task.head + h) * hd;
      positions[h] = task.seen->position;
    }
    k.attend_chunk(task.seen->kv, task.seen->rule, task.chunk, queries, positions, task.heads,
                   partial_out_.data() + task.place * vd, partials_.data() + task.place);
  });
  const Merging* parts = merging.data();
  thread_pool().run(static_cast<int64_t>(merging.size()), [&](int64_t part) {
    const Merging& own = parts[part];
    for (int64_t h = 0; h < own.heads; h++) {
      float* out = attended_.row(own.row) + (own.head + h) * vd;
      Partial merged{0.f, 0.f};
      for (int64_t c = 0; c < own.count; c++) {
        const int64_t from = own.place + c * own.heads + h;
        k.merge(out, merged, partial_out_.data() + from * vd, partials_[at_least(from)],
                static_cast<int>(vd));
      }
      if (!sinks.empty()) {
        k.merge(out, merged, nullptr, {sinks[at_least(own.head + h)], 1.f}, static_cast<int>(vd));
      }
      k.normalize(out, merged, static_cast<int>(vd));
    }
  });
}

}  // namespace exo

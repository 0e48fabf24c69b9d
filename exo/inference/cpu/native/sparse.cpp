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

void Model::index(const Layer& layer, int index) {
  const KernelTable& k = kernels();
  const Indexer& indexer = *layer.latent->indexer;
  const int64_t dim = indexer.dim, width = indexer.heads * dim;
  const bool chooses = !choosing_rows(layer.latent->most).empty();
  grow(k_, rows_ * dim);
  std::vector<LinearJob> jobs = {{indexer.k.get(), &normed_, 0, rows_, k_.data(), dim}};
  if (chooses) {
    grow(index_q_, rows_ * width);
    grow(index_weights_, rows_ * indexer.heads);
    jobs.push_back({indexer.q.get(), &gated_, 0, rows_, index_q_.data(), width});
  }
  run_linear(jobs, spec_.precise);
  if (chooses) {
    float* weights = index_weights_.data();
    run_linear({{indexer.weights.get(), &normed_, 0, rows_, weights, indexer.heads}}, true);
  }
  const size_t r = static_cast<size_t>(layer.rope);
  const int pairs = static_cast<int>(ropes[r].frequencies.size());
  const float scale = 1.f / std::sqrt(static_cast<float>(width));
  each_row(rows_, [&](int64_t i) {
    float* key = k_.data() + i * dim;
    k.layer_norm(key, indexer.k_norm.data(), indexer.k_norm_bias.data(), key, dim,
                 indexer.norm_eps);
    const float *cos = cos_[r].data() + i * pairs, *sin = sin_[r].data() + i * pairs;
    k.rotate(key, 1, indexer.dim, pairs, indexer.interleaved, cos, sin);
    if (chooses) {
      float* weights = index_weights_.data() + i * indexer.heads;
      for (int h = 0; h < indexer.heads; h++) weights[h] *= scale;
      k.rotate(index_q_.data() + i * width, indexer.heads, indexer.dim, pairs, indexer.interleaved,
               cos, sin);
    }
    const Row& row = row_[at_least(i)];
    const KVView kv = cache_->view(nullptr, index, 0);
    k.store_key(key, pages_[row.slice][row.position / kPageTokens] + kv.key_offset,
                static_cast<int>(row.position % kPageTokens), indexer.dim, kv.type);
  });
  if (chooses) choose_keys(*layer.latent, index);
}

std::vector<int64_t> Model::choosing_rows(int64_t most) const {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < rows_; i++) {
    if (row_[at_least(i)].position >= most) found.push_back(i);
  }
  return found;
}

void Model::choose_keys(const LatentAttention& latent, int index) {
  const KernelTable& k = kernels();
  const Indexer& indexer = *latent.indexer;
  const int64_t most = latent.most, dim = indexer.dim;
  const std::vector<int64_t> choosing = choosing_rows(most);
  chosen_.resize(at_least(rows_ * most));
  struct Task {
    int64_t row, chunk;
    float* out;
  };
  std::vector<Task> tasks;
  for (size_t first = 0; first < choosing.size(); first += kChoosingTogether) {
    const size_t last = std::min(choosing.size(), first + kChoosingTogether);
    int64_t longest = 0;
    for (size_t c = first; c < last; c++) {
      longest = std::max(longest, row_[at_least(choosing[c])].position / kChunkTokens + 1);
    }
    grow(index_scores_, kChoosingTogether * longest * kChunkTokens);
    tasks.clear();
    for (size_t c = first; c < last; c++) {
      float* scores =
          index_scores_.data() + static_cast<int64_t>(c - first) * longest * kChunkTokens;
      const int64_t chunks = row_[at_least(choosing[c])].position / kChunkTokens + 1;
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        tasks.push_back({choosing[c], chunk, scores + chunk * kChunkTokens});
      }
    }
    thread_pool().run(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const Task& task = tasks[at_least(t)];
      const Row& row = row_[at_least(task.row)];
      std::vector<const float*> queries(at_least(indexer.heads));
      for (int h = 0; h < indexer.heads; h++) {
        queries[at_least(h)] = index_q_.data() + (task.row * indexer.heads + h) * dim;
      }
      const int64_t keys =
          std::min<int64_t>(kChunkTokens, row.position + 1 - task.chunk * kChunkTokens);
      k.score_chunk(cache_->view(pages_[row.slice], index, 0), task.chunk, queries.data(),
                    index_weights_.data() + task.row * indexer.heads, indexer.heads,
                    static_cast<int>(keys), task.out);
    });
    thread_pool().run(static_cast<int64_t>(last - first), [&](int64_t c) {
      const int64_t row = choosing[first + at_least(c)];
      const float* scores = index_scores_.data() + c * longest * kChunkTokens;
      thread_local std::vector<int32_t> order;
      order.resize(at_least(row_[at_least(row)].position + 1));
      std::iota(order.begin(), order.end(), 0);
      const auto better = [scores](int32_t a, int32_t b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
      };
      std::nth_element(order.begin(), order.begin() + most - 1, order.end(), better);
      std::sort(order.begin(), order.begin() + most);
      std::copy_n(order.begin(), most, chosen_.begin() + row * most);
    });
  }
}

void Model::attend_chosen(const Layer& layer, int index) {
  const KernelTable& k = kernels();
  const int64_t most = layer.latent->most, heads = spec_.heads, hd = spec_.head_dim;
  const std::vector<int64_t> choosing = choosing_rows(most);
  if (choosing.empty()) return;
  const KVView shape = cache_->view(nullptr, index, 0);
  const int64_t half = KVView::half_bytes(shape.type, shape.head_dim);
  const int64_t page_bytes = half + KVView::half_bytes(shape.type, shape.value_dim);
  const int64_t pages = (most + kPageTokens - 1) / kPageTokens;
  const int64_t chunks = (most + kChunkTokens - 1) / kChunkTokens, vd = shape.value_dim;
  // Zeros where there is no key: a weight of 0 hides numbers that are finite.
  chosen_pages_.resize(at_least(pages * page_bytes));
  std::vector<uint8_t*> places;
  for (int64_t p = 0; p < pages; p++) places.push_back(chosen_pages_.data() + p * page_bytes);
  const KVView own{places.data(), 0, half, shape.type, shape.head_dim, shape.value_dim};
  const AttentionRule rule{spec_.attention_soft_cap, 0, false};
  grow(partial_out_, chunks * heads * vd);
  if (partials_.size() < at_least(chunks * heads)) partials_.resize(at_least(chunks * heads));
  const int64_t parts = (heads + kHeadsPerTask - 1) / kHeadsPerTask;
  for (const int64_t row : choosing) {
    const KVView from = cache_->view(pages_[row_[at_least(row)].slice], index, 0);
    const int32_t* chosen = chosen_.data() + row * most;
    thread_pool().run(pages, [&](int64_t p) {
      const int64_t end = std::min<int64_t>(most, (p + 1) * kPageTokens);
      for (int64_t i = p * kPageTokens; i < end; i++) {
        copy_token(from, from.pages[chosen[i] / kPageTokens], chosen[i] % kPageTokens, own,
                   places[at_least(p)], i % kPageTokens);
      }
    });
    thread_pool().run(chunks * parts, [&](int64_t task) {
      const int64_t chunk = task / parts, head = task % parts * kHeadsPerTask;
      const int count = static_cast<int>(std::min<int64_t>(kHeadsPerTask, heads - head));
      const float* queries[kHeadsPerTask];
      int64_t positions[kHeadsPerTask];
      for (int h = 0; h < count; h++) {
        queries[h] = q_.data() + (row * heads + head + h) * hd;
        positions[h] = most - 1;
      }
      const int64_t place = chunk * heads + head;
      k.attend_chunk(own, rule, chunk, queries, positions, count, partial_out_.data() + place * vd,
                     partials_.data() + place);
    });
    thread_pool().run(parts, [&](int64_t part) {
      const int64_t end = std::min(heads, (part + 1) * kHeadsPerTask);
      for (int64_t head = part * kHeadsPerTask; head < end; head++) {
        float* out = attended_.row(row) + head * vd;
        Partial merged{0.f, 0.f};
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
          const int64_t place = chunk * heads + head;
          k.merge(out, merged, partial_out_.data() + place * vd, partials_[at_least(place)],
                  shape.value_dim);
        }
        k.normalize(out, merged, shape.value_dim);
      }
    });
  }
}

}  // namespace exo

#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "thread_pool.hpp"

namespace exo {

namespace {

constexpr int64_t kQueryTile = 16;  // tokens of one sequence whose attention is one task

// A row at a time costs less than waking a thread until there are some.
constexpr int64_t kRowsToShare = 8;

template <typename Work>
void each_row(int64_t rows, const Work& work) {
  if (rows < kRowsToShare) {
    for (int64_t i = 0; i < rows; i++) work(i);
    return;
  }
  const int64_t share = std::max<int64_t>(1, rows / (thread_pool().threads() * 4));
  thread_pool().run((rows + share - 1) / share, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * share);
    for (int64_t i = task * share; i < end; i++) work(i);
  });
}

size_t at_least(int64_t count) { return static_cast<size_t>(count); }

// Vectors only grow: a step's buffers are those of the largest step so far.
void grow(std::vector<float>& v, int64_t count) {
  if (v.size() < at_least(count)) v.resize(at_least(count));
}

}  // namespace

void Model::release(const std::string& sequence) {
  if (cache_) cache_->release(sequence);
}

void Model::take_over(const std::string& sequence, const std::string& source, int64_t tokens) {
  if (!cache_) throw CacheMissError(source, tokens, 0);
  cache_->take_over(sequence, source, tokens);
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
  if (!cache_) cache_ = std::make_unique<KVCache>(cache_shape());
  slices_ = &slices;
  row_.clear();
  pages_.clear();
  for (size_t s = 0; s < slices.size(); s++) {
    cache_->extend(slices[s].sequence, slices[s].start, slices[s].length);
    for (int64_t i = 0; i < slices[s].length; i++) row_.push_back({slices[s].start + i, s});
  }
  for (const Slice& slice : slices) pages_.push_back(cache_->pages(slice.sequence));
  rows_ = static_cast<int64_t>(row_.size());
  grow(x_, rows_ * spec_.hidden);
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
        cos_[r][at_least(row * pairs + i)] = ropes[r].scale * static_cast<float>(std::cos(angle));
        sin_[r][at_least(row * pairs + i)] = ropes[r].scale * static_cast<float>(std::sin(angle));
      }
    });
  }
}

void Model::forward(const std::vector<Slice>& slices, const int32_t* tokens, const float* hidden,
                    float* out) {
  prepare(slices);
  if (tokens != nullptr) {
    embed(tokens);
  } else {
    std::memcpy(x_.data(), hidden, at_least(rows_ * spec_.hidden) * sizeof(float));
  }
  for (size_t i = 0; i < layers.size(); i++) {
    attention(layers[i], static_cast<int>(i));
    layers[i].router ? experts(layers[i]) : mlp(layers[i]);
  }
  if (head) {
    logits(slices, out);
  } else {
    std::memcpy(out, x_.data(), at_least(rows_ * spec_.hidden) * sizeof(float));
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
    if (spec_.embedding_scale != 1.f) {
      for (int d = 0; d < spec_.hidden; d++) x(i)[d] *= spec_.embedding_scale;
    }
  });
}

void Model::add_residual(float* row, float* y, const std::vector<float>& norm) const {
  const KernelTable& k = kernels();
  if (!norm.empty()) k.rms_norm(y, norm.data(), y, spec_.hidden, spec_.norm_eps);
  k.add_scaled(row, y, spec_.residual_scale, spec_.hidden);
}

void Model::norm_rows(const std::vector<float>& norm, const std::vector<int>& groups) {
  const KernelTable& k = kernels();
  normed_.resize(rows_, spec_.hidden, groups);
  each_row(rows_, [&](int64_t i) {
    if (norm.empty()) {
      std::memcpy(normed_.row(i), x(i), at_least(spec_.hidden) * sizeof(float));
    } else {
      k.rms_norm(x(i), norm.data(), normed_.row(i), spec_.hidden, spec_.norm_eps);
    }
    normed_.quantize(i, 1);
  });
}

void Model::attention(const Layer& layer, int index) {
  const KernelTable& k = kernels();
  const int64_t hd = spec_.head_dim, q_width = spec_.heads * hd, kv_width = spec_.kv_heads * hd;
  norm_rows(layer.attention_norm, groups_of({layer.q.get(), layer.k.get(), layer.v.get()}));
  grow(q_, rows_ * q_width);
  grow(k_, rows_ * kv_width);
  grow(v_, rows_ * kv_width);
  run_linear({{layer.q.get(), &normed_, 0, rows_, q_.data(), q_width},
              {layer.k.get(), &normed_, 0, rows_, k_.data(), kv_width},
              {layer.v.get(), &normed_, 0, rows_, v_.data(), kv_width}},
             spec_.precise);
  each_row(rows_, [&](int64_t i) {
    float* q = q_.data() + i * q_width;
    float* key = k_.data() + i * kv_width;
    const auto norm_heads = [&](float* row, int heads, const std::vector<float>& weight) {
      if (weight.empty()) return;
      if (static_cast<int64_t>(weight.size()) == hd) {
        for (int h = 0; h < heads; h++) {
          k.rms_norm(row + h * hd, weight.data(), row + h * hd, hd, spec_.norm_eps);
        }
      } else {
        k.rms_norm(row, weight.data(), row, heads * hd, spec_.norm_eps);
      }
    };
    norm_heads(q, spec_.heads, layer.q_norm);
    norm_heads(key, spec_.kv_heads, layer.k_norm);
    if (layer.rope >= 0) {
      const size_t r = static_cast<size_t>(layer.rope);
      const int pairs = static_cast<int>(ropes[r].frequencies.size());
      const float* cos = cos_[r].data() + i * pairs;
      const float* sin = sin_[r].data() + i * pairs;
      k.rotate(q, spec_.heads, spec_.head_dim, pairs, ropes[r].interleaved, cos, sin);
      k.rotate(key, spec_.kv_heads, spec_.head_dim, pairs, ropes[r].interleaved, cos, sin);
    }
    for (int64_t d = 0; d < q_width; d++) q[d] *= spec_.attention_scale;
    const Row& row = row_[at_least(i)];
    uint8_t* page = pages_[row.slice][row.position / kPageTokens];
    const int slot = static_cast<int>(row.position % kPageTokens);
    for (int h = 0; h < spec_.kv_heads; h++) {
      const KVView kv = cache_->view(nullptr, index, h);
      k.store_key(key + h * hd, page + kv.key_offset, slot, spec_.head_dim, kv.dtype);
      k.store_value(v_.data() + i * kv_width + h * hd, page + kv.value_offset, slot, spec_.head_dim,
                    kv.dtype);
    }
  });
  attended_.resize(rows_, q_width, groups_of({layer.o.get()}));
  attend(layer, index);
  each_row(rows_, [&](int64_t i) { attended_.quantize(i, 1); });
  grow(y_, rows_ * spec_.hidden);
  run_linear({{layer.o.get(), &attended_, 0, rows_, y_.data(), spec_.hidden}}, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    add_residual(x(i), y_.data() + i * spec_.hidden, layer.after_attention_norm);
  });
}

// Tasks are (tile of a slice's tokens, KV head); where that is a single tile, whose work would be
// too little shared, (chunk of keys, KV head), merged afterwards in the same order.
void Model::attend(const Layer& layer, int index) {
  const KernelTable& kernel = kernels();
  const int64_t hd = spec_.head_dim, q_width = spec_.heads * hd;
  const int per_kv = spec_.heads / spec_.kv_heads;
  const AttentionRule rule{spec_.attention_soft_cap, layer.window};
  struct Task {
    int64_t row, count;  // rows of the batch
    int64_t begin, end;  // chunks of keys
    int64_t partial;     // where a single tile's partial results go, or -1
    int head;            // KV head
  };
  thread_local std::vector<Task> tasks;
  tasks.clear();
  int64_t row = 0, partial = 0;
  for (const Slice& slice : *slices_) {
    for (int64_t i = 0; i < slice.length; i += kQueryTile) {
      const int64_t count = std::min(kQueryTile, slice.length - i);
      const int64_t seen = slice.start + i + count;
      const int64_t oldest =
          layer.window > 0 ? std::max<int64_t>(0, slice.start + i + 1 - layer.window) : 0;
      const int64_t begin = oldest / kChunkTokens, end = (seen + kChunkTokens - 1) / kChunkTokens;
      for (int h = 0; h < spec_.kv_heads; h++) {
        if (slice.length > kQueryTile || end - begin == 1) {
          tasks.push_back({row + i, count, begin, end, -1, h});
          continue;
        }
        for (int64_t c = begin; c < end; c++) {
          tasks.push_back({row + i, count, c, c + 1, partial, h});
          partial += count * per_kv;
        }
      }
    }
    row += slice.length;
  }
  grow(partial_out_, partial * hd);
  if (partials_.size() < at_least(partial)) partials_.resize(at_least(partial));
  const auto run = [&](const Task& task) {
    constexpr int kMaxRows = 256;
    const float* queries[kMaxRows];
    int64_t positions[kMaxRows];
    Partial merged[kMaxRows], found[kMaxRows];
    const KVView kv = cache_->view(pages_[row_[at_least(task.row)].slice], index, task.head);
    const int at_once = std::max(1, kMaxRows / per_kv);
    thread_local std::vector<float> sums, other;
    for (int64_t t0 = 0; t0 < task.count; t0 += at_once) {
      const int64_t tokens = std::min<int64_t>(at_once, task.count - t0);
      const int rows = static_cast<int>(tokens) * per_kv;
      for (int r = 0; r < rows; r++) {
        const int64_t token = task.row + t0 + r / per_kv;
        queries[r] = q_.data() + token * q_width + (task.head * per_kv + r % per_kv) * hd;
        positions[r] = row_[at_least(token)].position;
      }
      if (task.partial >= 0) {
        const int64_t place = task.partial + t0 * per_kv;
        kernel.attend_chunk(kv, rule, task.begin, queries, positions, rows,
                            partial_out_.data() + place * hd, partials_.data() + place);
        continue;
      }
      grow(sums, rows * hd);
      grow(other, rows * hd);
      for (int r = 0; r < rows; r++) merged[r] = {0.f, 0.f};
      for (int64_t c = task.begin; c < task.end; c++) {
        kernel.attend_chunk(kv, rule, c, queries, positions, rows, other.data(), found);
        for (int r = 0; r < rows; r++) {
          kernel.merge(sums.data() + r * hd, merged[r], other.data() + r * hd, found[r],
                       spec_.head_dim);
        }
      }
      for (int r = 0; r < rows; r++) {
        const int head = task.head * per_kv + r % per_kv;
        float* out = attended_.row(task.row + t0 + r / per_kv) + head * hd;
        if (!layer.sinks.empty()) {
          kernel.merge(sums.data() + r * hd, merged[r], nullptr, {layer.sinks[at_least(head)], 1.f},
                       spec_.head_dim);
        }
        kernel.normalize(sums.data() + r * hd, merged[r], spec_.head_dim);
        std::memcpy(out, sums.data() + r * hd, at_least(hd) * sizeof(float));
      }
    }
  };
  const Task* first = tasks.data();
  int64_t work = 0;
  for (const Task& task : tasks) work += task.count * (task.end - task.begin);
  if (work * per_kv * hd < 2000) {
    for (const Task& task : tasks) run(task);
  } else {
    thread_pool().run(static_cast<int64_t>(tasks.size()), [&](int64_t i) { run(first[i]); });
  }
  // What was split by chunks: merge in order.
  for (size_t t = 0; t < tasks.size();) {
    const Task& task = tasks[t];
    size_t stop = t + 1;
    if (task.partial >= 0) {
      while (stop < tasks.size() && tasks[stop].partial >= 0 && tasks[stop].row == task.row &&
             tasks[stop].head == task.head) {
        stop++;
      }
      for (int64_t r = 0; r < task.count * per_kv; r++) {
        const int head = task.head * per_kv + static_cast<int>(r % per_kv);
        float* out = attended_.row(task.row + r / per_kv) + head * hd;
        Partial merged{0.f, 0.f};
        for (size_t p = t; p < stop; p++) {
          const int64_t from = tasks[p].partial + r;
          kernel.merge(out, merged, partial_out_.data() + from * hd, partials_[at_least(from)],
                       spec_.head_dim);
        }
        if (!layer.sinks.empty()) {
          kernel.merge(out, merged, nullptr, {layer.sinks[at_least(head)], 1.f}, spec_.head_dim);
        }
        kernel.normalize(out, merged, spec_.head_dim);
      }
    }
    t = stop;
  }
}

void Model::mlp(const Layer& layer) {
  const KernelTable& k = kernels();
  const int64_t width = layer.gate->rows;
  norm_rows(layer.mlp_norm, groups_of({layer.gate.get(), layer.up.get()}));
  gated_.resize(rows_, width, groups_of({layer.down.get()}));
  grow(up_, rows_ * width);
  run_linear({{layer.gate.get(), &normed_, 0, rows_, gated_.row(0), width},
              {layer.up.get(), &normed_, 0, rows_, up_.data(), width}},
             spec_.precise);
  each_row(rows_, [&](int64_t i) {
    k.gate(spec_.activation, gated_.row(i), up_.data() + i * width, width);
    gated_.quantize(i, 1);
  });
  grow(y_, rows_ * spec_.hidden);
  run_linear({{layer.down.get(), &gated_, 0, rows_, y_.data(), spec_.hidden}}, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    add_residual(x(i), y_.data() + i * spec_.hidden, layer.after_mlp_norm);
  });
}

void Model::experts(const Layer& layer) {
  const KernelTable& k = kernels();
  const Expert& any = layer.experts.front();
  const int64_t count = static_cast<int64_t>(layer.experts.size()), width = any.gate->rows;
  const int64_t top = spec_.experts_per_token, hidden = spec_.hidden, slots = rows_ * top;
  norm_rows(layer.mlp_norm, groups_of({any.gate.get(), any.up.get()}));
  // The router reads float activations: a rounding there would choose other experts.
  grow(router_out_, rows_ * count);
  run_linear({{layer.router.get(), &normed_, 0, rows_, router_out_.data(), count}}, true);

  struct Slot {
    int64_t row, expert;
    float weight;
    int64_t place;  // among all slots, ordered by expert
  };
  std::vector<Slot> chosen;
  std::vector<int64_t> order(at_least(count)), first(at_least(count + 1));
  for (int64_t i = 0; i < rows_; i++) {
    const float* score = router_out_.data() + i * count;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + top, order.end(), [&](int64_t a, int64_t b) {
      return score[a] != score[b] ? score[a] > score[b] : a < b;
    });
    const float best = score[order[0]];
    float total = 0, kept = 0;
    const int64_t over = spec_.routing == Routing::kTopThenSoftmax ? top : count;
    for (int64_t e = 0; e < over; e++) {
      const float p = std::exp(
          score[spec_.routing == Routing::kTopThenSoftmax ? order[at_least(e)] : e] - best);
      total += p;
    }
    for (int64_t t = 0; t < top; t++) kept += std::exp(score[order[at_least(t)]] - best) / total;
    for (int64_t t = 0; t < top; t++) {
      float weight = std::exp(score[order[at_least(t)]] - best) / total;
      if (spec_.routing == Routing::kSoftmaxThenTopSummed1) weight /= kept;
      chosen.push_back({i, order[at_least(t)], weight, 0});
    }
  }
  for (const Slot& slot : chosen) first[at_least(slot.expert + 1)]++;
  for (int64_t e = 0; e < count; e++) first[at_least(e + 1)] += first[at_least(e)];
  std::vector<int64_t> next(first.begin(), first.end() - 1);
  for (Slot& slot : chosen) slot.place = next[at_least(slot.expert)]++;

  gathered_.resize(slots, hidden, groups_of({any.gate.get(), any.up.get()}));
  each_row(slots, [&](int64_t i) {
    gathered_.copy_row(chosen[at_least(i)].place, normed_, chosen[at_least(i)].row);
  });
  gated_.resize(slots, width, groups_of({any.down.get()}));
  grow(up_, slots * width);
  grow(expert_out_, slots * hidden);
  std::vector<LinearJob> in, out;
  for (int64_t e = 0; e < count; e++) {
    const int64_t begin = first[at_least(e)], rows = first[at_least(e + 1)] - begin;
    if (rows == 0) continue;
    const Expert& expert = layer.experts[at_least(e)];
    in.push_back({expert.gate.get(), &gathered_, begin, rows, gated_.row(begin), width});
    in.push_back({expert.up.get(), &gathered_, begin, rows, up_.data() + begin * width, width});
    out.push_back(
        {expert.down.get(), &gated_, begin, rows, expert_out_.data() + begin * hidden, hidden});
  }
  run_linear(in, spec_.precise);
  each_row(slots, [&](int64_t i) {
    k.gate(spec_.activation, gated_.row(i), up_.data() + i * width, width);
    gated_.quantize(i, 1);
  });
  run_linear(out, spec_.precise);
  grow(y_, rows_ * hidden);
  each_row(rows_, [&](int64_t i) {
    float* y = y_.data() + i * hidden;
    std::memset(y, 0, at_least(hidden) * sizeof(float));
    for (int64_t t = 0; t < top; t++) {
      const Slot& slot = chosen[at_least(i * top + t)];
      k.add_scaled(y, expert_out_.data() + slot.place * hidden, slot.weight, hidden);
    }
    add_residual(x(i), y, layer.after_mlp_norm);
  });
}

void Model::final_states(float* out) const {
  const KernelTable& k = kernels();
  each_row(rows_, [&](int64_t row) {
    k.rms_norm(x_.data() + row * spec_.hidden, final_norm.data(), out + row * spec_.hidden,
               spec_.hidden, spec_.norm_eps);
  });
}

void Model::logits(const std::vector<Slice>& slices, float* out) {
  const KernelTable& k = kernels();
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
    k.rms_norm(x(wanted[at_least(i)]), final_norm.data(), normed_.row(i), spec_.hidden,
               spec_.norm_eps);
    // Half of what rounding does to the choice of a token happens here, and a head is bound by
    // memory, not by arithmetic.
    normed_.quantize(i, 1, true);
  }
  run_linear({{head.get(), &normed_, 0, count, out, vocabulary}}, spec_.precise);
  if (spec_.logits_scale != 1.f || spec_.logits_soft_cap > 0.f) {
    for (int64_t i = 0; i < count * vocabulary; i++) {
      out[i] *= spec_.logits_scale;
      const float cap = spec_.logits_soft_cap;
      if (cap > 0.f) out[i] = cap * std::tanh(out[i] / cap);
    }
  }
}

}  // namespace exo

// Attention to a window of keys and to entries that stand for several tokens each (DeepSeek V4).
//
// Of the window a sequence keeps pages in its state, by position modulo their number: a token's
// arithmetic depends on its position alone, decoded or prefilled. Entries are in a KV cache of
// their own, whose tokens they are.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model.hpp"
#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

namespace {

// Turns the last numbers of each of `heads` heads.
void turn_last(float* x, int64_t heads, int64_t dim, const Rope& rope, const float* cos,
               const float* sin) {
  const int pairs = static_cast<int>(rope.frequencies.size());
  kernels().rotate(x + dim - 2 * pairs, static_cast<int>(heads), static_cast<int>(dim), pairs,
                   rope.interleaved, cos, sin);
}

// What a token gives to an entry: without a gate values alone.
struct Token {
  const float *values, *weights, *bias;
};

float mean(const std::vector<Token>& tokens, int64_t d) {
  float sum = 0;
  for (const Token& token : tokens) sum += token.values[d];
  return sum / static_cast<float>(tokens.size());
}

// By the softmax of their weights.
float weighed(const std::vector<Token>& tokens, int64_t d) {
  float top = -INFINITY, total = 0, sum = 0;
  for (const Token& token : tokens) top = std::max(top, token.weights[d] + token.bias[d]);
  for (const Token& token : tokens) {
    const float weight = same::exp(token.weights[d] + token.bias[d] - top);
    total += weight;
    sum += weight * token.values[d];
  }
  return sum / total;
}

}  // namespace

Model::Entries& Model::entries_of(int ratio) {
  return *std::find_if(entries_.begin(), entries_.end(),
                       [ratio](const Entries& one) { return one.ratio == ratio; });
}

std::vector<KVView> Model::Entries::views(int place) const {
  std::vector<KVView> found;
  for (uint8_t* const* each : pages) found.push_back(cache->view(each, place, 0));
  return found;
}

void Model::compressed_attention(const Layer& layer, int place, int64_t state) {
  const KernelTable& k = kernels();
  const CompressedAttention& own = *layer.compressed;
  const Compressor *compressor = own.compressor.get(), *index = own.index_compressor.get();
  const Rope& rope = ropes[at_least(layer.rope)];
  const int64_t heads = spec_.heads, dim = own.dim, q_width = heads * dim, rank = own.q_a->rows;
  const int64_t pairs = static_cast<int64_t>(rope.frequencies.size());
  const float* cos = cos_[at_least(layer.rope)].data();
  const float* sin = sin_[at_least(layer.rope)].data();
  const bool chooses = own.indexer && !choosing_rows(own.most, own.ratio()).empty();

  std::vector<LinearJob> jobs;
  norm_for_mixer(layer, {own.q_a.get(), own.kv.get(), compressor ? compressor->kv.get() : nullptr,
                         compressor ? compressor->gate.get() : nullptr,
                         index ? index->kv.get() : nullptr, index ? index->gate.get() : nullptr});
  grow(in_, rows_ * rank);
  grow(k_, rows_ * dim);
  const int64_t width = compressor ? compressor->width() : 0;
  const int64_t index_width = index ? index->width() : 0;
  grow(up_, rows_ * 2 * (width + index_width));
  float *kv = up_.data(), *gate = kv + rows_ * width;
  float *index_kv = gate + rows_ * width, *index_gate = index_kv + rows_ * index_width;
  const auto read = [&](const MatrixPtr& matrix, float* out) {
    jobs.push_back({matrix.get(), &normed_, 0, rows_, out, matrix->rows});
  };
  read(own.q_a, in_.data());
  read(own.kv, k_.data());
  if (compressor) read(compressor->kv, kv), read(compressor->gate, gate);
  if (index) read(index->kv, index_kv), read(index->gate, index_gate);
  run_linear(jobs, spec_.precise);

  gated_.resize(rows_, rank, groups_of({own.q_b.get(), chooses ? own.indexer->q.get() : nullptr}));
  each_row(rows_, [&](int64_t i) {
    k.rms_norm(in_.data() + i * rank, own.q_a_norm.data(), gated_.row(i), rank, spec_.norm_eps);
    gated_.quantize(i, 1);
  });
  grow(q_, rows_ * q_width);
  run_linear({{own.q_b.get(), &gated_, 0, rows_, q_.data(), q_width}}, spec_.precise);

  std::vector<std::vector<uint8_t*>> pages = window_pages(layer, state);
  const int64_t half = KVView::half_bytes(kv_type(), dim);
  const auto window_of = [&](size_t slice) {
    const int width = static_cast<int>(dim);
    return KVView{pages[slice].data(), 0, half, kv_type(), width, width};
  };
  if (ones_.size() < at_least(dim)) ones_.assign(at_least(dim), 1.f);
  each_row(rows_, [&](int64_t i) {
    float *q = q_.data() + i * q_width, *key = k_.data() + i * dim;
    for (int64_t h = 0; h < heads; h++) {
      k.rms_norm(q + h * dim, ones_.data(), q + h * dim, dim, spec_.norm_eps);
    }
    k.rms_norm(key, own.kv_norm.data(), key, dim, spec_.norm_eps);
    turn_last(q, heads, dim, rope, cos + i * pairs, sin + i * pairs);
    turn_last(key, 1, dim, rope, cos + i * pairs, sin + i * pairs);
    for (int64_t d = 0; d < q_width; d++) q[d] *= spec_.attention_scale;
    const Row& row = row_[at_least(i)];
    uint8_t* page = pages[row.slice][at_least(row.position / kPageTokens)];
    const int slot = static_cast<int>(row.position % kPageTokens), width = static_cast<int>(dim);
    k.store_key(key, page, slot, width, kv_type());
    k.store_value(key, page + half, slot, width, kv_type());
  });

  const int64_t after_window = own.window_floats(kv_type());
  Entries* entries = compressor ? &entries_of(own.ratio()) : nullptr;
  if (compressor) {
    compress(*compressor, rope, kv, gate, state + after_window, *entries, place, true);
  }
  if (index) {
    const int64_t at = state + after_window + compressor->state_floats();
    compress(*index, rope, index_kv, index_gate, at, *entries, place + 1, false);
  }
  if (chooses) score_entries(layer, *entries, place + 1);

  attended_.resize(rows_, q_width, {});
  for (int64_t i = 0; i < rows_; i++) {
    const Row& row = row_[at_least(i)];
    std::vector<Seen> seen = {{window_of(row.slice), {0.f, own.window, false}, row.position}};
    const int64_t complete = compressor ? (row.position + 1) / own.ratio() : 0;
    if (complete > 0) {
      const KVView all = entries->cache->view(entries->pages[row.slice], place, 0);
      const bool some = own.indexer && complete > own.most;
      const KVView kept = some ? copy_chosen(all, chosen_.data() + i * own.most, own.most) : all;
      seen.push_back({kept, {0.f, 0, false}, (some ? own.most : complete) - 1});
    }
    attend_rows(heads, {{i, 0, heads, seen}}, layer.sinks);
  }
  keep_windows(layer, state);

  const int64_t parts = static_cast<int64_t>(own.out.size()), part = q_width / parts;
  const int64_t out_rank = own.out.front()->rows;
  by_head_.resize(rows_ * parts, part, groups_of({own.out.front().get()}));
  each_row(rows_, [&](int64_t i) {
    thread_local Lines<float> back;
    back.assign(sin + i * pairs, sin + (i + 1) * pairs);
    for (float& one : back) one = -one;
    turn_last(attended_.row(i), heads, dim, rope, cos + i * pairs, back.data());
    for (int64_t p = 0; p < parts; p++) {
      std::copy_n(attended_.row(i) + p * part, part, by_head_.row(p * rows_ + i));
      by_head_.quantize(p * rows_ + i, 1);
    }
  });
  grow(convolved_, parts * rows_ * out_rank);
  jobs.clear();
  for (int64_t p = 0; p < parts; p++) {
    jobs.push_back({own.out[at_least(p)].get(), &by_head_, p * rows_, rows_,
                    convolved_.data() + p * rows_ * out_rank, out_rank});
  }
  run_linear(jobs, spec_.precise);
  attended_.resize(rows_, parts * out_rank, groups_of({layer.o.get()}));
  each_row(rows_, [&](int64_t i) {
    for (int64_t p = 0; p < parts; p++) {
      const float* from = convolved_.data() + (p * rows_ + i) * out_rank;
      std::copy_n(from, out_rank, attended_.row(i) + p * out_rank);
    }
    attended_.quantize(i, 1);
  });
  project_out(*layer.o, layer);
}

// A single token's keys go to the kept pages themselves; of several the earlier ones would be
// overwritten there while others still see them.
std::vector<std::vector<uint8_t*>> Model::window_pages(const Layer& layer, int64_t state) {
  const CompressedAttention& own = *layer.compressed;
  const int64_t bytes = own.page_bytes(kv_type()), ring = own.window_pages();
  std::vector<std::vector<uint8_t*>> pages;
  int64_t needed = 0;
  for (const Slice& slice : *slices_) {
    const int64_t last = (slice.start + slice.length - 1) / kPageTokens;
    if (slice.length > 1) needed += last - own.first_page(slice.start) + 1;
  }
  if (window_memory_.size() < at_least(needed * bytes)) {
    window_memory_.resize(at_least(needed * bytes));
  }
  uint8_t* next = window_memory_.data();
  for (size_t s = 0; s < slices_->size(); s++) {
    const Slice& slice = (*slices_)[s];
    uint8_t* kept = reinterpret_cast<uint8_t*>(state_[s] + state);
    const int64_t last = (slice.start + slice.length - 1) / kPageTokens;
    std::vector<uint8_t*>& table = pages.emplace_back(at_least(last + 1), nullptr);
    for (int64_t p = own.first_page(slice.start); p <= last; p++) {
      uint8_t* page = kept + p % ring * bytes;
      if (slice.length > 1) {
        if (p * kPageTokens < slice.start) std::memcpy(next, page, at_least(bytes));
        page = next;
        next += bytes;
      }
      table[at_least(p)] = page;
    }
  }
  return pages;
}

void Model::keep_windows(const Layer& layer, int64_t state) {
  const CompressedAttention& own = *layer.compressed;
  const int64_t bytes = own.page_bytes(kv_type()), ring = own.window_pages();
  const uint8_t* next = window_memory_.data();
  for (size_t s = 0; s < slices_->size(); s++) {
    const Slice& slice = (*slices_)[s];
    if (slice.length == 1) continue;
    uint8_t* kept = reinterpret_cast<uint8_t*>(state_[s] + state);
    const int64_t last = (slice.start + slice.length - 1) / kPageTokens;
    for (int64_t p = own.first_page(slice.start); p <= last; p++, next += bytes) {
      if (p + ring > last) std::memcpy(kept + p % ring * bytes, next, at_least(bytes));
    }
  }
}

void Model::compress(const Compressor& compressor, const Rope& rope, const float* kv,
                     const float* gate, int64_t state, Entries& entries, int place,
                     bool with_values) {
  const KernelTable& k = kernels();
  const int64_t width = compressor.width(), ratio = compressor.ratio, kept = compressor.kept();
  const int64_t dim = compressor.dim, token_floats = compressor.token_floats();
  struct Task {
    size_t slice;
    int64_t row;  // of the slice's first token
    int64_t number;
  };
  std::vector<Task> tasks;
  int64_t row = 0;
  for (size_t s = 0; s < slices_->size(); s++) {
    const Slice& slice = (*slices_)[s];
    for (int64_t e = slice.start / ratio; e < (slice.start + slice.length) / ratio; e++) {
      tasks.push_back({s, row, e});
    }
    row += slice.length;
  }
  // What the token gave, in this step or earlier: [width] to be averaged, then [width] to weigh it.
  const auto token_of = [&](const Task& task, int64_t position, int64_t column) {
    const int64_t start = (*slices_)[task.slice].start;
    Token found{};
    if (position >= start) {
      const int64_t at = (task.row + position - start) * width + column;
      found.values = kv + at;
      if (gate) found.weights = gate + at;
    } else {
      found.values = state_[task.slice] + state + position % kept * token_floats + column;
      if (gate) found.weights = found.values + width;
    }
    if (gate) found.bias = compressor.bias.data() + position % ratio * width + column;
    return found;
  };
  thread_pool().run(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    const Task& task = tasks[at_least(t)];
    thread_local std::vector<Token> tokens;
    tokens.clear();
    const auto take = [&](int64_t number, int64_t column) {
      for (int64_t i = 0; i < ratio; i++) {
        tokens.push_back(token_of(task, number * ratio + i, column));
      }
    };
    if (compressor.overlaps && task.number > 0) take(task.number - 1, 0);
    take(task.number, compressor.overlaps ? dim : 0);
    thread_local Lines<float> entry;
    grow(entry, dim);
    for (int64_t d = 0; d < dim; d++) {
      entry[at_least(d)] = gate ? weighed(tokens, d) : mean(tokens, d);
    }
    if (!compressor.norm.empty()) {
      k.rms_norm(entry.data(), compressor.norm.data(), entry.data(), dim, spec_.norm_eps);
    }
    thread_local Lines<float> cos, sin;
    cos.clear(), sin.clear();
    for (const float frequency : rope.frequencies) {
      const double angle = static_cast<double>(task.number * ratio) * double{frequency};
      const auto turned = same::sin_cos(angle);
      cos.push_back(rope.scale * turned.cos), sin.push_back(rope.scale * turned.sin);
    }
    const int pairs = static_cast<int>(rope.frequencies.size());
    const int64_t turned = compressor.turns_first ? 0 : dim - int64_t{2} * pairs;
    k.rotate(entry.data() + turned, 1, compressor.dim, pairs, rope.interleaved, cos.data(),
             sin.data());
    const KVView view = entries.cache->view(entries.pages[task.slice], place, 0);
    uint8_t* page = view.pages[task.number / kPageTokens];
    const int slot = static_cast<int>(task.number % kPageTokens), size = static_cast<int>(dim);
    k.store_key(entry.data(), page + view.key_offset, slot, size, view.type);
    if (with_values) k.store_value(entry.data(), page + view.value_offset, slot, size, view.type);
  });
  // What later entries are made of.
  row = 0;
  for (size_t s = 0; s < slices_->size(); s++) {
    const Slice& slice = (*slices_)[s];
    for (int64_t i = std::max<int64_t>(0, slice.length - kept); i < slice.length; i++) {
      float* own = state_[s] + state + (slice.start + i) % kept * token_floats;
      std::copy_n(kv + (row + i) * width, width, own);
      if (gate) std::copy_n(gate + (row + i) * width, width, own + width);
    }
    row += slice.length;
  }
}

void Model::score_entries(const Layer& layer, Entries& entries, int place) {
  const CompressedAttention& own = *layer.compressed;
  const Indexer& indexer = *own.indexer;
  const Rope& rope = ropes[at_least(layer.rope)];
  const int64_t pairs = static_cast<int64_t>(rope.frequencies.size());
  const int64_t width = int64_t{indexer.heads} * indexer.dim;
  ask_indexer(indexer);
  each_row(rows_, [&](int64_t i) {
    turn_last(index_q_.data() + i * width, indexer.heads, indexer.dim, rope,
              cos_[at_least(layer.rope)].data() + i * pairs,
              sin_[at_least(layer.rope)].data() + i * pairs);
  });
  choose_keys(indexer.heads, indexer.dim, own.most, own.ratio(), own.most, entries.views(place));
}

}  // namespace exo

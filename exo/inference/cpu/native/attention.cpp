// A layer's attention: positions, the KV cache, softmax over chunks of keys.
#include <algorithm>
#include <cstring>

#include "model.hpp"
#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

namespace {

constexpr int64_t kQueryTile = 16;  // tokens of one sequence whose attention is one task

}  // namespace

void Model::attention(const Layer& layer, int index, int pools, int64_t state) {
  const KernelTable& k = kernels();
  const int kv_heads = shape_of(layer).heads, head_dim = shape_of(layer).dim;
  const int heads = layer.heads > 0 ? layer.heads : spec_.heads;
  const int64_t hd = head_dim, vd = shape_of(layer).value_dim, q_width = heads * hd;
  const int64_t k_width = kv_heads * hd, v_width = kv_heads * vd;
  const Matrix* laurel = layer.alt_up ? layer.alt_up->left.get() : nullptr;
  const BlockIndexer* blocks = layer.blocks.get();
  const PoolIndexer* pooled = layer.pooled.get();
  norm_for_mixer(layer,
                 {layer.q.get(), layer.k.get(), layer.v.get(), layer.output_gate.get(), laurel,
                  blocks ? blocks->q.get() : nullptr, blocks ? blocks->k.get() : nullptr,
                  pooled ? pooled->q.get() : nullptr, pooled ? pooled->pools->kv.get() : nullptr});
  grow(q_, rows_ * q_width);
  grow(k_, rows_ * k_width);
  grow(v_, rows_ * v_width);
  std::vector<LinearJob> jobs = {{layer.q.get(), &normed_, 0, rows_, q_.data(), q_width}};
  if (layer.k) jobs.push_back({layer.k.get(), &normed_, 0, rows_, k_.data(), k_width});
  if (layer.v) jobs.push_back({layer.v.get(), &normed_, 0, rows_, v_.data(), v_width});
  if (layer.output_gate) {
    const int64_t width = layer.output_gate->rows;
    grow(z_, rows_ * width);
    jobs.push_back({layer.output_gate.get(), &normed_, 0, rows_, z_.data(), width});
  }
  run_linear(jobs, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    float* q = q_.data() + i * q_width;
    float* key = layer.k ? k_.data() + i * k_width : nullptr;
    float* value = v_.data() + i * v_width;
    if (layer.k && !layer.v) std::memcpy(value, key, at_least(v_width) * sizeof(float));
    if (layer.value_scale != 1.f) {
      for (int64_t d = 0; d < v_width; d++) value[d] *= layer.value_scale;
    }
    const auto norm_heads = [&](float* row, int heads, const std::vector<float>& weight) {
      if (weight.empty() || row == nullptr) return;
      if (static_cast<int64_t>(weight.size()) == hd) {
        for (int h = 0; h < heads; h++) {
          k.rms_norm(row + h * hd, weight.data(), row + h * hd, hd, spec_.norm_eps);
        }
      } else {
        k.rms_norm(row, weight.data(), row, heads * hd, spec_.norm_eps);
      }
    };
    const auto norm = [&] {
      norm_heads(q, heads, layer.q_norm);
      norm_heads(key, kv_heads, layer.k_norm);
    };
    if (layer.k) norm_heads(value, kv_heads, layer.v_norm);
    if (!layer.norm_after_rope) norm();
    if (layer.rope >= 0) {
      const size_t r = static_cast<size_t>(layer.rope);
      const int pairs = static_cast<int>(ropes[r].frequencies.size());
      const float* cos = cos_[r].data() + i * pairs;
      const float* sin = sin_[r].data() + i * pairs;
      k.rotate(q, heads, head_dim, pairs, ropes[r].interleaved, cos, sin);
      if (layer.k) k.rotate(key, kv_heads, head_dim, pairs, ropes[r].interleaved, cos, sin);
    }
    if (layer.norm_after_rope) norm();
    const Row& row = row_[at_least(i)];
    const float scale = query_scale(layer, row.position);
    for (int64_t d = 0; d < q_width; d++) q[d] *= scale;
    if (!layer.k) return;  // another layer's are read
    uint8_t* page = pages_[row.slice][row.position / kPageTokens];
    const int slot = static_cast<int>(row.position % kPageTokens);
    for (int h = 0; h < kv_heads; h++) {
      const KVView kv = cache_->view(nullptr, index, h);
      k.store_key(key + h * hd, page + kv.key_offset, slot, head_dim, kv.type);
      k.store_value(value + h * vd, page + kv.value_offset, slot, kv.value_dim, kv.type);
    }
  });
  attended_.resize(rows_, heads * vd, groups_of({layer.o.get()}));
  if (blocks != nullptr) index_blocks(layer, index + 1);
  if (pooled != nullptr) index_means(layer, pools, state);
  attend(layer, index, blocks ? blocks->all_below() : pooled ? pooled->all_below() : INT64_MAX);
  if (blocks != nullptr) attend_blocks(layer, index);
  if (pooled != nullptr) attend_chosen(layer, index, pooled->most, pooled->pools->ratio);
  each_row(rows_, [&](int64_t i) {
    if (layer.output_gate) {
      gate_output(layer, z_.data() + i * layer.output_gate->rows, heads * vd, i);
    }
    norm_inner(layer.attention_inner_norm, attended_.row(i));
    attended_.quantize(i, 1);
  });
  project_out(*layer.o, layer);
}

float Model::query_scale(const Layer& layer, int64_t position) const {
  if (layer.query_growth == 0.f) return spec_.attention_scale;
  const float spans = static_cast<float>((position + layer.query_ahead) / layer.query_span);
  const float growth = layer.query_growth * static_cast<float>(same::log1p(spans));
  return spec_.attention_scale * (1.f + growth);
}

void Model::gate_output(const Layer& layer, float* gate, int64_t width, int64_t row) {
  float* out = attended_.row(row);
  if (!layer.softplus_gate && layer.output_gate->rows == width) {
    kernels().gate(Activation::kSigmoid, gate, out, width);
    std::memcpy(out, gate, at_least(width) * sizeof(float));
    return;
  }
  const int64_t each = width / layer.output_gate->rows;  // 1, or a head
  for (int64_t g = 0; g < layer.output_gate->rows; g++) {
    const float by = layer.softplus_gate ? same::softplus(gate[g]) : same::sigmoid(gate[g]);
    for (int64_t d = 0; d < each; d++) out[g * each + d] *= by;
  }
}

// Tasks are (tile of a slice's tokens, KV head); where that is a single tile, whose work would be
// too little shared, (chunk of keys, KV head), merged afterwards in the same order.
void Model::attend(const Layer& layer, int index, int64_t positions_below) {
  const KernelTable& kernel = kernels();
  const HeadShape shape = shape_of(layer);
  const int heads = layer.heads > 0 ? layer.heads : spec_.heads;
  const int64_t hd = shape.dim, vd = shape.value_dim, q_width = heads * hd;
  const int per_kv = heads / shape.heads;
  const AttentionRule rule{spec_.attention_soft_cap, layer.window, layer.in_chunks};
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
    const int64_t length = std::clamp<int64_t>(positions_below - slice.start, 0, slice.length);
    for (int64_t i = 0; i < length; i += kQueryTile) {
      const int64_t count = std::min(kQueryTile, length - i);
      const int64_t seen = slice.start + i + count;
      const int64_t oldest = std::max<int64_t>(0, rule.first_seen(slice.start + i));
      const int64_t begin = oldest / kChunkTokens, end = (seen + kChunkTokens - 1) / kChunkTokens;
      for (int h = 0; h < shape.heads; h++) {
        if (length > kQueryTile || end - begin == 1) {
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
  grow(partial_out_, partial * vd);
  if (partials_.size() < at_least(partial)) partials_.resize(at_least(partial));
  const auto run = [&](const Task& task) {
    constexpr int kMaxRows = 256;
    const float* queries[kMaxRows];
    int64_t positions[kMaxRows];
    Partial merged[kMaxRows], found[kMaxRows];
    const KVView kv = cache_->view(pages_[row_[at_least(task.row)].slice], index, task.head);
    const int at_once = std::max(1, kMaxRows / per_kv);
    thread_local Lines<float> sums, other;
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
                            partial_out_.data() + place * vd, partials_.data() + place);
        continue;
      }
      grow(sums, rows * vd);
      grow(other, rows * vd);
      for (int r = 0; r < rows; r++) merged[r] = {0.f, 0.f};
      for (int64_t c = task.begin; c < task.end; c++) {
        kernel.attend_chunk(kv, rule, c, queries, positions, rows, other.data(), found);
        for (int r = 0; r < rows; r++) {
          kernel.merge(sums.data() + r * vd, merged[r], other.data() + r * vd, found[r],
                       shape.value_dim);
        }
      }
      for (int r = 0; r < rows; r++) {
        const int head = task.head * per_kv + r % per_kv;
        float* out = attended_.row(task.row + t0 + r / per_kv) + head * vd;
        if (!layer.sinks.empty()) {
          kernel.merge(sums.data() + r * vd, merged[r], nullptr, {layer.sinks[at_least(head)], 1.f},
                       shape.value_dim);
        }
        kernel.normalize(sums.data() + r * vd, merged[r], shape.value_dim);
        std::memcpy(out, sums.data() + r * vd, at_least(vd) * sizeof(float));
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
        float* out = attended_.row(task.row + r / per_kv) + head * vd;
        Partial merged{0.f, 0.f};
        for (size_t p = t; p < stop; p++) {
          const int64_t from = tasks[p].partial + r;
          kernel.merge(out, merged, partial_out_.data() + from * vd, partials_[at_least(from)],
                       shape.value_dim);
        }
        if (!layer.sinks.empty()) {
          kernel.merge(out, merged, nullptr, {layer.sinks[at_least(head)], 1.f}, shape.value_dim);
        }
        kernel.normalize(out, merged, shape.value_dim);
      }
    }
    t = stop;
  }
}

}  // namespace exo

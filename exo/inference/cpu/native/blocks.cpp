// Attention to the blocks of keys that an indexer chose (MiniMax M3).
//
// A block is whole pages of the KV cache: what a query attends to is a table of the pages chosen,
// in the order of their positions, as if they were a whole context.
#include <algorithm>
#include <limits>
#include <span>

#include "model.hpp"
#include "rows.hpp"

namespace exo {

namespace {

constexpr size_t kRowsTogether = 16;  // whose scores are in memory at once
constexpr int kQueriesPerTask = 16;

}  // namespace

void Model::index_blocks(const Layer& layer, int index) {
  const KernelTable& k = kernels();
  const BlockIndexer& indexer = *layer.blocks;
  const int64_t dim = indexer.dim, width = indexer.q->rows;
  const int heads = static_cast<int>(width / dim);
  const bool chooses = !choosing_rows(indexer.all_below(), 1).empty();
  grow(k_, rows_ * dim);
  std::vector<LinearJob> jobs = {{indexer.k.get(), &normed_, 0, rows_, k_.data(), dim}};
  if (chooses) {
    grow(index_q_, rows_ * width);
    jobs.push_back({indexer.q.get(), &normed_, 0, rows_, index_q_.data(), width});
  }
  run_linear(jobs, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    const auto norm_and_turn = [&](float* row, int count, const std::vector<float>& weight) {
      for (int h = 0; h < count; h++) {
        k.rms_norm(row + h * dim, weight.data(), row + h * dim, dim, spec_.norm_eps);
      }
      if (layer.rope < 0) return;
      const size_t r = static_cast<size_t>(layer.rope);
      const int pairs = static_cast<int>(ropes[r].frequencies.size());
      k.rotate(row, count, indexer.dim, pairs, ropes[r].interleaved, cos_[r].data() + i * pairs,
               sin_[r].data() + i * pairs);
    };
    norm_and_turn(k_.data() + i * dim, 1, indexer.k_norm);
    if (chooses) norm_and_turn(index_q_.data() + i * width, heads, indexer.q_norm);
    const Row& row = row_[at_least(i)];
    const KVView kv = cache_->view(nullptr, index, 0);
    k.store_key(k_.data() + i * dim, pages_[row.slice][row.position / kPageTokens] + kv.key_offset,
                static_cast<int>(row.position % kPageTokens), indexer.dim, kv.type);
  });
}

// index_scores_ [rows][heads][apart]: what each of the indexer's queries has with each key.
void Model::score_keys(const BlockIndexer& indexer, int index, std::span<const int64_t> rows,
                       int64_t apart) {
  const int64_t dim = indexer.dim, heads = indexer.q->rows / dim;
  grow(index_scores_, static_cast<int64_t>(rows.size()) * heads * apart);
  struct Task {
    int64_t row, count;  // of a sequence
    int64_t chunk;
    float* out;  // of the first one's first head; the others follow, `apart`
  };
  std::vector<Task> tasks;
  for (size_t c = 0, count; c < rows.size(); c += count) {
    count = 1;
    const size_t slice = row_[at_least(rows[c])].slice;
    while ((static_cast<int64_t>(count) + 1) * heads <= kQueriesPerTask &&
           c + count < rows.size() && row_[at_least(rows[c + count])].slice == slice) {
      count++;
    }
    const int64_t last = row_[at_least(rows[c + count - 1])].position;
    for (int64_t chunk = 0; chunk <= last / kChunkTokens; chunk++) {
      float* out =
          index_scores_.data() + static_cast<int64_t>(c) * heads * apart + chunk * kChunkTokens;
      tasks.push_back({rows[c], static_cast<int64_t>(count), chunk, out});
    }
  }
  thread_pool().run(static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    const Task& task = tasks[at_least(t)];
    const Row& last = row_[at_least(task.row + task.count - 1)];
    const int64_t seen =
        std::min<int64_t>(kChunkTokens, last.position + 1 - task.chunk * kChunkTokens);
    thread_local std::vector<const float*> queries;
    queries.clear();
    for (int64_t h = 0; h < task.count * heads; h++) {
      queries.push_back(index_q_.data() + (task.row * heads + h) * dim);
    }
    kernels().multiply_chunk(cache_->view(pages_[last.slice], index + 1, 0), task.chunk,
                             queries.data(), static_cast<int>(queries.size()),
                             static_cast<int>(seen), task.out, apart);
  });
}

// chosen_ [rows][heads][most]: the blocks whose best key is best, the newest ones always.
void Model::choose_blocks(const BlockIndexer& indexer, std::span<const int64_t> rows,
                          int64_t apart) {
  const int64_t heads = indexer.q->rows / indexer.dim, size = indexer.size, most = indexer.most;
  const int64_t queries = static_cast<int64_t>(rows.size()) * heads;
  chosen_.resize(at_least(queries * most));
  thread_pool().run(queries, [&](int64_t t) {
    const int64_t position = row_[at_least(rows[at_least(t / heads)])].position;
    const int64_t own = position / size;
    float* scores = index_scores_.data() + t * apart;
    for (int64_t b = 0; b <= own; b++) {
      const int64_t end = std::min(position + 1, (b + 1) * size);
      scores[b] = *std::max_element(scores + b * size, scores + end);
      if (b > own - indexer.local) scores[b] = std::numeric_limits<float>::infinity();
    }
    choose_best(scores, own + 1, most, chosen_.data() + t * most);
  });
}

void Model::attend_blocks(const Layer& layer, int index) {
  const BlockIndexer& indexer = *layer.blocks;
  const std::vector<int64_t> choosing = choosing_rows(indexer.all_below(), 1);
  const int64_t heads = indexer.q->rows / indexer.dim, most = indexer.most;
  const int64_t size = indexer.size, pages = size / kPageTokens;
  const int64_t all_heads = layer.heads > 0 ? layer.heads : spec_.heads;
  const AttentionRule rule{spec_.attention_soft_cap, 0, false};
  std::vector<SeeingHeads> each;
  std::vector<uint8_t*> tables;
  for (size_t first = 0; first < choosing.size(); first += kRowsTogether) {
    const auto rows = std::span(choosing).subspan(
        first, std::min<size_t>(kRowsTogether, choosing.size() - first));
    const auto position_of = [&](int64_t row) { return row_[at_least(row)].position; };
    int64_t apart = 0;
    for (const int64_t row : rows) {
      apart = std::max(apart, (position_of(row) / kChunkTokens + 1) * kChunkTokens);
    }
    score_keys(indexer, index, rows, apart);
    choose_blocks(indexer, rows, apart);
    each.clear();
    const int64_t queries = static_cast<int64_t>(rows.size()) * heads;
    tables.resize(at_least(queries * most * pages));
    for (int64_t t = 0; t < queries; t++) {
      const int64_t row = rows[at_least(t / heads)], head = t % heads;
      uint8_t* const* all = pages_[row_[at_least(row)].slice];
      uint8_t** own = tables.data() + t * most * pages;
      // The last block chosen is the row's own, whose pages after it are not there.
      const int64_t count = (most - 1) * size + position_of(row) % size + 1;
      for (int64_t p = 0; p * kPageTokens < count; p++) {
        own[p] = all[chosen_[at_least(t * most + p / pages)] * pages + p % pages];
      }
      each.push_back({row,
                      head * (all_heads / heads),
                      all_heads / heads,
                      {{cache_->view(own, index, static_cast<int>(head)), rule, count - 1}}});
    }
    attend_rows(all_heads, each, layer.sinks);
  }
}

}  // namespace exo

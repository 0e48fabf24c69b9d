#include "linear.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "thread_pool.hpp"

namespace exo {

namespace {

constexpr int64_t kRowsPast = 15;  // QuantizedRows: kernels read rows in sixteens
constexpr int64_t kChunksPerThread = 6;
constexpr int64_t kMaxChunk = 64;
constexpr int64_t kTileBlocks = 2;  // that a tile may take at once: chunks are not cut between them
constexpr int64_t kSmallJob = 20000;  // products a thread does sooner than it is woken

int64_t products(const LinearJob& job) { return job.weights->rows * job.weights->cols * job.count; }

void run_blocks(const LinearJob& job, bool precise, int64_t begin, int64_t end, Upcoming next) {
  const KernelTable& k = kernels();
  const Matrix& w = *job.weights;
  const int group = activation_group(w, precise);
  float* out = job.out;
  if (group == kPairCols) {
    const QuantizedRows x = job.x->quantized(group, job.first);
    k.linear_bfloat16(w, x, job.count, begin, end, out, job.stride, next);
  } else if (group == 0) {
    const float* x = job.x->values() + job.first * job.x->cols();
    k.linear_float(w, x, job.count, begin, end, out, job.stride, next);
  } else {
    k.linear_int8(w, job.x->quantized(group, job.first), job.count, begin, end, out, job.stride,
                  next);
  }
}

}  // namespace

void Activations::resize(int64_t rows, int64_t cols, const std::vector<int>& groups) {
  rows_ = rows, cols_ = cols;
  values_.resize(static_cast<size_t>(rows * cols));
  const int64_t padded = rows + kRowsPast;
  size_t used = 0;
  reads_floats_ = false;
  for (const int group : groups) {
    if (group == 0) {
      reads_floats_ = true;
      continue;
    }
    if (used == quantized_.size()) quantized_.emplace_back();
    Quantized& q = quantized_[used++];
    q.group = group;
    const auto values = static_cast<size_t>(padded * row_stride(cols, group));
    if (group == kPairCols) {
      q.coarse.values.resize(values);
      continue;
    }
    const auto scales = static_cast<size_t>(padded * scale_stride(cols, group));
    for (Part* part : {&q.coarse, &q.fine}) {
      part->values.resize(values);
      part->groups.resize(group == kSuperCols ? 0 : scales);
      part->supers.resize(group == kSuperCols ? scales : 0);
    }
    const bool splits = group == kSuperCols && rows >= kernels().split_from;
    q.split.resize(splits ? static_cast<size_t>(padded * split_stride(cols)) : 0);
    q.is_fine.resize(static_cast<size_t>(padded * (cols / q.rows(0, cols).flag_cols())));
  }
  quantized_.resize(used);
}

QuantizedRows Activations::Quantized::rows(int64_t first, int64_t cols) const {
  // A kernel writes these only in `quantize`. Of groups and super-blocks one is not there.
  const auto at = [](const auto& v, int64_t i) {
    using Value = typename std::decay_t<decltype(v)>::value_type;
    return v.empty() ? nullptr : const_cast<Value*>(v.data()) + i;
  };
  const int64_t row = first * scale_stride(cols, group), stride = row_stride(cols, group);
  const auto from = [&](const Part& part) -> QuantizedPart {
    return {at(part.values, first * stride), at(part.groups, row), at(part.supers, row)};
  };
  int8_t* split_at = at(split, first * split_stride(cols));
  QuantizedRows rows{from(coarse), from(fine), nullptr, cols, stride, group, split_at};
  rows.is_fine = at(is_fine, first * (cols / rows.flag_cols()));
  return rows;
}

QuantizedRows Activations::quantized(int group, int64_t first) const {
  for (const Quantized& q : quantized_) {
    if (q.group == group) return q.rows(first, cols_);
  }
  return {};
}

void Activations::quantize(int64_t first, int64_t count, bool fine) {
  for (int64_t i = first; hadamard_ != nullptr && i < first + count; i++) {
    hadamard_->turn(row(i), cols_);
  }
  for (const Quantized& q : quantized_) {
    const QuantizedRows rows = q.rows(0, cols_);
    kernels().quantize_rows(values() + first * cols_, count, rows, first, fine);
    if (rows.split != nullptr) kernels().split_rows(rows, first, count);
  }
}

void Activations::copy_row(int64_t to, const Activations& from, int64_t row, bool floats) {
  const auto copy = [](auto& out, const auto& in, int64_t o, int64_t i, int64_t n) {
    std::memcpy(out.data() + o * n, in.data() + i * n, static_cast<size_t>(n) * sizeof in[0]);
  };
  if (floats || reads_floats_) copy(values_, from.values_, to, row, cols_);
  for (size_t i = 0; i < quantized_.size(); i++) {
    Quantized& q = quantized_[i];
    const Quantized& other = from.quantized_[i];
    const int64_t scales = scale_stride(cols_, q.group), stride = row_stride(cols_, q.group);
    if (q.group == kPairCols) {
      copy(q.coarse.values, other.coarse.values, to, row, stride);
      continue;
    }
    const int64_t flags = cols_ / q.rows(0, cols_).flag_cols();
    const uint8_t* is_fine = other.is_fine.data() + row * flags;
    const bool any_fine = std::find(is_fine, is_fine + flags, uint8_t{1}) != is_fine + flags;
    for (Part Quantized::* part : {&Quantized::coarse, &Quantized::fine}) {
      Part& out = q.*part;
      const Part& in = other.*part;
      // Without a fine group it has no values.
      if (part == &Quantized::coarse || any_fine) copy(out.values, in.values, to, row, stride);
      if (q.group == kSuperCols) {
        copy(out.supers, in.supers, to, row, scales);
      } else {
        copy(out.groups, in.groups, to, row, scales);
      }
    }
    copy(q.is_fine, other.is_fine, to, row, flags);
    // Not copied: fewer rows may have none.
    if (!q.split.empty()) kernels().split_rows(q.rows(0, cols_), to, 1);
  }
}

int activation_group(const Matrix& weights, bool precise) {
  if (precise) return 0;
  if (weights.is_in_pairs()) return kPairCols;
  if (!weights.is_quantized()) return 0;
  return weights.is_super ? kSuperCols : weights.group;
}

void run_linear(const std::vector<LinearJob>& jobs, bool precise) {
  ThreadPool& pool = thread_pool();
  int64_t blocks = 0, work = 0;
  for (const LinearJob& job : jobs) {
    if (job.weights->cols != job.x->cols()) {
      throw std::invalid_argument("a layer of " + std::to_string(job.weights->cols) +
                                  " columns is given " + std::to_string(job.x->cols()) +
                                  ": the weights are not packed as the configuration says");
    }
    if (job.beside ? job.weights->rows > job.stride : job.weights->rows != job.stride) {
      throw std::invalid_argument("a layer of " + std::to_string(job.weights->rows) +
                                  " rows where there should be " + std::to_string(job.stride) +
                                  ": the weights are not what the configuration says");
    }
    blocks += job.weights->blocks();
    work += products(job);
  }
  struct Task {
    const LinearJob* job;
    int64_t begin, end;

    Upcoming weights() const {
      const Matrix& w = *job->weights;
      return {w.block(begin), (end - begin) * w.block_bytes()};
    }
  };
  thread_local std::vector<Task> tasks;
  tasks.clear();
  // `more`: the thread that runs a task runs the one after it next.
  const auto run = [precise](const Task* task, bool more) {
    const Upcoming next = more ? task[1].weights() : Upcoming{};
    run_blocks(*task->job, precise, task->begin, task->end, next);
  };
  if (pool.threads() == 1 || work < kSmallJob) {
    for (const LinearJob& job : jobs) tasks.push_back({&job, 0, job.weights->blocks()});
    for (const Task& task : tasks) run(&task, &task != &tasks.back());
    return;
  }
  const int64_t threads = pool.threads();
  const int64_t share = blocks / (threads * kChunksPerThread);
  const int64_t chunk = std::clamp<int64_t>(share, 1, kMaxChunk);
  for (const LinearJob& job : jobs) {
    // Alike, and as many for each thread: of thirteen one thread has seven, for which the other
    // waits.
    const int64_t end = job.weights->blocks(), units = (end + kTileBlocks - 1) / kTileBlocks;
    const int64_t fewest = (end + chunk - 1) / chunk;
    const int64_t even = (fewest + threads - 1) / threads * threads;
    const int64_t count = std::min(fewest < threads ? fewest : even, units);
    for (int64_t i = 0; i < count; i++) {
      const int64_t first = units * i / count * kTileBlocks;
      const int64_t last = units * (i + 1) / count * kTileBlocks;
      tasks.push_back({&job, first, std::min(end, last)});
    }
  }
  const Task* all = tasks.data();
  const auto count = static_cast<int64_t>(tasks.size());
  pool.run(count,
           [&](int64_t i) { run(all + i, i + 1 < count && !pool.begins_share(count, i + 1)); });
}

}  // namespace exo

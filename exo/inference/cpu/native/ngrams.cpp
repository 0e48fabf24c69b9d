// What the last tokens together bring to a layer's hidden states, of a table by their hashes
// (Qwen3.8 Flash Next; transformers' modeling_qwen4_exp.py, Qwen4ExpTextPLELayer).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model.hpp"
#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

std::vector<int64_t> Model::rows_of_ngrams(const Ngrams& ngrams, int64_t state) {
  const int64_t before = ngrams.orders() - 1, parts = static_cast<int64_t>(ngrams.sizes.size());
  const int64_t each = parts / before;  // of each order
  std::vector<int64_t> found;
  std::vector<int64_t> tokens, seen(at_least(ngrams.orders()));
  int64_t row = 0;
  for (size_t s = 0; s < slices_->size(); s++) {
    const int64_t length = (*slices_)[s].length;
    float* kept = state_[s] + state + ngrams.rows_before() * ngrams.channels();
    tokens.clear();
    for (int64_t i = 0; i < before; i++) {
      tokens.push_back(kept[i] > 0.f ? static_cast<int64_t>(kept[i]) - 1 : ngrams.end);
    }
    tokens.insert(tokens.end(), tokens_ + row, tokens_ + row + length);
    for (int64_t i = 0; i < length; i++) {
      seen[0] = tokens[at_least(before + i)];
      for (int64_t b = 1; b <= before; b++) {
        const bool is_past = b > 1 && seen[at_least(b - 1)] == ngrams.end;
        seen[at_least(b)] = is_past ? ngrams.end : tokens[at_least(before + i - b)];
      }
      for (int64_t p = 0; p < parts; p++) {
        uint64_t mixed = 0;
        for (int64_t b = 0; b <= p / each + 1; b++) {
          mixed ^= static_cast<uint64_t>(seen[at_least(b)]) *
                   static_cast<uint64_t>(ngrams.multipliers[at_least(b)]);
        }
        const auto size = static_cast<uint64_t>(ngrams.sizes[at_least(p)]);
        found.push_back(static_cast<int64_t>(mixed % size) + ngrams.starts[at_least(p)]);
      }
    }
    for (int64_t i = 0; i < before; i++) {
      kept[i] = static_cast<float>(tokens[at_least(length + i)] + 1);
    }
    row += length;
  }
  return found;
}

void Model::add_ngrams(const Ngrams& ngrams, int64_t state) {
  const KernelTable& k = kernels();
  const int64_t hidden = spec_.hidden, n = spec_.streams, width = n * hidden;
  const MatrixPtr table = ngrams.rows(rows_of_ngrams(ngrams, state));
  const int64_t parts = static_cast<int64_t>(ngrams.sizes.size()), dim = table->cols;
  normed_.resize(rows_, parts * dim, groups_of({ngrams.key.get(), ngrams.value.get()}));
  each_row(rows_, [&](int64_t i) {
    for (int64_t p = 0; p < parts; p++) table->read_row(i * parts + p, normed_.row(i) + p * dim);
    normed_.quantize(i, 1);
  });
  grow(up_, rows_ * width);
  grow(y_, rows_ * hidden);
  run_linear({{ngrams.key.get(), &normed_, 0, rows_, up_.data(), width},
              {ngrams.value.get(), &normed_, 0, rows_, y_.data(), hidden}},
             spec_.precise);
  grow(in_, rows_ * width);
  each_row(rows_, [&](int64_t i) {
    thread_local Lines<float> query;
    grow(query, hidden);
    float *streams = streams_.data() + i * width, *key = up_.data() + i * width;
    const float* value = y_.data() + i * hidden;
    for (int64_t d = 0; d < width; d += hidden) {
      k.rms_norm(key + d, ngrams.key_norm.data() + d, key + d, hidden, spec_.norm_eps);
      k.rms_norm(streams + d, ngrams.query_norm.data() + d, query.data(), hidden, spec_.norm_eps);
      double product = 0;
      for (int64_t j = 0; j < hidden; j++)
        product += double{key[d + j]} * double{query[at_least(j)]};
      const double score = product / std::sqrt(static_cast<double>(hidden));
      const float root = static_cast<float>(std::sqrt(std::max(std::fabs(score), 1e-6)));
      const float share = same::sigmoid(score < 0 ? -root : root);
      std::fill_n(key + d, hidden, 0.f);
      k.add_scaled(key + d, value, share, hidden);
      k.add_scaled(streams + d, value, share, hidden);
      k.rms_norm(key + d, ngrams.convolution_norm.data() + d, in_.data() + i * width + d, hidden,
                 spec_.norm_eps);
    }
  });
  // A slice's rows stand behind the last ones before it.
  const Convolution& convolution = ngrams.convolution;
  const int64_t before = ngrams.rows_before();
  const int64_t slices = static_cast<int64_t>(slices_->size());
  const auto bytes = [width](int64_t rows) { return at_least(rows * width) * sizeof(float); };
  grow(window_, (rows_ + slices * before) * width);
  int64_t first = 0;
  for (int64_t s = 0; s < slices; s++) {
    const int64_t length = (*slices_)[at_least(s)].length;
    float* window = window_.data() + (first + s * before) * width;
    float* kept = state_[at_least(s)] + state;
    std::memcpy(window, kept, bytes(before));
    std::memcpy(window + before * width, in_.data() + first * width, bytes(length));
    std::memcpy(kept, window + length * width, bytes(before));
    first += length;
  }
  each_row(rows_, [&](int64_t i) {
    const int64_t slice = static_cast<int64_t>(row_[at_least(i)].slice);
    const float* oldest = window_.data() + (i + slice * before) * width;
    float* streams = streams_.data() + i * width;
    for (int64_t c = 0; c < width; c++) {
      float sum = 0;
      for (int64_t t = 0; t < convolution.taps; t++) {
        sum +=
            convolution.weights[at_least(t * width + c)] * oldest[t * ngrams.dilation * width + c];
      }
      streams[c] += sum * same::sigmoid(sum);
    }
  });
}

}  // namespace exo

// Several hidden states of a token, which a layer's parts read and write by weights of their own
// (hyper-connections, arXiv:2512.24880).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model.hpp"
#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

namespace {

// m [n, n], what any state gives each: the softmax of its rows, brought to rows and columns that
// sum to 1 (Sinkhorn and Knopp; eq. 9 there).
void balance(float* m, int64_t n, int rounds, float eps) {
  for (int64_t from = 0; from < n; from++) {
    float* row = m + from * n;
    const float top = *std::max_element(row, row + n);
    float total = 0;
    for (int64_t to = 0; to < n; to++) total += row[to] = same::exp(row[to] - top);
    for (int64_t to = 0; to < n; to++) row[to] = row[to] / total + eps;
  }
  const auto divide = [m, n, eps](int64_t first, int64_t step) {
    float total = eps;
    for (int64_t i = 0; i < n; i++) total += m[first + i * step];
    for (int64_t i = 0; i < n; i++) m[first + i * step] /= total;
  };
  for (int round = 0; round < rounds; round++) {
    for (int64_t from = 0; round > 0 && from < n; from++) divide(from * n, 1);
    for (int64_t to = 0; to < n; to++) divide(to, n);
  }
}

}  // namespace

// As collapse does it; each stream normed by itself, and weighed number by number.
void Model::collapse_gated(const HyperConnection& connection) {
  const KernelTable& k = kernels();
  const int64_t hidden = spec_.hidden, n = spec_.streams, width = n * hidden;
  const int64_t rank = connection.down->rows;
  const float share = 1.f / static_cast<float>(n);
  const MatrixPtr& down = connection.down;
  routed_.resize(rows_, width, groups_of({down.get()}));
  each_row(rows_, [&](int64_t i) {
    for (int64_t d = 0; d < width; d += hidden) {
      k.rms_norm(streams_.data() + i * width + d, connection.norm.data() + d, routed_.row(i) + d,
                 hidden, spec_.norm_eps);
    }
    routed_.quantize(i, 1);
  });
  gated_.resize(rows_, rank, groups_of({connection.up.get()}));
  run_linear({{down.get(), &routed_, 0, rows_, gated_.row(0), rank}}, spec_.precise);
  each_row(rows_, [&](int64_t i) {
    float* low = gated_.row(i);
    for (int64_t d = 0; d < rank; d++) {
      const float one = low[d] * share;
      low[d] = one * same::sigmoid(one);
    }
    gated_.quantize(i, 1);
  });
  grow(up_, rows_ * width);
  run_linear({{connection.up.get(), &gated_, 0, rows_, up_.data(), width}}, spec_.precise);
  grow(before_, rows_ * hidden);
  grow(mixes_, rows_ * 2 * n);
  if (connection.mix) {
    run_linear({{connection.mix.get(), &routed_, 0, rows_, mixes_.data() + n, 2 * n, true}}, true);
  }
  each_row(rows_, [&](int64_t i) {
    float *weights = up_.data() + i * width, *own = before_.data() + i * hidden;
    k.gate(Activation::kSigmoid, weights, routed_.row(i), width);
    std::fill_n(own, hidden, 0.f);
    for (int64_t d = 0; d < width; d += hidden) k.add_scaled(own, weights + d, share, hidden);
    std::fill_n(x(i), hidden, 0.f);
    float* added = mixes_.data() + i * 2 * n + n;
    for (int64_t s = 0; connection.mix && s < n; s++) {
      added[s] = spec_.stream_magnitude * same::sigmoid(added[s] * share);
    }
  });
}

// Into before_, for the norm of what reads it; x_ becomes 0, to which that part adds its result.
void Model::collapse(const HyperConnection& connection) {
  if (connection.up) return collapse_gated(connection);
  const KernelTable& k = kernels();
  const int64_t hidden = spec_.hidden, n = spec_.streams, count = connection.mix->rows;
  if (ones_.size() < at_least(n * hidden)) ones_.assign(at_least(n * hidden), 1.f);
  routed_.resize(rows_, n * hidden, {});
  grow(before_, rows_ * hidden);
  grow(mixes_, rows_ * count);
  each_row(rows_, [&](int64_t i) {
    const float* streams = streams_.data() + i * n * hidden;
    k.rms_norm(streams, ones_.data(), routed_.row(i), n * hidden, spec_.norm_eps);
  });
  run_linear({{connection.mix.get(), &routed_, 0, rows_, mixes_.data(), count}}, true);
  each_row(rows_, [&](int64_t i) {
    float* mix = mixes_.data() + i * count;
    for (int64_t m = 0; m < count; m++) {
      mix[m] = mix[m] * connection.scales[at_least(m)] + connection.base[at_least(m)];
    }
    const float* streams = streams_.data() + i * n * hidden;
    float* own = before_.data() + i * hidden;
    std::fill_n(own, hidden, 0.f);
    for (int64_t s = 0; s < n; s++) {
      k.add_scaled(own, streams + s * hidden, same::sigmoid(mix[s]) + spec_.stream_eps, hidden);
    }
    std::fill_n(x(i), hidden, 0.f);
    if (count == n) return;  // the last one's
    for (int64_t s = n; s < 2 * n; s++) {
      mix[s] = spec_.stream_magnitude * same::sigmoid(mix[s]) + spec_.stream_least;
    }
    if (count > 2 * n) balance(mix + 2 * n, n, spec_.sinkhorn_rounds, spec_.stream_eps);
  });
}

// By the weights that `collapse` left.
void Model::expand() {
  const KernelTable& k = kernels();
  const int64_t hidden = spec_.hidden, n = spec_.streams;
  const bool mixes = spec_.sinkhorn_rounds > 0;
  const int64_t count = mixes ? n * (n + 2) : 2 * n;
  each_row(rows_, [&](int64_t i) {
    const float *added = mixes_.data() + i * count + n, *mixed = added + n;
    float* streams = streams_.data() + i * n * hidden;
    for (int64_t s = 0; !mixes && s < n; s++) {
      k.add_scaled(streams + s * hidden, x(i), added[s], hidden);
    }
    if (!mixes) return;
    thread_local Lines<float> earlier;
    earlier.assign(streams, streams + n * hidden);
    for (int64_t to = 0; to < n; to++) {
      float* out = streams + to * hidden;
      std::fill_n(out, hidden, 0.f);
      k.add_scaled(out, x(i), added[to], hidden);
      for (int64_t from = 0; from < n; from++) {
        k.add_scaled(out, earlier.data() + from * hidden, mixed[from * n + to], hidden);
      }
    }
  });
}

void Model::join_streams() {
  const int64_t hidden = spec_.hidden, n = spec_.streams;
  if (last_streams) {
    collapse(*last_streams);
    std::copy_n(before_.data(), rows_ * hidden, x_.data());
    return;
  }
  each_row(rows_, [&](int64_t i) {
    std::fill_n(x(i), hidden, 0.f);
    for (int64_t s = 0; s < n; s++) {
      const float* stream = streams_.data() + (i * n + s) * hidden;
      kernels().add_scaled(x(i), stream, 1.f / static_cast<float>(n), hidden);
    }
  });
}

}  // namespace exo

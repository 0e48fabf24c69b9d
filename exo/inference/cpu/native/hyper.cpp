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

// Into before_, for the norm of what reads it; x_ becomes 0, to which that part adds its result.
void Model::collapse(const HyperConnection& connection) {
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

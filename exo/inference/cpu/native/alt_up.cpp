// A hidden state of several streams, and what stands beside attention and gates in Gemma 3n.
#include <cmath>
#include <cstring>

#include "model.hpp"
#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

namespace {

float root_mean_square(const float* x, int64_t count) {
  double sum = 0;
  for (int64_t d = 0; d < count; d++) sum += double{x[d]} * x[d];
  return static_cast<float>(std::sqrt(sum / static_cast<double>(count)));
}

}  // namespace

void Model::begin_streams() {
  const int64_t hidden = spec_.hidden, count = static_cast<int64_t>(streams->begin.size());
  grow(streams_, (count + 1) * rows_ * hidden);
  std::memcpy(streams_.data(), x_.data(), at_least(rows_ * hidden) * sizeof(float));
  for (int64_t s = 0; s < count; s++) {
    const MatrixPtr& w = streams->begin[at_least(s)];
    norm_rows(x_.data(), {}, {}, groups_of({w.get()}));
    run_linear({{w.get(), &normed_, 0, rows_, stream(s + 1, 0), hidden}}, spec_.precise);
  }
  each_row(rows_, [&](int64_t i) {
    const float size = root_mean_square(x(i), hidden);
    for (int64_t s = 1; s <= count; s++) {
      float* row = stream(s, i);
      const float factor = size / root_mean_square(row, hidden);
      for (int64_t d = 0; d < hidden; d++) row[d] *= factor;
    }
  });
}

void Model::end_streams() {
  const int64_t hidden = spec_.hidden, count = static_cast<int64_t>(streams->end.size());
  grow(y_, count * rows_ * hidden);
  for (int64_t s = 0; s < count; s++) {
    const MatrixPtr& w = streams->end[at_least(s)];
    norm_rows(stream(s + 1, 0), {}, {}, groups_of({w.get()}));
    float* out = y_.data() + s * rows_ * hidden;
    run_linear({{w.get(), &normed_, 0, rows_, out, hidden}}, spec_.precise);
  }
  each_row(rows_, [&](int64_t i) {
    const float* first = stream(0, i);
    const float size = root_mean_square(first, hidden);
    std::memcpy(x(i), first, at_least(hidden) * sizeof(float));
    for (int64_t s = 0; s < count; s++) {
      const float* row = y_.data() + (s * rows_ + i) * hidden;
      kernels().add_scaled(x(i), row, size / root_mean_square(row, hidden), hidden);
    }
    for (int64_t d = 0; d < hidden; d++) x(i)[d] /= static_cast<float>(count + 1);
  });
}

void Model::route_streams(const AltUp& up) {
  const int64_t hidden = spec_.hidden, count = up.router->rows;
  routed_.resize(rows_, hidden, {});
  grow(router_out_, rows_ * count);
  each_row(rows_, [&](int64_t i) {
    float* row = routed_.row(i);
    kernels().rms_norm(x(i), up.router_norm.data(), row, hidden, spec_.norm_eps);
    for (int64_t d = 0; d < hidden; d++) row[d] /= static_cast<float>(hidden);
  });
  run_linear({{up.router.get(), &routed_, 0, rows_, router_out_.data(), count}}, true);
  for (int64_t i = 0; i < rows_ * count; i++) {
    router_out_[at_least(i)] = same::tanh(router_out_[at_least(i)]);
  }
}

void Model::predict_streams(const AltUp& up) {
  const int64_t hidden = spec_.hidden, count = up.router->rows;
  std::memcpy(x_.data(), stream(streams->active, 0), at_least(rows_ * hidden) * sizeof(float));
  route_streams(up);
  each_row(rows_, [&](int64_t i) {
    const float* routed = router_out_.data() + i * count;
    thread_local Lines<float> before;
    grow(before, count * hidden);
    for (int64_t s = 0; s < count; s++) {
      std::memcpy(before.data() + s * hidden, stream(s, i), at_least(hidden) * sizeof(float));
    }
    for (int64_t to = 0; to < count; to++) {
      for (int64_t from = 0; from < count; from++) {
        float share = 0;
        const float* weights = up.predict.data() + (to * count + from) * count;
        for (int64_t m = 0; m < count; m++) share += weights[m] * routed[m];
        kernels().add_scaled(stream(to, i), before.data() + from * hidden, share, hidden);
      }
    }
    std::memcpy(x(i), stream(streams->active, i), at_least(hidden) * sizeof(float));
  });
}

void Model::correct_streams(const AltUp& up) {
  const int64_t hidden = spec_.hidden, count = up.router->rows;
  route_streams(up);
  each_row(rows_, [&](int64_t i) {
    const float* routed = router_out_.data() + i * count;
    float* news = x(i);
    const float* expected = stream(streams->active, i);
    for (int64_t d = 0; d < hidden; d++) news[d] -= expected[d];
    for (int64_t to = 0; to < count; to++) {
      float share = 0;
      for (int64_t m = 0; m < count; m++) share += up.correct[at_least(to * count + m)] * routed[m];
      kernels().add_scaled(stream(to, i), news, share + 1.f, hidden);
    }
    std::memcpy(news, stream(streams->active, i), at_least(hidden) * sizeof(float));
    for (int64_t d = 0; d < hidden && !up.scale.empty(); d++) news[d] *= up.scale[at_least(d)];
  });
}

// normed_ is what the attention read.
void Model::add_laurel(const AltUp& up) {
  const KernelTable& k = kernels();
  const int64_t hidden = spec_.hidden, rank = up.left->rows;
  gated_.resize(rows_, rank, groups_of({up.right.get()}));
  run_linear({{up.left.get(), &normed_, 0, rows_, gated_.row(0), rank}}, spec_.precise);
  each_row(rows_, [&](int64_t i) { gated_.quantize(i, 1); });
  grow(y_, rows_ * hidden);
  run_linear({{up.right.get(), &gated_, 0, rows_, y_.data(), hidden}}, spec_.precise);
  const float half = std::sqrt(0.5f);
  each_row(rows_, [&](int64_t i) {
    float* y = y_.data() + i * hidden;
    k.rms_norm(y, up.laurel_norm.data(), y, hidden, spec_.norm_eps);
    k.add_scaled(x(i), normed_.row(i), 1.f, hidden);
    k.add_scaled(x(i), y, 1.f, hidden);
    for (int64_t d = 0; d < hidden; d++) x(i)[d] *= half;
  });
}

}  // namespace exo

// Layers that remember a state of fixed size instead of attending: gated delta nets, state spaces,
// convolutions.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "model.hpp"
#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

namespace {

// Of a head's state: one task, and small enough for a first cache.
constexpr int kStateRows = 2 * kStateLanes;

}  // namespace

float* Model::rows_to_convolve(const Convolution& convolution, int64_t channels) {
  const int64_t before = convolution.taps - 1, slices = static_cast<int64_t>(slices_->size());
  grow(window_, (rows_ + slices * before) * channels);
  if (slices == 1) return window_.data() + before * channels;
  grow(in_, rows_ * channels);
  return in_.data();
}

void Model::convolve(const Convolution& convolution, int64_t channels, bool silu, int64_t state) {
  const KernelTable& k = kernels();
  const int64_t before = convolution.taps - 1;
  const size_t slices = slices_->size(), bytes = at_least(channels) * sizeof(float);
  grow(convolved_, rows_ * channels);
  const float* bias = convolution.bias.empty() ? nullptr : convolution.bias.data();
  // A slice's rows stand behind the last ones before it.
  const auto window = [&](size_t slice, int64_t row) {
    return window_.data() + (row + static_cast<int64_t>(slice) * before) * channels;
  };
  int64_t first = 0;
  for (size_t s = 0; s < slices; s++) {
    std::memcpy(window(s, first), state_[s] + state, bytes * at_least(before));
    first += (*slices_)[s].length;
  }
  if (slices > 1) {
    each_row(rows_, [&](int64_t i) {
      const size_t slice = row_[at_least(i)].slice;
      std::memcpy(window(slice, i + before), in_.data() + i * channels, bytes);
    });
  }
  each_row(rows_, [&](int64_t i) {
    k.convolve(window(row_[at_least(i)].slice, i), channels, convolution.weights.data(), bias,
               channels, convolution.taps, silu, convolved_.data() + i * channels);
  });
  first = 0;
  for (size_t s = 0; s < slices; s++) {
    first += (*slices_)[s].length;
    std::memcpy(state_[s] + state, window(s, first), bytes * at_least(before));
  }
}

void Model::short_convolution(const Layer& layer, int64_t state) {
  const ShortConvolution& conv = *layer.short_convolution;
  const int64_t channels = conv.x->rows;
  norm_for_mixer(layer, {conv.b.get(), conv.c.get(), conv.x.get()});
  float* in = rows_to_convolve(conv.convolution, channels);
  grow(up_, rows_ * channels);
  grow(z_, rows_ * channels);
  run_linear({{conv.x.get(), &normed_, 0, rows_, in, channels},
              {conv.b.get(), &normed_, 0, rows_, up_.data(), channels},
              {conv.c.get(), &normed_, 0, rows_, z_.data(), channels}},
             spec_.precise);
  each_row(rows_, [&](int64_t i) {
    for (int64_t c = i * channels; c < (i + 1) * channels; c++) in[c] *= up_[at_least(c)];
  });
  convolve(conv.convolution, channels, false, state);
  attended_.resize(rows_, channels, groups_of({conv.out.get()}));
  each_row(rows_, [&](int64_t i) {
    const float *z = z_.data() + i * channels, *y = convolved_.data() + i * channels;
    for (int64_t c = 0; c < channels; c++) attended_.row(i)[c] = z[c] * y[c];
    attended_.quantize(i, 1);
  });
  project_out(*conv.out, layer);
}

void Model::through_both(const Matrix& down, const Matrix& up, bool precise, float* out) {
  gated_.resize(rows_, down.rows, groups_of({&up}));
  run_linear({{&down, &normed_, 0, rows_, gated_.row(0), down.rows}}, precise);
  each_row(rows_, [&](int64_t i) { gated_.quantize(i, 1); });
  run_linear({{&up, &gated_, 0, rows_, out, up.rows}}, precise);
}

void Model::delta_net(const Layer& layer, int64_t state) {
  const KernelTable& k = kernels();
  const DeltaNet& net = *layer.delta_net;
  const int64_t heads = net.value_heads, values = net.value_dim, keys = net.key_dim;
  const int64_t key_width = net.key_heads * keys, width = heads * values, channels = net.channels();
  const auto part = [&](size_t i) { return i < net.qkv.size() ? net.qkv[i].get() : nullptr; };
  const MatrixPtr &z_first = net.z_down ? net.z_down : net.z,
                  &a_first = net.a_down ? net.a_down : net.a;
  norm_for_mixer(layer, {part(0), part(1), part(2), z_first.get(), a_first.get(), net.b.get()});
  float* in = rows_to_convolve(net.convolution, channels);
  std::vector<LinearJob> jobs;
  int64_t before = 0;
  for (const MatrixPtr& matrix : net.qkv) {
    jobs.push_back({matrix.get(), &normed_, 0, rows_, in + before, channels, true});
    before += matrix->rows;
  }
  if (before != channels) {
    throw std::invalid_argument("queries, keys and values of " + std::to_string(before) +
                                " rows where there should be " + std::to_string(channels) +
                                ": the weights are not what the configuration says");
  }
  grow(z_, rows_ * width);
  if (!net.z_down) jobs.push_back({net.z.get(), &normed_, 0, rows_, z_.data(), width});
  run_linear(jobs, spec_.precise);
  if (net.z_down) through_both(*net.z_down, *net.z, spec_.precise, z_.data());
  // A rounding of how fast a state fades adds up over all tokens.
  const int64_t fading = net.by_key ? heads * keys : heads;
  grow(up_, rows_ * fading);
  grow(router_out_, rows_ * heads);
  jobs = {{net.b.get(), &normed_, 0, rows_, router_out_.data(), heads}};
  if (!net.a_down) jobs.push_back({net.a.get(), &normed_, 0, rows_, up_.data(), fading});
  run_linear(jobs, true);
  if (net.a_down) through_both(*net.a_down, *net.a, true, up_.data());
  convolve(net.convolution, channels, true, state);

  attended_.resize(rows_, width, groups_of({net.out.get()}));
  if (state_steps_.size() < at_least(rows_ * heads)) state_steps_.resize(at_least(rows_ * heads));
  // Queries and keys of length 1; queries also over the square root of their size.
  const float shrink = 1.f / std::sqrt(static_cast<float>(keys));
  const std::vector<float> query_scale(at_least(keys), shrink * shrink);
  const std::vector<float> key_scale(at_least(keys), shrink);
  const float eps = 1e-6f * shrink * shrink;
  each_row(rows_, [&](int64_t i) {
    float* q = convolved_.data() + i * channels;
    for (int h = 0; h < net.key_heads; h++) {
      float *query = q + h * keys, *key = q + key_width + h * keys;
      k.rms_norm(query, query_scale.data(), query, keys, eps);
      k.rms_norm(key, key_scale.data(), key, keys, eps);
    }
    for (int64_t h = 0; h < heads; h++) {
      const int64_t key_head = net.tiled ? h % net.key_heads : h / (heads / net.key_heads);
      const int64_t of_keys = key_head * keys;
      const size_t at = at_least(i * heads + h);
      StateStep& step = state_steps_[at_least(h * rows_ + i)];
      step = {q + key_width + of_keys,        q + of_keys,
              q + 2 * key_width + h * values, 1.f,
              same::sigmoid(router_out_[at]), attended_.row(i) + h * values};
      const float rate = net.decay[at_least(h)];
      if (net.by_key) {
        float* decays = up_.data() + i * fading + h * keys;
        k.fade(decays, net.dt_bias.data() + h * keys, rate, net.fading_bound, keys);
        step.decays = decays;
      } else {
        step.decay = same::exp(-rate * same::softplus(up_[at] + net.dt_bias[at_least(h)]));
      }
    }
  });

  recur(heads, values, keys, state + (net.convolution.taps - 1) * channels,
        net.by_key ? Recurrence::kDeltaByKey : Recurrence::kDelta);

  each_row(rows_, [&](int64_t i) {
    float *out = attended_.row(i), *z = z_.data() + i * width;
    for (int64_t h = 0; h < heads; h++) {
      k.rms_norm(out + h * values, net.norm.data(), out + h * values, values, spec_.norm_eps);
    }
    k.gate(net.by_key || net.sigmoid_gate ? Activation::kSigmoid : Activation::kSilu, z, out,
           width);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t of_key_head = heads / net.key_heads;
      const int64_t grouped = h % net.key_heads * of_key_head + h / net.key_heads;
      const int64_t place = net.regroups ? grouped : h;
      std::memcpy(out + place * values, z + h * values, at_least(values) * sizeof(float));
    }
    attended_.quantize(i, 1);
  });
  project_out(*net.out, layer);
}

void Model::state_space(const Layer& layer, int64_t state) {
  const KernelTable& k = kernels();
  const StateSpace& space = *layer.state_space;
  const int64_t heads = space.heads, values = space.head_dim, keys = space.state_dim;
  const int64_t width = heads * values, channels = space.xbc->rows;
  norm_for_mixer(layer, {space.xbc.get(), space.gate.get(), space.dt.get()});
  float* in = rows_to_convolve(space.convolution, channels);
  grow(z_, rows_ * width);
  run_linear({{space.xbc.get(), &normed_, 0, rows_, in, channels},
              {space.gate.get(), &normed_, 0, rows_, z_.data(), width}},
             spec_.precise);
  // A rounding of how fast a state fades adds up over all tokens.
  grow(up_, rows_ * heads);
  run_linear({{space.dt.get(), &normed_, 0, rows_, up_.data(), heads}}, true);
  convolve(space.convolution, channels, true, state);

  attended_.resize(rows_, width, groups_of({space.out.get()}));
  if (state_steps_.size() < at_least(rows_ * heads)) state_steps_.resize(at_least(rows_ * heads));
  each_row(rows_, [&](int64_t i) {
    const float* x = convolved_.data() + i * channels;
    for (int64_t h = 0; h < heads; h++) {
      const float* b = x + width + h / (heads / space.groups) * keys;
      const float raw = same::softplus(up_[at_least(i * heads + h)] + space.dt_bias[at_least(h)]);
      const float dt = std::min(std::max(raw, space.least_step), space.most_step);
      state_steps_[at_least(h * rows_ + i)] = {b,
                                               b + space.groups * keys,
                                               x + h * values,
                                               same::exp(-space.decay[at_least(h)] * dt),
                                               dt,
                                               attended_.row(i) + h * values};
    }
  });
  recur(heads, values, keys, state + (space.convolution.taps - 1) * channels, Recurrence::kSum);

  const int64_t part = space.norm.empty() ? width : width / space.norm_groups;
  each_row(rows_, [&](int64_t i) {
    float *out = attended_.row(i), *z = z_.data() + i * width;
    const float* x = convolved_.data() + i * channels;
    for (int64_t h = 0; h < heads; h++) {
      k.add_scaled(out + h * values, x + h * values, space.skip[at_least(h)], values);
    }
    k.gate(Activation::kSilu, z, out, width);
    if (space.norm.empty()) std::memcpy(out, z, at_least(width) * sizeof(float));
    for (int64_t g = 0; g < width && !space.norm.empty(); g += part) {
      k.rms_norm(z + g, space.norm.data() + g, out + g, part, spec_.norm_eps);
    }
    attended_.quantize(i, 1);
  });
  project_out(*space.out, layer);
}

std::vector<int64_t> Model::first_rows() const {
  std::vector<int64_t> first(slices_->size());
  for (size_t s = 1; s < first.size(); s++) first[s] = first[s - 1] + (*slices_)[s - 1].length;
  return first;
}

void Model::recur(int64_t heads, int64_t values, int64_t keys, int64_t matrices, Recurrence kind) {
  const KernelTable& k = kernels();
  const int64_t parts = (values + kStateRows - 1) / kStateRows;
  const std::vector<int64_t> first = first_rows();
  const auto slices = static_cast<int64_t>(first.size());
  const auto run = [&](int64_t task) {
    const int64_t part = task % parts, head = task / parts % heads, s = task / parts / heads;
    const int64_t row = part * kStateRows, count = std::min<int64_t>(kStateRows, values - row);
    const int64_t tokens = (*slices_)[at_least(s)].length;
    thread_local std::vector<StateStep> steps;
    const StateStep* from = state_steps_.data() + head * rows_ + first[at_least(s)];
    steps.assign(from, from + tokens);
    for (StateStep& step : steps) {
      step.value += row;
      step.out += row;
    }
    float* matrix = state_[at_least(s)] + matrices + head * state_size(values, keys) + row * keys;
    k.recur(matrix, steps.data(), tokens, static_cast<int>(keys), count, kind);
  };
  thread_pool().run(slices * heads * parts, run);
}

}  // namespace exo

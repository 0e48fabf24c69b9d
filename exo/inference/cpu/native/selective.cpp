// Mamba's layers: a state of each channel that what goes in decides to keep.
#include <cstring>

#include "model.hpp"
#include "rows.hpp"

namespace exo {

void Model::selective_scan(const Layer& layer, int64_t state) {
  const KernelTable& k = kernels();
  const SelectiveScan& scan = *layer.selective_scan;
  const int64_t width = scan.channels(), rank = scan.rank();
  const int keys = scan.state_dim;
  const int64_t made = scan.step_b_c->rows;  // numbers of a token: of its step, b and c
  norm_for_mixer(layer, {scan.x.get(), scan.gate.get()});
  float* in = rows_to_convolve(scan.convolution, width);
  grow(z_, rows_ * width);
  run_linear({{scan.x.get(), &normed_, 0, rows_, in, width},
              {scan.gate.get(), &normed_, 0, rows_, z_.data(), width}},
             spec_.precise);
  convolve(scan.convolution, width, true, state);

  // A rounding of how fast a state fades adds up over all tokens.
  gated_.resize(rows_, width, {0});
  each_row(rows_, [&](int64_t i) {
    std::memcpy(gated_.row(i), convolved_.data() + i * width, at_least(width) * sizeof(float));
  });
  grow(router_out_, rows_ * made);
  run_linear({{scan.step_b_c.get(), &gated_, 0, rows_, router_out_.data(), made}}, true);
  gated_.resize(rows_, rank, {0});
  each_row(rows_, [&](int64_t i) {
    float* row = router_out_.data() + i * made;
    float *b = row + rank, *c = b + keys;
    if (!scan.step_norm.empty()) {
      k.rms_norm(row, scan.step_norm.data(), row, rank, scan.norm_eps);
      k.rms_norm(b, scan.b_norm.data(), b, keys, scan.norm_eps);
      k.rms_norm(c, scan.c_norm.data(), c, keys, scan.norm_eps);
    }
    std::memcpy(gated_.row(i), row, at_least(rank) * sizeof(float));
  });
  grow(up_, rows_ * width);
  run_linear({{scan.step.get(), &gated_, 0, rows_, up_.data(), width}}, true);

  attended_.resize(rows_, width, groups_of({scan.out.get()}));
  const int64_t blocks = width / kStateLanes;
  const std::vector<int64_t> first = first_rows();
  const auto slices = static_cast<int64_t>(first.size());
  const int64_t states = state + (scan.convolution.taps - 1) * width;
  thread_pool().run(slices * blocks, [&](int64_t task) {
    const int64_t s = task / blocks, block = task % blocks, channel = block * kStateLanes;
    const int64_t row = first[at_least(s)], at = row * width + channel;
    const float* b = router_out_.data() + row * made + rank;
    k.scan(state_[at_least(s)] + states + channel * keys,
           {scan.rates.data() + channel * keys, scan.skip.data() + channel, up_.data() + at,
            convolved_.data() + at, b, b + keys, attended_.row(0) + at, width, made},
           (*slices_)[at_least(s)].length, keys);
  });

  each_row(rows_, [&](int64_t i) {
    float *out = attended_.row(i), *z = z_.data() + i * width;
    k.gate(Activation::kSilu, z, out, width);
    std::memcpy(out, z, at_least(width) * sizeof(float));
    attended_.quantize(i, 1);
  });
  project_out(*scan.out, layer);
}

}  // namespace exo

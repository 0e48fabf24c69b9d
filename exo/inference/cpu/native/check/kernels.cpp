// A reduced kernel test without Python, for sanitizers and for processors that are only emulated:
// every instruction set this processor has, or those named, on shapes with ragged ends, against
// plain loops. Prints a digest of all that was computed, which is the same for every instruction
// set and processor.
//
// usage: kernel_check [ISA...]; exits with 1 and says what differed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../thread_pool.hpp"
#include "check.hpp"

namespace exo::check {

namespace {

std::vector<float> apply(const Matrix& w, const std::vector<float>& x, int64_t rows, bool precise) {
  Activations activations;
  activations.resize(rows, w.cols, {activation_group(w, precise)});
  std::copy_n(x.begin(), rows * w.cols, activations.row(0));
  activations.quantize(0, rows);
  std::vector<float> y(static_cast<size_t>(rows * w.rows));
  run_linear({{&w, &activations, 0, rows, y.data(), w.rows}}, precise);
  return y;
}

void check_linear(const MatrixPtr& w, const std::string& what) {
  const int64_t rows = w->rows, cols = w->cols, many = 67;  // more than are packed
  auto x = random_floats(static_cast<size_t>(many * cols));
  for (size_t i = 0; i < x.size(); i += 211) x[i] *= 40.f;  // groups with a fine part
  const auto bytes = apply(*w, x, many, false), floats = apply(*w, x, many, true);
  add_to_digest(bytes);
  add_to_digest(floats);
  std::vector<float> row(static_cast<size_t>(cols));
  double error = 0, size = 0, float_error = 0;
  for (int64_t n = 0; n < rows; n++) {
    w->read_row(n, row.data());
    for (int64_t m = 0; m < many; m++) {
      double sum = 0;
      for (int64_t k = 0; k < cols; k++) sum += double{row[k]} * x[m * cols + k];
      error += std::pow(bytes[m * rows + n] - sum, 2);
      float_error = std::fmax(float_error, std::fabs(floats[m * rows + n] - sum));
      size += sum * sum;
    }
  }
  expect(std::sqrt(error / size) < 0.02, "linear, " + what);
  expect(float_error < 1e-3 * std::sqrt(size / (rows * many)), "linear with floats, " + what);
  for (const int64_t few : {1, 3, 8, 17}) {
    const auto part = apply(*w, x, few, false);
    expect(std::equal(part.begin(), part.end(), bytes.begin()), "batch invariance, " + what);
  }
}

void check_scan() {
  const int lanes = kStateLanes, keys = 12, tokens = 5, apart = 2 * keys + 3;
  const auto random = [](int count) { return random_floats(static_cast<size_t>(count)); };
  auto rates = random(keys * lanes), state = random(keys * lanes);
  for (float& rate : rates) rate = std::fabs(rate);
  const auto skip = random(lanes), b_and_c = random(tokens * apart);
  const auto step = random(tokens * lanes), x = random(tokens * lanes);
  std::vector<float> out(static_cast<size_t>(tokens * lanes)), expected(state);
  kernels().scan(state.data(),
                 {rates.data(), skip.data(), step.data(), x.data(), b_and_c.data(),
                  b_and_c.data() + keys, out.data(), lanes, apart},
                 tokens, keys);
  add_to_digest(out);
  add_to_digest(state);
  for (int t = 0; t < tokens; t++) {
    for (int lane = 0; lane < lanes; lane++) {
      const double dt = std::log1p(std::exp(double{step[t * lanes + lane]}));
      double sum = skip[lane] * x[t * lanes + lane];
      for (int key = 0; key < keys; key++) {
        float& own = expected[key * lanes + lane];
        const double gain = dt * x[t * lanes + lane] * b_and_c[t * apart + key];
        own = static_cast<float>(own * std::exp(-rates[key * lanes + lane] * dt) + gain);
        sum += double{own} * b_and_c[t * apart + keys + key];
      }
      expect(std::fabs(out[t * lanes + lane] - sum) < 1e-4, "a selective scan");
    }
  }
}

// The kernels of recurrent layers against plain loops.
void check_recurrent_kernels() {
  const KernelTable& k = kernels();
  const int channels = 37, taps = 4;
  const auto x = random_floats(channels * taps), weights = random_floats(channels * taps);
  const auto bias = random_floats(channels);
  for (const bool silu : {false, true}) {
    std::vector<float> out(channels);
    k.convolve(x.data(), channels, weights.data(), bias.data(), channels, taps, silu, out.data());
    for (int c = 0; c < channels; c++) {
      double sum = bias[c];
      for (int t = 0; t < taps; t++) sum += double{weights[t * channels + c]} * x[t * channels + c];
      if (silu) sum /= 1 + std::exp(-sum);
      expect(std::fabs(out[c] - sum) < 1e-4, "convolution");
    }
  }
  check_scan();
  const int keys = 48, rows = 39, tokens = 5;  // of the last of three blocks some do not exist
  for (const auto kind : {Recurrence::kSum, Recurrence::kDelta, Recurrence::kDeltaByKey}) {
    const bool by_key = kind == Recurrence::kDeltaByKey;
    const auto random = random_floats(rows * keys);
    std::vector<double> plain(random.begin(), random.end());
    std::vector<float> state(static_cast<size_t>(state_size(rows, keys)));
    for (int r = 0; r < rows; r++) {
      for (int i = 0; i < keys; i++) {
        state[(r / kStateLanes * keys + i) * kStateLanes + r % kStateLanes] = random[r * keys + i];
      }
    }
    const auto key = random_floats(tokens * keys, 0.2f), query = random_floats(tokens * keys);
    const auto value = random_floats(tokens * rows);
    auto decays = random_floats(tokens * keys, 0.1f);
    for (float& decay : decays) decay = by_key ? 0.9f + decay : 0.9f;
    std::vector<float> out(tokens * rows);
    std::vector<StateStep> steps;
    for (int t = 0; t < tokens; t++) {
      steps.push_back({key.data() + t * keys, query.data() + t * keys, value.data() + t * rows,
                       0.9f, 0.5f, out.data() + t * rows, decays.data() + t * keys});
    }
    k.recur(state.data(), steps.data(), tokens, keys, rows, kind);
    add_to_digest(out);
    for (int t = 0; t < tokens; t++) {
      for (int r = 0; r < rows; r++) {
        double recalled = 0, sum = 0;
        for (int i = 0; i < keys; i++) {
          plain[r * keys + i] *= decays[t * keys + i];
          recalled += plain[r * keys + i] * key[t * keys + i];
        }
        if (kind == Recurrence::kSum) recalled = 0;
        const double change = 0.5 * (value[t * rows + r] - recalled);
        for (int i = 0; i < keys; i++) {
          double& place = plain[r * keys + i];
          place += change * key[t * keys + i];
          sum += place * query[t * keys + i];
        }
        expect(std::fabs(out[t * rows + r] - sum) < 1e-3, "a recurrent state");
      }
    }
  }
}

// What an indexer thinks of keys, against plain loops: of the second of two chunks.
void check_score_chunk() {
  const KernelTable& k = kernels();
  const int dim = 24, count = 13, keys = 37;
  for (const KVType type : {KVType::kFloat32, KVType::kFloat16, KVType::kInt8}) {
    const int64_t bytes = KVView::half_bytes(type, dim);
    std::vector<Buffer> pages;
    std::vector<uint8_t*> places;
    for (int p = 0; p < 2 * kChunkTokens / kPageTokens; p++) {
      pages.emplace_back(bytes);
      places.push_back(pages.back().data());
    }
    const auto stored = random_floats(keys * dim), queries = random_floats(count * dim);
    const auto weights = random_floats(count);
    for (int j = 0; j < keys; j++) {
      uint8_t* page = places[static_cast<size_t>((kChunkTokens + j) / kPageTokens)];
      k.store_key(stored.data() + j * dim, page, j % kPageTokens, dim, type);
    }
    std::vector<const float*> of_each;
    for (int i = 0; i < count; i++) of_each.push_back(queries.data() + i * dim);
    std::vector<float> out(48);
    k.score_chunk({places.data(), 0, bytes, type, dim, 0}, 1, of_each.data(), weights.data(), count,
                  keys, out.data());
    out.resize(keys);
    add_to_digest(out);
    for (int j = 0; j < keys; j++) {
      double all = 0;
      for (int i = 0; i < count; i++) {
        double sum = 0;
        for (int d = 0; d < dim; d++) sum += double{queries[i * dim + d]} * stored[j * dim + d];
        all += weights[i] * std::max(sum, 0.);
      }
      expect(std::fabs(out[j] - all) < (type == KVType::kInt8 ? 0.3 : 0.03), "an indexer's score");
    }
  }
}

void check_fading() {
  const int count = 37;
  for (const float bound : {0.f, -5.f}) {
    const auto x = random_floats(count, 20.f), bias = random_floats(count);
    auto faded = x;
    kernels().fade(faded.data(), bias.data(), 0.7f, bound, count);
    add_to_digest(faded);
    for (int i = 0; i < count; i++) {
      const double sum = double{x[i]} + bias[i];
      const double slow = bound < 0
                              ? bound / (1 + std::exp(-0.7 * sum))
                              : -0.7 * (std::max(sum, 0.) + std::log1p(std::exp(-std::fabs(sum))));
      expect(std::fabs(faded[i] - std::exp(slow)) < 1e-6, "how a state fades");
    }
  }
}

void check_layer_norm() {
  const int cols = 75;
  const auto x = random_floats(cols), weight = random_floats(cols), bias = random_floats(cols);
  double mean = 0, variance = 0;
  for (const float v : x) mean += v / cols;
  for (const float v : x) variance += (v - mean) * (v - mean) / cols;
  for (const bool shifts : {false, true}) {
    std::vector<float> out(x);
    kernels().layer_norm(out.data(), weight.data(), shifts ? bias.data() : nullptr, out.data(),
                         cols, 1e-5f);
    add_to_digest(out);
    for (int c = 0; c < cols; c++) {
      const double expected =
          (x[c] - mean) / std::sqrt(variance + 1e-5) * weight[c] + (shifts ? bias[c] : 0.);
      expect(std::fabs(out[c] - expected) < 1e-4, "layer norm");
    }
  }
}

// One rounding, also where two would differ: next to the middle of two floats, and below the normal
// ones.
void check_fused_steps() {
  for (const float scale : {1.f + 0x1p-12f, 1.f - 0x1p-23f, 0x1p-24f, -0x1.8p-24f, 0x1.2p-130f}) {
    const auto x = random_floats(4096);
    auto y = random_floats(4096);
    for (size_t i = 0; i < y.size(); i++) {
      const float step = std::ldexp(1.f, static_cast<int>(generator() % 40) - 30);
      y[i] = i % 2 == 0 ? y[i] * step : std::floor(y[i] * 8.f) * step;
    }
    for (const float size : {1.f, 0x1p-126f}) {
      std::vector<float> sum(x);
      for (float& value : sum) value *= size;
      std::vector<float> expected(sum), terms(y);
      if (size < 1.f) {
        for (float& term : terms) term *= 0x1p-100f;
      }
      for (size_t i = 0; i < sum.size(); i++) expected[i] = std::fma(terms[i], scale, sum[i]);
      kernels().add_scaled(sum.data(), terms.data(), scale, 4096);
      expect(std::memcmp(sum.data(), expected.data(), sum.size() * 4) == 0, "a fused step");
    }
  }
}

void check_activations() {
  const auto up = random_floats(75);
  for (const auto activation :
       {Activation::kSilu, Activation::kGeluTanh, Activation::kGelu, Activation::kClampedSwiglu,
        Activation::kSigmoid, Activation::kRelu2}) {
    for (const float* linear : {up.data(), static_cast<const float*>(nullptr)}) {
      auto gate = random_floats(75, 5.f);
      kernels().gate(activation, gate.data(), linear, 75);
      for (const float value : gate) expect(std::isfinite(value), "an activation");
      add_to_digest(gate);
    }
  }
}

void check_xielu() {
  const Xielu n{1.3f, 0.9f, 0.5f, -1e-6f};
  const auto x = random_floats(75, 20.f);
  auto out = x;
  kernels().xielu(out.data(), n, 75);
  add_to_digest(out);
  for (size_t i = 0; i < x.size(); i++) {
    const double v = x[i];
    const double curve =
        v > 0 ? n.alpha_p * v * v : n.alpha_n * (std::expm1(std::min<double>(v, n.eps)) - v);
    expect(std::fabs(out[i] - (curve + n.beta * v)) < 1e-5 * (1 + v * v), "xIELU");
  }
}

void check_formats() {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group : {32, 64, 128}) {
      check_linear(random_affine(21, 128, bits, group),
                   std::to_string(bits) + " bits, group " + std::to_string(group));
    }
  }
  for (const int group : {32, 128, 1000}) {
    check_linear(random_float8(21, 200, group), "float8, group " + std::to_string(group));
  }
  check_linear(random_float4(21, 208), "float4");
  for (const GgmlFormat& format : exo::ggml_formats()) {
    check_linear(random_ggml(format, 21, 256), format.name);
  }
  // Sums of several parts.
  check_linear(random_affine(18, 256, 8, 32), "8 parts");
  check_linear(random_dense(18, 72), "8 parts, dense");
  check_linear(random_bfloat16(53, 96), "8 parts, bfloat16");
  check_linear(random_bfloat16(21, 75), "bfloat16, columns without a pair");
  for (const GgmlFormat& format : exo::ggml_formats()) {
    if (std::string(format.name) == "Q4_K") check_linear(random_ggml(format, 18, 1024), "4 parts");
  }
}

// Of two ways to the same results either may be found the quicker one.
void check_quicker() {
  exo::thread_pool().set_threads(1);  // which is given all blocks at once
  for (const GgmlFormat& format : exo::ggml_formats()) {
    if (format.name != "Q6_K" && format.name != "IQ4_XS" && format.name != "MXFP4") continue;
    const MatrixPtr w = random_ggml(format, 64, 512);
    const auto x = random_floats(size_t{30} * 512);
    std::vector<float> found[3];
    const char* const vendors[3] = {"amd", "intel", ""};
    for (int i = 0; i < 3; i++) {
      exo::choose_vendor(vendors[i]);
      found[i] = apply(*w, x, 30, false);
    }
    expect(found[0] == found[1] && found[1] == found[2], "either way, " + format.name);
  }
}

}  // namespace

}  // namespace exo::check

int main(int count, char** names) {
  using namespace exo::check;
  const int levels[exo::kGrids] = {3, 3, 3, 8, 8, 3},
            sizes[exo::kGrids] = {2048, 4096, 8192, 1024, 2048, 16384};
  for (int i = 0; i < exo::kGrids; i++) {
    auto places = random_bytes(static_cast<size_t>(sizes[i]));
    for (uint8_t& place : places) place = static_cast<uint8_t>(place % levels[i]);
    exo::set_grid(static_cast<exo::Grid>(i), std::vector<uint8_t>(places.begin(), places.end()));
  }
  const auto digest_of = [](const std::string& isa, const std::string& vendor) {
    exo::choose_kernels(isa);
    exo::choose_vendor(vendor);
    generator.seed(1);
    digest = 0xcbf29ce484222325;
    exo::thread_pool().set_threads(3);  // how they share work matters
    check_formats();
    check_models();
    check_recurrent_kernels();
    check_fading();
    check_score_chunk();
    check_layer_norm();
    check_activations();
    check_xielu();
    check_fused_steps();
    check_states();
    return digest;
  };
  for (const std::string& isa : exo::runnable_kernels()) {
    if (count > 1 && std::find(names + 1, names + count, isa) == names + count) continue;
    const auto found = digest_of(isa, "intel");
#if defined(__x86_64__)
    expect(digest_of(isa, "amd") == found, isa + " as on either vendor's processors");
#endif
    check_quicker();
    std::printf("%s: %016llx\n", isa.c_str(), static_cast<unsigned long long>(found));
  }
  return 0;
}

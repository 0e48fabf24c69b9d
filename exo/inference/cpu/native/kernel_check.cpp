// A reduced kernel test without Python, for sanitizers and for processors that are only emulated:
// every instruction set this processor has, on shapes with ragged ends, against plain loops. Prints
// a digest of all that was computed, which is the same for every instruction set and processor.
//
// usage: kernel_check; exits with 1 and says what differed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ggml.hpp"
#include "model.hpp"
#include "thread_pool.hpp"

namespace {

using namespace exo;

std::mt19937 generator(1);

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAILED on %s: %s\n", kernels().name, what.c_str());
  std::exit(1);
}

std::vector<uint8_t> random_bytes(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

// About normal, and the same on every machine: the library's distributions need not be.
std::vector<float> random_floats(size_t count, float size = 1.f) {
  std::vector<float> values(count);
  for (auto& value : values) {
    float sum = -2.f;
    for (int i = 0; i < 4; i++) sum += static_cast<float>(generator() >> 16) * 0x1p-16f;
    value = sum * 1.7320508f * size;
  }
  return values;
}

uint64_t digest;  // FNV-1a, 64 bits

void add_to_digest(const std::vector<float>& values) {
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 32; i += 8) digest = (digest ^ (bits >> i & 255)) * 0x100000001b3;
  }
}

const uint8_t* as_bytes(const std::vector<float>& values) {
  return reinterpret_cast<const uint8_t*>(values.data());
}

MatrixPtr random_affine(int64_t rows, int64_t cols, int bits, int group) {
  const auto values = random_bytes(static_cast<size_t>(rows * cols * bits / 8));
  const auto scales = random_floats(static_cast<size_t>(rows * cols / group), 0.02f);
  const auto offsets = random_floats(static_cast<size_t>(rows * cols / group), 0.02f);
  const AffineSource source{values.data(), as_bytes(scales), as_bytes(offsets), DType::kFloat32};
  return pack_affine(source, rows, cols, {bits}, group);
}

std::vector<float> apply(const Matrix& w, const std::vector<float>& x, int64_t rows, bool precise) {
  Activations activations;
  activations.resize(rows, w.cols, {activation_group(w, precise)});
  std::copy_n(x.begin(), rows * w.cols, activations.row(0));
  activations.quantize(0, rows);
  std::vector<float> y(static_cast<size_t>(rows * w.rows));
  run_linear({{&w, &activations, 0, rows, y.data(), w.rows}}, precise);
  return y;
}

// A format of GGUF; small bytes, so that what is a scale is no infinity.
MatrixPtr random_ggml(const GgmlFormat& format, int64_t rows, int64_t cols) {
  auto data = random_bytes(static_cast<size_t>(rows * cols / format.cols * format.bytes));
  for (auto& byte : data) byte &= 0x3f;
  return pack_ggml(data.data(), format.name, rows, cols);
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

MatrixPtr random_dense(int64_t rows, int64_t cols) {
  const auto values = random_floats(static_cast<size_t>(rows * cols), 0.1f);
  return pack_dense({as_bytes(values), DType::kFloat32, cols, 1}, rows, cols);
}

MatrixPtr random_bfloat16(int64_t rows, int64_t cols) {
  const auto values = random_floats(static_cast<size_t>(rows * cols), 0.1f);
  std::vector<uint16_t> halves(values.size());
  for (size_t i = 0; i < values.size(); i++)
    std::memcpy(&halves[i], as_bytes(values) + 4 * i + 2, 2);
  const auto* data = reinterpret_cast<const uint8_t*>(halves.data());
  return pack_dense({data, DType::kBFloat16, cols, 1}, rows, cols);
}

// The last group is shorter.
MatrixPtr random_float8(int64_t rows, int64_t cols, int group) {
  const auto values = random_bytes(static_cast<size_t>(rows * cols));
  const auto scales = random_floats(static_cast<size_t>(rows * ((cols + group - 1) / group)));
  return pack_float8(values.data(), scales.data(), rows, cols, group);
}

MatrixPtr random_float4(int64_t rows, int64_t cols) {
  const auto values = random_bytes(static_cast<size_t>(rows * cols / 2));
  const auto scales = random_bytes(static_cast<size_t>(rows * cols / kFloat4Cols));
  return pack_float4(values.data(), scales.data(), 0.3f, rows, cols);
}

// Two layers as Gemma 4 has them: one reads what the first cached, and something of the tokens; one
// has heads of its own width, whose values are its keys, and norms around each part of a mixture.
void add_gemma_layers(Model& model) {
  const int dim = model.spec().head_dim, wide = dim + 24, tokens = 32;
  Layer reader = model.layers.front();
  reader.k = reader.v = nullptr;
  reader.k_norm.clear();
  reader.kv_from = 0, reader.scale = 0.5f;
  Layer mixed = model.layers.back();
  mixed.kv_heads = 1, mixed.head_dim = wide;
  mixed.q_norm = mixed.k_norm = mixed.v_norm = std::vector<float>(static_cast<size_t>(wide), 1.f);
  mixed.q = random_affine(6 * wide, 64, 4, 32), mixed.k = random_affine(wide, 64, 8, 64);
  mixed.v = nullptr, mixed.o = random_dense(64, 6 * wide);
  mixed.gate = reader.gate, mixed.up = reader.up, mixed.down = reader.down;
  mixed.expert_scales = random_floats(5);
  const std::vector<float> ones(64, 1.f);
  mixed.mixture_norms = std::make_shared<MixtureNorms>(MixtureNorms{ones, ones, ones, ones});
  for (const Layer& layer : {reader, mixed}) model.layers.push_back(layer);
  for (Layer& layer : model.layers) {
    layer.token_input = std::make_shared<TokenInput>(
        TokenInput{random_affine(tokens, 64, 4, 32), random_affine(64, tokens, 4, 32), ones});
  }
  const int64_t all = tokens * static_cast<int64_t>(model.layers.size());
  model.token_inputs = std::make_shared<TokenInputs>();
  model.token_inputs->embedding = random_affine(50, all, 4, 32);
  model.token_inputs->projection = random_affine(all, 64, 4, 32);
  model.token_inputs->norm = std::vector<float>(tokens, 1.f);
}

// As in Gemma 3n: three streams, of which the second is computed with.
void add_streams(Model& model) {
  constexpr int streams = 3;
  model.streams = std::make_shared<Streams>();
  model.streams->active = 1;
  for (int i = 1; i < streams; i++) {
    model.streams->begin.push_back(random_affine(64, 64, 4, 32));
    model.streams->end.push_back(random_affine(64, 64, 8, 32));
  }
  for (Layer& layer : model.layers) {
    AltUp up;
    up.router = random_dense(streams, 64), up.router_norm = std::vector<float>(64, 1.f);
    up.predict = random_floats(streams * streams * streams, 0.1f);
    up.correct = random_floats(streams * streams, 0.1f), up.scale = random_floats(64);
    up.left = random_affine(32, 64, 4, 32), up.right = random_affine(64, 32, 4, 32);
    up.laurel_norm = std::vector<float>(64, 1.f);
    layer.alt_up = std::make_shared<AltUp>(std::move(up));
    layer.sparse = true, layer.deviations = 0.3f;
  }
}

// A model with everything in it: windows, sinks, soft caps, experts, odd widths.
Model random_model(int kv_bits, int head_dim) {
  Spec spec;
  spec.hidden = 64, spec.heads = 6, spec.kv_heads = 2, spec.head_dim = head_dim;
  spec.kv_bits = kv_bits;
  spec.attention_scale = 0.2f, spec.attention_soft_cap = 30.f, spec.logits_soft_cap = 20.f;
  spec.experts_per_token = 2, spec.cache_limit_bytes = 1 << 26;
  Model model(spec);
  Rope rope;
  for (int i = 0; i < 10; i++) rope.frequencies.push_back(1.f / static_cast<float>(1 + i * i));
  model.ropes = {rope};
  for (int i = 0; i < 2; i++) {
    Layer layer;
    layer.attention_norm = layer.mlp_norm = std::vector<float>(64, 1.f);
    layer.q_norm = layer.k_norm = std::vector<float>(static_cast<size_t>(head_dim), 1.f);
    layer.q = random_affine(6 * head_dim, 64, 4, 32);
    layer.k = random_affine(2 * head_dim, 64, 8, 64);
    layer.v = random_affine(2 * head_dim, 64, 3, 32), layer.o = random_dense(64, 6 * head_dim);
    layer.rope = 0, layer.window = i == 0 ? 9 : 0;
    layer.sinks = random_floats(6);
    if (i == 0) {
      layer.gate = random_affine(96, 64, 6, 32), layer.up = random_affine(96, 64, 2, 32);
      layer.down = random_affine(64, 96, 5, 32);
    } else {
      layer.router = random_dense(5, 64);
      for (int e = 0; e < 5; e++) {
        layer.experts.push_back({random_affine(32, 64, 4, 64), random_affine(32, 64, 4, 64),
                                 random_affine(64, 32, 4, 32)});
      }
    }
    model.layers.push_back(layer);
  }
  model.embedding = model.head = random_affine(50, 64, 8, 32);
  model.final_norm = std::vector<float>(64, 1.f);
  add_gemma_layers(model);
  add_streams(model);
  return model;
}

void check_model(int kv_bits, int head_dim) {
  Model model = random_model(kv_bits, head_dim);
  const int length = 300;
  std::vector<int32_t> tokens(length);
  for (auto& token : tokens) token = static_cast<int32_t>(generator() % 50);
  std::vector<float> whole(50), piece(100);
  model.forward({{"whole", 0, length, true}}, tokens.data(), nullptr, whole.data());
  for (int at = 0; at < length; at += 60) {
    // Shares its steps with a sequence that is cut back again and again.
    std::vector<int32_t> both(tokens.begin() + at, tokens.begin() + at + 60);
    both.insert(both.end(), {1, 2, 3});
    model.forward({{"pieces", at, 60, true}, {"other", at == 0 ? 0 : 2, 3, true}}, both.data(),
                  nullptr, piece.data());
  }
  add_to_digest(whole);
  expect(std::equal(whole.begin(), whole.end(), piece.begin()), "a model's batch invariance");
  for (const float logit : whole) expect(std::isfinite(logit), "finite logits");
  try {
    model.forward({{"unknown", 5, 1, true}}, tokens.data(), nullptr, whole.data());
    expect(false, "a cache miss is an error");
  } catch (const CacheMissError&) {
  }
  model.release("whole");
  model.release("pieces");
  model.release("other");
  expect(model.cache_bytes() == 0, "pages are given back");
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

// Layers that remember a state, attention over latents, an expert for every token, layers of one
// part only, gates that are missing.
Model recurrent_model(int kv_bits) {
  Spec spec;
  spec.hidden = 64, spec.heads = 3, spec.kv_heads = 1, spec.head_dim = 48;
  spec.attention_scale = 0.2f, spec.cache_limit_bytes = 1 << 26;
  spec.experts_per_token = 2, spec.routing = Routing::kSigmoidSummed1;
  spec.weighs_inputs = true, spec.kv_bits = kv_bits;
  spec.expert_groups = 3, spec.groups_per_token = 2, spec.judged_per_group = 2;
  Model model(spec);
  model.ropes = {{{1.f, 0.3f, 0.1f, 0.03f}, 1.f, true}};
  const auto convolution = [](int channels) {
    return Convolution{random_floats(static_cast<size_t>(3 * channels)), {}, 3};
  };
  model.layers.resize(9);
  for (Layer& layer : model.layers) {
    layer.attention_norm = layer.mlp_norm = std::vector<float>(64, 1.f);
    layer.gate = random_affine(96, 64, 6, 32), layer.up = random_affine(96, 64, 4, 32);
    layer.down = random_affine(64, 96, 5, 32);
  }
  DeltaNet net;
  net.qkv = {random_affine(64 + 128, 64, 4, 32)};
  net.z = random_affine(128, 64, 4, 32), net.out = random_affine(64, 128, 4, 64);
  net.a = random_dense(4, 64), net.b = random_dense(4, 64);
  net.convolution = convolution(64 + 128);
  net.decay = {1.f, 2.f, 0.5f, 0.1f}, net.dt_bias = random_floats(4);
  net.norm = std::vector<float>(32, 1.f);
  net.key_heads = 2, net.value_heads = 4, net.key_dim = 16, net.value_dim = 32;
  model.layers[0].delta_net = std::make_shared<DeltaNet>(net);
  net.by_key = true;
  net.qkv = {random_affine(64, 64, 4, 32), random_affine(64, 64, 6, 32),
             random_affine(128, 64, 4, 32)};
  net.z_down = random_affine(32, 64, 4, 32), net.z = random_affine(128, 32, 4, 32);
  net.a_down = random_dense(32, 64), net.a = random_dense(64, 32);
  net.convolution = convolution(64 + 64 + 128);
  net.key_heads = 4, net.dt_bias = random_floats(64);
  model.layers[6].delta_net = std::make_shared<DeltaNet>(std::move(net));
  ShortConvolution conv{random_affine(64, 64, 4, 32), random_affine(64, 64, 4, 32),
                        random_affine(64, 64, 4, 32), random_affine(64, 64, 8, 32),
                        convolution(64)};
  model.layers[1].short_convolution = std::make_shared<ShortConvolution>(std::move(conv));
  LatentAttention latent;
  latent.nope = 32, latent.turned = 8, latent.rank = 32, latent.value_dim = 20;
  latent.q_b = random_affine(3 * 40, 64, 4, 32), latent.kv_a = random_affine(40, 64, 8, 32);
  latent.kv_a_norm = std::vector<float>(32, 1.f);
  for (int h = 0; h < 3; h++) {
    latent.embed.push_back(random_affine(32, 32, 4, 32));
    latent.unembed.push_back(random_affine(20, 32, 4, 32));
  }
  Layer& last = model.layers[2];
  last.latent = std::make_shared<LatentAttention>(latent);
  last.output_gate = random_affine(3, 64, 4, 32);
  // An indexer chooses for two layers, of tokens that come late.
  latent.q_a = random_affine(32, 64, 4, 32), latent.q_b = random_affine(3 * 40, 32, 4, 32);
  latent.q_a_norm = std::vector<float>(32, 1.f);
  latent.most = 70;
  for (const size_t number : {7, 8}) {
    Layer& sparse = model.layers[number];
    if (number == 7) {
      Indexer indexer;
      indexer.q = random_affine(5 * 24, 32, 4, 32), indexer.k = random_affine(24, 64, 4, 32);
      indexer.weights = random_dense(5, 64);
      indexer.k_norm = std::vector<float>(24, 1.f), indexer.k_norm_bias = random_floats(24);
      indexer.heads = 5, indexer.dim = 24;
      latent.indexer = std::make_shared<Indexer>(std::move(indexer));
    }
    sparse.latent = std::make_shared<LatentAttention>(latent);
    sparse.rope = 0, sparse.o = random_dense(64, 60);
    latent.indexer = nullptr;
  }
  last.rope = 0, last.o = random_dense(64, 60), last.router = random_dense(6, 64);
  last.router_bias = random_floats(6), last.shared_gate = random_dense(1, 64);
  for (int e = 0; e < 6; e++) {
    last.experts.push_back(
        {random_affine(32, 64, 4, 64), random_affine(32, 64, 4, 64), random_affine(64, 32, 4, 32)});
  }
  StateSpace space;
  space.heads = 4, space.groups = 2, space.head_dim = 24, space.state_dim = 32;
  space.norm_groups = 2;
  space.xbc = random_affine(96 + 128, 64, 4, 32), space.gate = random_affine(96, 64, 4, 32);
  space.dt = random_dense(4, 64), space.out = random_affine(64, 96, 4, 32);
  space.convolution = convolution(96 + 128);
  space.decay = {1.f, 2.f, 0.5f, 0.1f}, space.dt_bias = random_floats(4);
  space.skip = random_floats(4), space.norm = std::vector<float>(96, 1.f);
  Layer& alone = model.layers[3];
  alone.state_space = std::make_shared<StateSpace>(std::move(space));
  alone.gate = alone.up = alone.down = nullptr;
  model.layers[4].gate = nullptr;
  Layer& both = model.layers[5];
  both.parallel = true, both.window = 70, both.in_chunks = true;
  both.query_growth = 0.1f, both.query_span = 30, both.query_ahead = 1;
  both.value_dim = 20, both.value_scale = 0.7f;
  both.q = random_affine(144, 64, 4, 32), both.o = random_dense(64, 60);
  both.k = random_affine(48, 64, 4, 32), both.v = random_affine(20, 64, 4, 32);
  both.gate = nullptr, both.router = random_dense(6, 64);
  for (int e = 0; e < 6; e++) {
    both.experts.push_back({nullptr, random_affine(32, 64, 4, 64), random_affine(64, 32, 4, 32)});
  }
  model.embedding = model.head = random_affine(50, 64, 8, 32);
  model.final_norm = std::vector<float>(64, 1.f);
  return model;
}

// Several hidden states of a token, attention to a window and to entries, experts that tokens tell;
// attention over latents to pools of tokens.
Model compressed_model(int kv_bits) {
  Spec spec;
  spec.hidden = 64, spec.heads = 4, spec.kv_heads = 1, spec.head_dim = 32;
  spec.attention_scale = 0.2f, spec.cache_limit_bytes = 1 << 26;
  spec.experts_per_token = 2, spec.routing = Routing::kRootSoftplusSummed1;
  spec.streams = 3, spec.limits_inputs = true, spec.kv_bits = kv_bits;
  Model model(spec);
  model.ropes = {{{1.f, 0.3f, 0.1f, 0.03f}, 1.f, true}};
  const auto connection = [](int rows) {
    HyperConnection made{random_dense(rows, 3 * 64), random_floats(static_cast<size_t>(rows)),
                         random_floats(static_cast<size_t>(rows))};
    return std::make_shared<HyperConnection>(std::move(made));
  };
  const auto compressor = [](int dim, int ratio, bool overlaps) {
    const int width = overlaps ? 2 * dim : dim;
    Compressor made{random_affine(width, 64, 4, 32),
                    random_affine(width, 64, 8, 32),
                    random_floats(static_cast<size_t>(ratio * width)),
                    std::vector<float>(static_cast<size_t>(dim), 1.f),
                    dim,
                    ratio,
                    overlaps};
    return std::make_shared<Compressor>(std::move(made));
  };
  model.layers.resize(4);
  for (size_t l = 0; l < 4; l++) {
    Layer& layer = model.layers[l];
    layer.attention_norm = layer.mlp_norm = std::vector<float>(64, 1.f);
    layer.attention_streams = connection(15), layer.mlp_streams = connection(15);
    CompressedAttention own;
    own.dim = 32, own.window = 37, own.most = 5;
    own.q_a = random_affine(32, 64, 4, 32), own.q_b = random_affine(128, 32, 4, 32);
    own.kv = random_affine(32, 64, 8, 32);
    own.q_a_norm = own.kv_norm = std::vector<float>(32, 1.f);
    own.out = {random_affine(20, 64, 4, 32), random_affine(20, 64, 4, 32)};
    if (l > 0) own.compressor = compressor(32, l == 1 ? 4 : 17, l == 1);
    if (l == 1) {
      own.index_compressor = compressor(24, 4, true);
      Indexer indexer;
      indexer.q = random_affine(3 * 24, 32, 4, 32), indexer.weights = random_dense(3, 64);
      indexer.heads = 3, indexer.dim = 24;
      own.indexer = std::make_shared<Indexer>(std::move(indexer));
    }
    if (l < 3) {
      layer.compressed = std::make_shared<CompressedAttention>(std::move(own));
      layer.rope = 0, layer.sinks = random_floats(4), layer.o = random_dense(64, 40);
    } else {
      LatentAttention latent;
      latent.nope = 16, latent.rank = 32, latent.value_dim = 20, latent.most = 12, latent.pool = 3;
      latent.q_a = random_affine(32, 64, 4, 32), latent.q_b = random_affine(4 * 16, 32, 4, 32);
      latent.kv_a = random_affine(32, 64, 8, 32);
      latent.q_a_norm = latent.kv_a_norm = std::vector<float>(32, 1.f);
      for (int h = 0; h < 4; h++) {
        latent.embed.push_back(random_dense(32, 16));
        latent.unembed.push_back(random_affine(20, 32, 4, 32));
      }
      Indexer indexer;
      indexer.q = random_affine(3 * 24, 32, 4, 32), indexer.k = random_affine(24, 64, 4, 32);
      indexer.weights = random_dense(3, 64);
      indexer.k_norm = std::vector<float>(24, 1.f), indexer.k_norm_bias = random_floats(24);
      indexer.heads = 3, indexer.dim = 24;
      Compressor pools{nullptr, random_dense(24, 64), random_floats(3 * 24), {}, 24, 3, false};
      indexer.pools = std::make_shared<Compressor>(std::move(pools));
      latent.indexer = std::make_shared<Indexer>(std::move(indexer));
      layer.latent = std::make_shared<LatentAttention>(std::move(latent));
      layer.o = random_dense(64, 80);
    }
    layer.router = random_dense(6, 64), layer.expert_limit = layer.limit = 0.5f;
    for (int token = 0; l == 0 && token < 2 * 50; token++) {
      layer.experts_of_tokens.push_back((token / 2 + token % 2) % 6);
    }
    layer.gate = random_affine(32, 64, 6, 32), layer.up = random_affine(32, 64, 4, 32);
    layer.down = random_affine(64, 32, 5, 32);
    for (int e = 0; e < 6; e++) {
      layer.experts.push_back({random_affine(32, 64, 4, 64), random_affine(32, 64, 4, 64),
                               random_affine(64, 32, 4, 32)});
    }
  }
  model.last_streams = connection(3);
  model.embedding = model.head = random_affine(50, 64, 8, 32);
  model.final_norm = std::vector<float>(64, 1.f);
  return model;
}

void check_states(Model model) {
  const int length = 120;
  std::vector<int32_t> tokens(length);
  for (auto& token : tokens) token = static_cast<int32_t>(generator() % 50);
  std::vector<float> whole(50), piece(50);
  model.forward({{"whole", 0, length, true}}, tokens.data(), nullptr, whole.data());
  for (int at = 0; at < length; at += 40) {
    const bool ends = at + 40 == length;
    model.forward({{"pieces", at, 40, ends, at == 0}}, tokens.data() + at, nullptr, piece.data());
  }
  add_to_digest(whole);
  expect(std::equal(whole.begin(), whole.end(), piece.begin()), "a recurrent batch invariance");
  model.take_over("again", "pieces", 40);  // from the moment that was kept
  model.forward({{"again", 40, 80, true}}, tokens.data() + 40, nullptr, piece.data());
  expect(std::equal(whole.begin(), whole.end(), piece.begin()), "from a moment that was kept");
  for (const float logit : whole) expect(std::isfinite(logit), "finite logits");
  try {
    model.take_over("never", "pieces", 50);
    expect(false, "a moment that was not kept is an error");
  } catch (const CacheMissError&) {
  }
  for (const char* name : {"whole", "pieces", "again"}) model.release(name);
  expect(model.cache_bytes() == 0, "pages and states are given back");
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

}  // namespace

int main() {
  const int levels[exo::kGrids] = {3, 3, 3, 8, 8, 3},
            sizes[exo::kGrids] = {2048, 4096, 8192, 1024, 2048, 16384};
  for (int i = 0; i < exo::kGrids; i++) {
    auto places = random_bytes(static_cast<size_t>(sizes[i]));
    for (uint8_t& place : places) place = static_cast<uint8_t>(place % levels[i]);
    exo::set_grid(static_cast<exo::Grid>(i), std::vector<uint8_t>(places.begin(), places.end()));
  }
  for (const std::string& isa : exo::runnable_kernels()) {
    exo::choose_kernels(isa);
    generator.seed(1);
    digest = 0xcbf29ce484222325;
    exo::thread_pool().set_threads(3);  // how they share work matters
    check_formats();
    check_model(16, 20);
    check_model(8, 72);  // a group, and a part of one
    check_recurrent_kernels();
    check_fading();
    check_score_chunk();
    check_layer_norm();
    check_activations();
    check_xielu();
    check_fused_steps();
    for (const int bits : {16, 8, 32}) check_states(recurrent_model(bits));
    for (const int bits : {16, 8, 32}) check_states(compressed_model(bits));
    std::printf("%s: %016llx\n", isa.c_str(), static_cast<unsigned long long>(digest));
  }
  return 0;
}

// Models of every kind of layer, small and random, against themselves: a token is the same decoded
// or prefilled, in pieces, from a moment that was kept.
#include <algorithm>

#include "check.hpp"

namespace exo::check {

namespace {

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
      layer.attention_inner_norm = random_floats(static_cast<size_t>(6 * head_dim));
      layer.mlp_inner_norm = random_floats(96);
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
  model.check_sizes();
  const int length = 150, step = 30;  // more than two pages
  std::vector<int32_t> tokens(length);
  for (auto& token : tokens) token = static_cast<int32_t>(generator() % 50);
  std::vector<float> whole(50), piece(100);
  model.forward({{"whole", 0, length, true}}, tokens.data(), nullptr, whole.data());
  for (int at = 0; at < length; at += step) {
    // Shares its steps with a sequence that is cut back again and again.
    std::vector<int32_t> both(tokens.begin() + at, tokens.begin() + at + step);
    both.insert(both.end(), {1, 2, 3});
    model.forward({{"pieces", at, step, true}, {"other", at == 0 ? 0 : 2, 3, true}}, both.data(),
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
  model.layers.resize(10);
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
  SelectiveScan scan;
  scan.x = random_affine(48, 64, 4, 32), scan.gate = random_affine(48, 64, 4, 32);
  scan.step_b_c = random_dense(5 + 2 * 12, 48), scan.step = random_dense(48, 5);
  scan.out = random_dense(64, 48), scan.convolution = convolution(48);
  scan.rates = random_floats(48 * 12), scan.skip = random_floats(48), scan.state_dim = 12;
  for (float& rate : scan.rates) rate = std::fabs(rate);
  scan.step_norm = std::vector<float>(5, 1.f);
  scan.b_norm = scan.c_norm = std::vector<float>(12, 1.f);
  model.layers[9].selective_scan = std::make_shared<SelectiveScan>(std::move(scan));
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
    HyperConnection made{random_dense(rows, 3 * 64),
                         random_floats(static_cast<size_t>(rows)),
                         random_floats(static_cast<size_t>(rows)),
                         nullptr,
                         nullptr,
                         {}};
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

// Several hidden states that are read number by number, what tokens bring together, attention to
// pools of tokens beside heads of keys and values, experts that others nearby weigh.
Model gated_model(int kv_bits) {
  Spec spec;
  spec.hidden = 64, spec.heads = 4, spec.kv_heads = 2, spec.head_dim = 32;
  spec.attention_scale = 0.2f, spec.cache_limit_bytes = 1 << 26;
  spec.experts_per_token = 2, spec.routing = Routing::kSparseMixer, spec.expert_band = 0.3f;
  spec.streams = 3, spec.sinkhorn_rounds = 0, spec.kv_bits = kv_bits;
  Model model(spec);
  model.ropes = {{{1.f, 0.3f, 0.1f, 0.03f}, 1.f, false}};
  const auto connection = [](bool is_last) {
    HyperConnection made;
    if (!is_last) made.mix = random_dense(3, 3 * 64);
    made.down = random_affine(32, 3 * 64, 4, 32), made.up = random_affine(3 * 64, 32, 8, 32);
    made.norm = random_floats(3 * 64);
    return std::make_shared<HyperConnection>(std::move(made));
  };
  model.layers.resize(2);
  for (Layer& layer : model.layers) {
    layer.attention_streams = connection(false), layer.mlp_streams = connection(false);
    layer.q = random_affine(128, 64, 4, 32), layer.o = random_affine(64, 128, 4, 32);
    layer.k = random_affine(64, 64, 4, 32), layer.v = random_affine(64, 64, 8, 32);
    layer.rope = 0, layer.router = random_dense(6, 64);
    for (int e = 0; e < 6; e++) {
      layer.experts.push_back({random_affine(32, 64, 4, 64), random_affine(32, 64, 4, 64),
                               random_affine(64, 32, 4, 32)});
    }
    PoolIndexer pooled;
    pooled.q = random_affine(3 * 32, 64, 4, 32), pooled.q_norm = std::vector<float>(32, 1.f);
    Compressor pools;
    pools.kv = random_affine(32, 64, 8, 32), pools.norm = std::vector<float>(32, 1.f);
    pools.dim = 32, pools.ratio = 4, pools.turns_first = true;
    pooled.pools = std::make_shared<Compressor>(std::move(pools));
    pooled.heads = 3, pooled.dim = 32, pooled.most = 12;
    layer.pooled = std::make_shared<PoolIndexer>(std::move(pooled));
  }
  Ngrams ngrams;
  const std::vector<float> table = random_floats(60 * 16);
  ngrams.rows = [table](const std::vector<int64_t>& rows) {
    std::vector<float> taken;
    for (const int64_t row : rows) {
      taken.insert(taken.end(), table.begin() + row * 16, table.begin() + (row + 1) * 16);
    }
    return pack_dense({as_bytes(taken), DType::kFloat32, 16, 1}, static_cast<int64_t>(rows.size()),
                      16);
  };
  ngrams.multipliers = {7450623198421901, 2305843009213693, 9007199254740881};
  ngrams.sizes = {11, 13, 17, 19}, ngrams.starts = {0, 11, 24, 41}, ngrams.end = 7;
  ngrams.key = random_affine(3 * 64, 64, 4, 32), ngrams.value = random_affine(64, 64, 4, 32);
  ngrams.key_norm = ngrams.query_norm = ngrams.convolution_norm = random_floats(3 * 64);
  ngrams.convolution = {random_floats(3 * 3 * 64), {}, 3}, ngrams.dilation = 3;
  model.layers[1].ngrams = std::make_shared<Ngrams>(std::move(ngrams));
  model.last_streams = connection(true);
  model.embedding = model.head = random_affine(50, 64, 8, 32);
  return model;
}

void check_state(Model model) {
  model.check_sizes();
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

// Attention to blocks of keys, of sequences that have more than are attended to: each KV head has
// others of its own.
void check_blocks(int kv_bits) {
  Spec spec;
  spec.hidden = 64, spec.heads = 6, spec.kv_heads = 2, spec.head_dim = 24;
  spec.attention_scale = 0.2f, spec.cache_limit_bytes = 1 << 26, spec.kv_bits = kv_bits;
  Model model(spec);
  model.ropes = {{{1.f, 0.3f, 0.1f, 0.03f}, 1.f, false}};
  model.layers.resize(2);
  for (Layer& layer : model.layers) {
    layer.attention_norm = layer.mlp_norm = std::vector<float>(64, 1.f);
    layer.q = random_affine(144, 64, 4, 32), layer.o = random_dense(64, 144);
    layer.k = random_affine(48, 64, 4, 32), layer.v = random_affine(48, 64, 8, 32);
    layer.gate = random_affine(96, 64, 6, 32), layer.up = random_affine(96, 64, 4, 32);
    layer.down = random_affine(64, 96, 5, 32), layer.rope = 0;
    BlockIndexer blocks;
    blocks.q = random_dense(2 * 40, 64), blocks.k = random_dense(40, 64);
    blocks.q_norm = blocks.k_norm = std::vector<float>(40, 1.f);
    blocks.dim = 40, blocks.size = kPageTokens, blocks.most = 2;
    layer.blocks = std::make_shared<BlockIndexer>(std::move(blocks));
  }
  model.embedding = model.head = random_affine(50, 64, 8, 32);
  model.final_norm = std::vector<float>(64, 1.f);
  const int length = 200;  // four blocks, of which two are attended to
  std::vector<int32_t> tokens(length);
  for (auto& token : tokens) token = static_cast<int32_t>(generator() % 50);
  std::vector<float> whole(50), piece(100);
  model.forward({{"whole", 0, length, true}}, tokens.data(), nullptr, whole.data());
  for (const auto& [at, count] : {std::pair{0, 170}, {170, 29}}) {
    model.forward({{"pieces", at, count, false}}, tokens.data() + at, nullptr, nullptr);
  }
  // The last one beside another sequence.
  std::vector<int32_t> both = {tokens.back()};
  both.insert(both.end(), tokens.begin(), tokens.end());
  model.forward({{"pieces", length - 1, 1, true}, {"beside", 0, length, true}}, both.data(),
                nullptr, piece.data());
  add_to_digest(whole);
  expect(std::equal(whole.begin(), whole.end(), piece.begin()), "blocks chosen, in pieces");
  expect(std::equal(whole.begin(), whole.end(), piece.begin() + 50),
         "blocks chosen, beside others");
}

}  // namespace

void check_models() {
  check_model(16, 20);
  check_model(8, 72);  // a group, and a part of one
}

void check_states() {
  for (const int bits : {16, 8, 32}) check_state(recurrent_model(bits));
  for (const int bits : {16, 8, 32}) check_state(compressed_model(bits));
  for (const int bits : {16, 8, 32}) check_state(gated_model(bits));
  for (const int bits : {16, 8, 32}) check_blocks(bits);
}

}  // namespace exo::check

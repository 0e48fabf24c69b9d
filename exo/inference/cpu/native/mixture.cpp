// A layer's mixture of experts: rows ordered by the experts they are routed to.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "model.hpp"
#include "rows.hpp"
#include "same_math.hpp"

namespace exo {

namespace {

struct Choice {
  int64_t expert;
  float weight;
};

// All but the best groups of experts can no longer be chosen.
void drop_groups(const Spec& spec, std::vector<float>& score) {
  const int64_t groups = spec.expert_groups;
  const int64_t each = static_cast<int64_t>(score.size()) / groups;
  std::vector<std::pair<float, int64_t>> best;  // less the better
  for (int64_t g = 0; g < groups; g++) {
    std::vector<float> held(score.begin() + g * each, score.begin() + (g + 1) * each);
    const int64_t judged = std::min<int64_t>(spec.judged_per_group, each);
    std::partial_sort(held.begin(), held.begin() + judged, held.end(), std::greater<>());
    best.emplace_back(-std::accumulate(held.begin(), held.begin() + judged, 0.f), g);
  }
  std::sort(best.begin(), best.end());
  for (int64_t g = spec.groups_per_token; g < groups; g++) {
    const auto begin = score.begin() + best[at_least(g)].second * each;
    std::fill(begin, begin + each, -INFINITY);
  }
}

// The experts of one row, best first, or those that are `told`. `logits`: the router's [count].
void choose(const Spec& spec, const std::vector<float>& bias, const int32_t* told,
            const float* logits, int64_t count, std::vector<Choice>& choice) {
  const int64_t top = static_cast<int64_t>(choice.size());
  std::vector<float> weight(logits, logits + count);
  if (spec.routing == Routing::kSoftmaxThenTop || spec.routing == Routing::kSoftmaxThenTopSummed1) {
    const float best = *std::max_element(weight.begin(), weight.end());
    float total = 0;
    for (float& w : weight) total += w = same::exp(w - best);
    for (float& w : weight) w /= total;
  } else if (spec.routing == Routing::kSigmoid || spec.routing == Routing::kSigmoidSummed1) {
    for (float& w : weight) w = same::sigmoid(w);
  } else if (spec.routing == Routing::kRootSoftplusSummed1) {
    for (float& w : weight) w = std::sqrt(same::softplus(w));
  }
  std::vector<float> score(weight);
  for (size_t e = 0; e < bias.size(); e++) score[e] += bias[e];
  if (spec.expert_groups > 1) drop_groups(spec, score);
  std::vector<int64_t> order(at_least(count));
  std::iota(order.begin(), order.end(), 0);
  if (told != nullptr) {
    std::copy_n(told, top, order.begin());
  } else {
    std::partial_sort(order.begin(), order.begin() + top, order.end(), [&](int64_t a, int64_t b) {
      const float x = score[at_least(a)], y = score[at_least(b)];
      return x != y ? x > y : a < b;
    });
  }
  const float best = logits[order[0]];
  float total = 0;
  for (size_t t = 0; t < choice.size(); t++) {
    const float own = weight[at_least(order[t])];
    choice[t] = {order[t], spec.routing == Routing::kTopThenSoftmax   ? same::exp(own - best)
                           : spec.routing == Routing::kTopThenSigmoid ? same::sigmoid(own)
                                                                      : own};
    total += choice[t].weight;
  }
  const bool sums_to_1 =
      spec.routing == Routing::kSoftmaxThenTopSummed1 || spec.routing == Routing::kTopThenSoftmax ||
      spec.routing == Routing::kSigmoidSummed1 || spec.routing == Routing::kRootSoftplusSummed1;
  for (Choice& one : choice) one.weight *= (sums_to_1 ? 1.f / total : 1.f) * spec.expert_scale;
}

// Phi 3.5's: each one's probability among the experts that are left and not far below it
// (arXiv:2310.00811; at inference, as transformers' modeling_phimoe.py has it).
void choose_near(const Spec& spec, const float* logits, int64_t count,
                 std::vector<Choice>& choice) {
  std::vector<float> left(logits, logits + count);
  for (Choice& one : choice) {
    const auto found = std::max_element(left.begin(), left.end());
    const float best = *found;
    float total = 0;
    for (int64_t e = 0; e < count; e++) {
      const float size = std::max(std::fabs(logits[e]), best);
      const bool is_far = (best - logits[e]) / size > spec.expert_band;
      const float own = left[at_least(e)];
      if (!is_far && own != -INFINITY) total += same::exp(own - best);
    }
    one = {found - left.begin(), spec.expert_scale / total};
    *found = -INFINITY;
  }
}

}  // namespace

void Model::experts(const Layer& layer) {
  const Activations& read = read_for_experts(layer);
  score_experts(layer);
  const Routed routed = route(layer);
  run_experts(layer, routed, read);
  add_experts(layer, routed);
}

// What experts read of all rows; beside it, in normed_, what an MLP for all tokens does, and in
// routed_, where it is another, what the router does.
const Activations& Model::read_for_experts(const Layer& layer) {
  const Expert& any = layer.experts.front();
  const bool narrow = layer.expert_in != nullptr;
  norm_for_mlp(layer,
               {narrow ? nullptr : any.gate.get(), narrow ? layer.expert_in.get() : any.up.get(),
                layer.gate.get(), layer.up.get()});
  const std::vector<int> groups = groups_of({any.gate.get(), any.up.get()});
  if (const MixtureNorms* norms = layer.mixture_norms.get()) {
    routed_.resize(rows_, spec_.hidden, {});
    for_experts_.resize(rows_, spec_.hidden, groups);
    each_row(rows_, [&](int64_t i) {
      norm_row(x(i), norms->router, {}, routed_.row(i));
      norm_row(x(i), norms->experts, {}, for_experts_.row(i));
      for_experts_.quantize(i, 1);
    });
  } else if (!narrow) {
    return normed_;
  }
  if (narrow) {
    const int64_t inner = layer.expert_in->rows;
    for_experts_.resize(rows_, inner, groups);
    run_linear({{layer.expert_in.get(), &normed_, 0, rows_, for_experts_.row(0), inner}},
               spec_.precise);
    each_row(rows_, [&](int64_t i) { for_experts_.quantize(i, 1); });
  }
  return for_experts_;
}

// The router reads float activations: a rounding there would choose other experts.
void Model::score_experts(const Layer& layer) {
  const int64_t count = layer.router->rows;
  const Activations& read = layer.mixture_norms ? routed_ : normed_;
  grow(router_out_, rows_ * count);
  std::vector<LinearJob> scored = {
      {layer.router.get(), &read, 0, rows_, router_out_.data(), count}};
  if (layer.shared_gate) {
    grow(z_, rows_);
    scored.push_back({layer.shared_gate.get(), &normed_, 0, rows_, z_.data(), 1});
  }
  run_linear(scored, true);
}

Model::Routed Model::route(const Layer& layer) {
  const int64_t count = layer.router->rows, top = spec_.experts_per_token;
  const std::vector<int32_t>& of_tokens = layer.experts_of_tokens;
  for (int64_t i = 0; !of_tokens.empty() && i < rows_; i++) {
    const int64_t place = tokens_[i] * top;
    if (place < 0 || place >= static_cast<int64_t>(of_tokens.size())) {
      throw std::out_of_range("token " + std::to_string(tokens_[i]) + " without experts");
    }
  }
  Routed found;
  found.slots.resize(at_least(rows_ * top));
  each_row(rows_, [&](int64_t i) {
    std::vector<Choice> choice(at_least(top));
    const int32_t* told = of_tokens.empty() ? nullptr : of_tokens.data() + tokens_[i] * top;
    const float* logits = router_out_.data() + i * count;
    if (spec_.routing == Routing::kSparseMixer) {
      choose_near(spec_, logits, count, choice);
    } else {
      choose(spec_, layer.router_bias, told, logits, count, choice);
    }
    for (int64_t t = 0; t < top; t++) {
      const auto [expert, weight] = choice[at_least(t)];
      const float own = layer.expert_scales.empty() ? 1.f : layer.expert_scales[at_least(expert)];
      found.slots[at_least(i * top + t)] = {i, expert, weight * own, 0};
    }
  });
  found.first.resize(at_least(count + 1));
  for (const ExpertSlot& slot : found.slots) found.first[at_least(slot.expert + 1)]++;
  for (int64_t e = 0; e < count; e++) {
    if (found.first[at_least(e + 1)] > 0) found.asked.push_back(static_cast<int>(e));
    found.first[at_least(e + 1)] += found.first[at_least(e)];
  }
  std::vector<int64_t> next(found.first.begin(), found.first.end() - 1);
  for (ExpertSlot& slot : found.slots) slot.place = next[at_least(slot.expert)]++;
  return found;
}

// Of each slot into expert_out_, at its place, and of an MLP for all tokens into shared_out_.
void Model::run_experts(const Layer& layer, const Routed& routed, const Activations& read) {
  const Expert& any = layer.experts.front();
  const int64_t slots = static_cast<int64_t>(routed.slots.size()), width = any.up->rows;
  const int64_t inner = layer.expert_in ? layer.expert_in->rows : spec_.hidden;
  gathered_.resize(slots, inner, groups_of({any.gate.get(), any.up.get()}));
  each_row(slots, [&](int64_t i) {
    const ExpertSlot& slot = routed.slots[at_least(i)];
    gathered_.copy_row(slot.place, read, slot.row, spec_.weighs_inputs);
    if (!spec_.weighs_inputs) return;
    float* row = gathered_.row(slot.place);
    for (int64_t d = 0; d < inner; d++) row[d] *= slot.weight;
    gathered_.quantize(slot.place, 1);
  });
  gated_.resize(slots, width, groups_of({any.down.get()}));
  grow(up_, slots * width);
  grow(expert_out_, slots * inner);
  std::vector<Expert> taken;
  if (layer.expert_memory) taken = layer.expert_memory->take(layer.number, routed.asked);
  std::vector<LinearJob> in, out;
  // What an activation takes of these rows; and what it is multiplied by, where there is a gate.
  const auto in_pair = [&](const Matrix* gate, const Matrix* up, const Activations& x,
                           int64_t begin, int64_t rows, float* activated, float* linear) {
    if (gate != nullptr) in.push_back({gate, &x, begin, rows, activated, gate->rows});
    in.push_back({up, &x, begin, rows, gate != nullptr ? linear : activated, up->rows});
  };
  for (size_t i = 0; i < routed.asked.size(); i++) {
    const size_t number = at_least(routed.asked[i]);
    const int64_t begin = routed.first[number], rows = routed.first[number + 1] - begin;
    const Expert& expert = layer.expert_memory ? taken[i] : layer.experts[number];
    in_pair(expert.gate.get(), expert.up.get(), gathered_, begin, rows, gated_.row(begin),
            up_.data() + begin * width);
    out.push_back(
        {expert.down.get(), &gated_, begin, rows, expert_out_.data() + begin * inner, inner});
  }
  const int64_t shared_width = layer.up ? layer.up->rows : 0;
  if (layer.up) {
    shared_.resize(rows_, shared_width, groups_of({layer.down.get()}));
    grow(in_, rows_ * shared_width);
    grow(shared_out_, rows_ * spec_.hidden);
    in_pair(layer.gate.get(), layer.up.get(), normed_, 0, rows_, shared_.row(0), in_.data());
    out.push_back({layer.down.get(), &shared_, 0, rows_, shared_out_.data(), spec_.hidden});
  }
  run_linear(in, spec_.precise);
  if (layer.up) {
    each_row(rows_, [&](int64_t i) {
      const float* up = layer.gate ? in_.data() + i * shared_width : nullptr;
      activate(layer.limit, shared_.row(i), up, shared_width);
      shared_.quantize(i, 1);
    });
  }
  each_row(slots, [&](int64_t i) {
    const float* up = any.gate ? up_.data() + i * width : nullptr;
    activate(layer.expert_limit, gated_.row(i), up, width);
    gated_.quantize(i, 1);
  });
  run_linear(out, spec_.precise);
}

// To x what these gave, by their weights.
void Model::add_experts(const Layer& layer, const Routed& routed) {
  const KernelTable& k = kernels();
  const MixtureNorms* norms = layer.mixture_norms.get();
  const bool narrow = layer.expert_in != nullptr;
  const int64_t top = spec_.experts_per_token, hidden = spec_.hidden;
  const int64_t inner = narrow ? layer.expert_in->rows : hidden;
  grow(y_, rows_ * hidden);
  const auto mix = [&](int64_t i, float* y) {
    std::memset(y, 0, at_least(inner) * sizeof(float));
    for (int64_t t = 0; t < top; t++) {
      const ExpertSlot& slot = routed.slots[at_least(i * top + t)];
      const float weight = spec_.weighs_inputs ? 1.f : slot.weight;
      k.add_scaled(y, expert_out_.data() + slot.place * inner, weight, inner);
    }
  };
  if (narrow) {
    gathered_.resize(rows_, inner, groups_of({layer.expert_out.get()}));
    each_row(rows_, [&](int64_t i) {
      mix(i, gathered_.row(i));
      gathered_.quantize(i, 1);
    });
    run_linear({{layer.expert_out.get(), &gathered_, 0, rows_, y_.data(), hidden}}, spec_.precise);
  }
  each_row(rows_, [&](int64_t i) {
    float* y = y_.data() + i * hidden;
    if (!narrow) mix(i, y);
    if (norms != nullptr) k.rms_norm(y, norms->after_experts.data(), y, hidden, spec_.norm_eps);
    if (layer.up) {
      float* beside = shared_out_.data() + i * hidden;
      if (norms != nullptr) {
        k.rms_norm(beside, norms->after_mlp.data(), beside, hidden, spec_.norm_eps);
      }
      const float share = layer.shared_gate ? same::sigmoid(z_[at_least(i)]) : 1.f;
      k.add_scaled(y, beside, share * layer.shared_scale, hidden);
    }
    add_residual(x(i), y, layer.after_mlp_norm);
  });
}

}  // namespace exo

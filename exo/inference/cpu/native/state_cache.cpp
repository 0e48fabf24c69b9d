#include "state_cache.hpp"

#include <utility>

#include "kv_cache.hpp"

namespace exo {

const StateCache::State* StateCache::find(const Held& held, int64_t tokens) {
  if (held.tokens == tokens) return &held.now;
  const auto kept = held.kept.find(tokens);
  return kept == held.kept.end() ? nullptr : &kept->second;
}

float* StateCache::at(const std::string& sequence, int64_t tokens) {
  if (tokens == 0) {
    release(sequence);
    Held& held = held_[sequence];
    held.now.assign(static_cast<size_t>(floats_), 0.f);
    states_++;
    return held.now.data();
  }
  const auto found = held_.find(sequence);
  if (found == held_.end()) throw CacheMissError(sequence, tokens, 0);
  Held& held = found->second;
  const State* state = find(held, tokens);
  if (state == nullptr) throw CacheMissError(sequence, tokens, held.tokens);
  if (state != &held.now) held.now = *state;
  held.tokens = tokens;
  // What was kept of a later moment is of tokens that are dropped now.
  const auto later = held.kept.upper_bound(tokens);
  states_ -= std::distance(later, held.kept.end());
  held.kept.erase(later, held.kept.end());
  return held.now.data();
}

void StateCache::advance(const std::string& sequence, int64_t tokens, bool keeps) {
  Held& held = held_.at(sequence);
  held.tokens = tokens;
  if (keeps && held.kept.emplace(tokens, held.now).second) states_++;
}

void StateCache::take_over(const std::string& sequence, const std::string& source, int64_t tokens) {
  const auto found = held_.find(source);
  if (found == held_.end()) throw CacheMissError(source, tokens, 0);
  const State* state = find(found->second, tokens);
  if (state == nullptr) throw CacheMissError(source, tokens, found->second.tokens);
  if (sequence == source) return;
  Held taken{*state, tokens, {}};
  release(sequence);
  held_[sequence] = std::move(taken);
  states_++;
}

void StateCache::release(const std::string& sequence) {
  const auto found = held_.find(sequence);
  if (found == held_.end()) return;
  states_ -= 1 + static_cast<int64_t>(found->second.kept.size());
  held_.erase(found);
}

}  // namespace exo

#include "expert_memory.hpp"

#include <algorithm>
#include <stdexcept>

namespace exo {

int64_t Expert::bytes() const {
  return (gate ? gate->data.bytes() : 0) + up->data.bytes() + down->data.bytes();
}

std::vector<Expert> ExpertMemory::take(int layer, const std::vector<int>& numbers) {
  call_++;
  std::vector<int> missing;
  int64_t each = 0;
  for (const int number : numbers) {
    const auto at = held_.find({layer, number});
    if (at == held_.end()) {
      missing.push_back(number);
      continue;
    }
    at->second.call = call_;
    order_.splice(order_.end(), order_, at->second.place);
    each = at->second.expert.bytes();
  }
  taken_ += static_cast<int64_t>(numbers.size());
  packed_ += static_cast<int64_t>(missing.size());
  constexpr size_t kAtOnce = 8;  // what is read for them is there twice
  for (size_t from = 0; from < missing.size(); from += kAtOnce) {
    const size_t count = std::min(missing.size() - from, kAtOnce);
    const auto first = missing.begin() + static_cast<int64_t>(from);
    const std::vector<int> some(first, first + static_cast<int64_t>(count));
    make_room(each * static_cast<int64_t>(count));
    const std::vector<Expert> packed = pack_(layer, some);
    if (packed.size() != count) throw std::logic_error("other experts than were asked for");
    for (size_t i = 0; i < count; i++) {
      const Key key{layer, some[i]};
      held_[key] = {packed[i], order_.insert(order_.end(), key), call_};
      each = packed[i].bytes();
      bytes_ += each;
    }
  }
  make_room(0);
  std::vector<Expert> found;
  for (const int number : numbers) found.push_back(held_.at({layer, number}).expert);
  return found;
}

void ExpertMemory::keep_only(const std::vector<int>& layers) {
  for (auto at = order_.begin(); at != order_.end();) {
    const Key key = *at++;
    if (std::find(layers.begin(), layers.end(), key.first) == layers.end()) forget(key);
  }
}

void ExpertMemory::set_limit(int64_t bytes) {
  limit_ = bytes;
  call_++;
  make_room(0);
}

void ExpertMemory::make_room(int64_t bytes) {
  while (bytes_ + bytes > limit_ && !order_.empty() && held_.at(order_.front()).call < call_) {
    forget(order_.front());
  }
}

void ExpertMemory::forget(Key key) {
  const auto at = held_.find(key);
  bytes_ -= at->second.expert.bytes();
  order_.erase(at->second.place);
  held_.erase(at);
}

}  // namespace exo

// Experts of a mixture that is larger than memory: those used last are there.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "matrix.hpp"

namespace exo {

struct Expert {
  std::shared_ptr<Matrix> gate, up, down;  // no gate: down activation(up x)

  int64_t bytes() const;
};

// Of all layers that share it. Which are there changes how long a step takes, not what it gives.
class ExpertMemory {
 public:
  // Experts of a layer by their numbers, read from where the weights are and packed.
  using Pack = std::function<std::vector<Expert>(int layer, const std::vector<int>& numbers)>;

  ExpertMemory(int64_t limit_bytes, Pack pack) : limit_(limit_bytes), pack_(std::move(pack)) {}

  // Those of a layer, in this order. Those that are not there are packed, those used longest ago
  // forgotten for them; only where the asked for exceed the limit themselves it does not hold.
  std::vector<Expert> take(int layer, const std::vector<int>& numbers);
  // Forget all of other layers than these.
  void keep_only(const std::vector<int>& layers);
  void set_limit(int64_t bytes);

  int64_t bytes() const { return bytes_; }
  int64_t taken() const { return taken_; }    // experts that steps asked for
  int64_t packed() const { return packed_; }  // and that were not there

 private:
  using Key = std::pair<int, int>;  // layer, number
  struct Held {
    Expert expert;
    std::list<Key>::iterator place;
    int64_t call;  // of `take`, the last that asked for it
  };

  void make_room(int64_t bytes);
  void forget(Key key);

  int64_t limit_;
  Pack pack_;
  std::map<Key, Held> held_;
  std::list<Key> order_;  // used longest ago first
  int64_t bytes_ = 0, taken_ = 0, packed_ = 0, call_ = 0;
};

}  // namespace exo

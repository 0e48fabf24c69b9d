// What the recurrent layers of one shard remember of each sequence. A state cannot be cut back: it
// is as it was after the last token, and copies of it are kept where a caller asks for that.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>

#include "lines.hpp"

namespace exo {

class StateCache {
 public:
  // `floats`: of all layers' states of one sequence together.
  explicit StateCache(int64_t floats) : floats_(floats) {}

  // The state of a sequence after `tokens` tokens, to go on from; zeros after none. Throws
  // CacheMissError where none is held of that moment.
  float* at(const std::string& sequence, int64_t tokens);
  // The sequence has `tokens` tokens now; with `keeps` this moment is remembered.
  void advance(const std::string& sequence, int64_t tokens, bool keeps);
  // `sequence` begins as `source` does, for `tokens` tokens. Throws CacheMissError.
  void take_over(const std::string& sequence, const std::string& source, int64_t tokens);
  void release(const std::string& sequence);

  int64_t state_bytes() const { return floats_ * static_cast<int64_t>(sizeof(float)); }
  int64_t count() const { return states_; }  // those now and those kept
  int64_t used_bytes() const { return states_ * state_bytes(); }

 private:
  using State = Lines<float>;
  struct Held {
    State now;
    int64_t tokens = 0;
    std::map<int64_t, State> kept;  // by the number of tokens
  };

  // The state of `source` after `tokens` tokens, or null.
  static const State* find(const Held& held, int64_t tokens);

  int64_t floats_;
  int64_t states_ = 0;
  std::unordered_map<std::string, Held> held_;
};

}  // namespace exo

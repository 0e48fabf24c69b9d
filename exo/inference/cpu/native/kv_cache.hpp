// The KV cache of one shard: pages of 64 tokens, lent to sequences as they grow. Sequences that
// begin alike share pages; one that is to be written to and has several holders is copied first.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels.hpp"

namespace exo {

// A slice starts after what the cache holds of its sequence.
struct CacheMissError : std::runtime_error {
  CacheMissError(const std::string& sequence, int64_t start, int64_t held)
      : std::runtime_error("sequence " + sequence + " starts at " + std::to_string(start) +
                           ", the KV cache holds " + std::to_string(held) + " tokens of it") {}
};

struct CacheFullError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A layer's keys and values: heads of so many numbers each.
struct HeadShape {
  int heads;
  int dim, value_dim;
};

// `every`: what is counted as a token here stands for so many of them.
struct CacheShape {
  std::vector<HeadShape> layers;
  KVType type;
  int64_t limit_bytes;
  int every = 1;
};

class KVCache {
 public:
  explicit KVCache(const CacheShape& shape);

  // Makes room for tokens [start, start + length) of a sequence, dropping what it held from
  // `start` on. `beside`: bytes of the limit that other memory takes. Throws CacheMissError, or
  // CacheFullError and changes nothing.
  void extend(const std::string& sequence, int64_t start, int64_t length, int64_t beside = 0);
  // `sequence` begins as `source` does, for `tokens` tokens; what it held before is dropped. Throws
  // CacheMissError where the source holds fewer.
  void take_over(const std::string& sequence, const std::string& source, int64_t tokens);
  void release(const std::string& sequence);

  // Pages of a sequence that holds tokens.
  uint8_t* const* pages(const std::string& sequence) const;
  // `pages` as layer `layer` and head `head` see them.
  KVView view(uint8_t* const* pages, int layer, int head) const;

  int64_t sequences() const { return static_cast<int64_t>(tables_.size()); }
  int64_t used_bytes() const { return lent_ * page_bytes(); }
  int64_t page_bytes() const { return begin_.back(); }

 private:
  struct Table {
    std::vector<uint8_t*> pages;
    int64_t length = 0;
  };

  static size_t pages_for(int64_t tokens) {
    return static_cast<size_t>((tokens + kPageTokens - 1) / kPageTokens);
  }
  int64_t head_bytes(const HeadShape& shape) const;  // of one head in a page
  uint8_t* lend();
  void give_back(Table& table, size_t keep);

  CacheShape shape_;
  std::vector<int64_t> begin_ = {0};  // of each layer's part of a page, and its end
  std::unordered_map<std::string, Table> tables_;
  std::vector<Buffer> memory_;
  std::vector<uint8_t*> free_;
  std::unordered_map<const uint8_t*, int> shared_;  // pages with several holders: how many more
  int64_t lent_ = 0;                                // pages, each counted once
};

}  // namespace exo

#include "kv_cache.hpp"

namespace exo {

void KVCache::extend(const std::string& sequence, int64_t start, int64_t length) {
  const auto found = tables_.find(sequence);
  const int64_t held = found == tables_.end() ? 0 : found->second.length;
  if (start > held) throw CacheMissError(sequence, start, held);
  const size_t needed = static_cast<size_t>((start + length + kPageTokens - 1) / kPageTokens);
  const size_t has = found == tables_.end() ? 0 : found->second.pages.size();
  if (needed > has) {
    const int64_t after = (lent_ + static_cast<int64_t>(needed - has)) * page_bytes();
    if (after > shape_.limit_bytes) {
      throw CacheFullError("the KV cache may take " + std::to_string(shape_.limit_bytes >> 20) +
                           " MiB on this node and " + std::to_string(start + length) +
                           " tokens of this sequence would need " +
                           std::to_string((after - shape_.limit_bytes) >> 20) + " MiB more");
    }
  }
  Table& table = found == tables_.end() ? tables_[sequence] : found->second;
  if (needed < has) give_back(table, needed);
  while (table.pages.size() < needed) {
    if (free_.empty()) {
      memory_.emplace_back(page_bytes());
      free_.push_back(memory_.back().data());
    }
    // A page that was used before holds finite numbers, which a weight of 0 hides.
    table.pages.push_back(free_.back());
    free_.pop_back();
    lent_++;
  }
  table.length = start + length;
}

void KVCache::release(const std::string& sequence) {
  const auto found = tables_.find(sequence);
  if (found == tables_.end()) return;
  give_back(found->second, 0);
  tables_.erase(found);
  if (lent_ == 0) {
    // Nobody is here: the memory goes back to the system.
    free_.clear();
    memory_.clear();
  }
}

uint8_t* const* KVCache::pages(const std::string& sequence) const {
  return tables_.at(sequence).pages.data();
}

KVView KVCache::view(uint8_t* const* pages, int layer, int head) const {
  const int64_t base = (static_cast<int64_t>(layer) * shape_.kv_heads + head) * 2 * half_bytes();
  return {pages, base, base + half_bytes(), shape_.dtype, shape_.head_dim};
}

void KVCache::give_back(Table& table, size_t keep) {
  while (table.pages.size() > keep) {
    free_.push_back(table.pages.back());
    table.pages.pop_back();
    lent_--;
  }
}

}  // namespace exo

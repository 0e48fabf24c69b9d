#include "kv_cache.hpp"

#include <cstring>
#include <utility>

namespace exo {

KVCache::KVCache(const CacheShape& shape) : shape_(shape) {
  for (const HeadShape& layer : shape_.layers) {
    begin_.push_back(begin_.back() + layer.heads * head_bytes(layer));
  }
}

void KVCache::extend(const std::string& sequence, int64_t start, int64_t length, int64_t beside) {
  const auto found = tables_.find(sequence);
  const int64_t held = found == tables_.end() ? 0 : found->second.length;
  if (start > held) throw CacheMissError(sequence, start, held);
  const size_t needed = pages_for(start + length), kept = pages_for(start);
  // The page that `start` is in the middle of is written to while others read it.
  const bool copies = start % kPageTokens != 0 && shared_.count(found->second.pages[kept - 1]) != 0;
  const size_t has = found == tables_.end() ? 0 : found->second.pages.size();
  size_t freed = 0;  // what lies behind `start` is dropped first
  for (size_t i = kept; i < has; i++) freed += shared_.count(found->second.pages[i]) == 0;
  const int64_t pages =
      lent_ + static_cast<int64_t>(needed - kept + (copies ? 1 : 0)) - static_cast<int64_t>(freed);
  const int64_t after = pages * page_bytes() + beside;
  if (after > shape_.limit_bytes) {
    throw CacheFullError("the KV cache may take " + std::to_string(shape_.limit_bytes >> 20) +
                         " MiB on this node and " +
                         std::to_string((start + length) * shape_.every) +
                         " tokens of this sequence would need " +
                         std::to_string((after - shape_.limit_bytes) >> 20) + " MiB more");
  }
  Table& table = found == tables_.end() ? tables_[sequence] : found->second;
  give_back(table, kept);
  if (copies) {
    uint8_t* own = lend();
    std::memcpy(own, table.pages.back(), static_cast<size_t>(page_bytes()));
    give_back(table, kept - 1);
    table.pages.push_back(own);
  }
  while (table.pages.size() < needed) table.pages.push_back(lend());
  table.length = start + length;
}

void KVCache::take_over(const std::string& sequence, const std::string& source, int64_t tokens) {
  const auto found = tables_.find(source);
  const int64_t held = found == tables_.end() ? 0 : found->second.length;
  if (tokens > held) throw CacheMissError(source, tokens, held);
  if (sequence == source) return;
  Table taken;
  const auto& pages = found->second.pages;
  taken.pages.assign(pages.begin(), pages.begin() + static_cast<int64_t>(pages_for(tokens)));
  taken.length = tokens;
  for (const uint8_t* page : taken.pages) shared_[page]++;
  Table& table = tables_[sequence];
  give_back(table, 0);
  table = std::move(taken);
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
  const HeadShape& shape = shape_.layers[static_cast<size_t>(layer)];
  const int64_t base = begin_[static_cast<size_t>(layer)] + head * head_bytes(shape);
  const int64_t values = base + KVView::half_bytes(shape_.type, shape.dim);
  return {pages, base, values, shape_.type, shape.dim, shape.value_dim};
}

int64_t KVCache::head_bytes(const HeadShape& shape) const {
  return KVView::half_bytes(shape_.type, shape.dim) +
         KVView::half_bytes(shape_.type, shape.value_dim);
}

uint8_t* KVCache::lend() {
  if (free_.empty()) {
    memory_.emplace_back(page_bytes());
    free_.push_back(memory_.back().data());
  }
  // A page that was used before holds finite numbers, which a weight of 0 hides.
  uint8_t* page = free_.back();
  free_.pop_back();
  lent_++;
  return page;
}

void KVCache::give_back(Table& table, size_t keep) {
  while (table.pages.size() > keep) {
    uint8_t* page = table.pages.back();
    table.pages.pop_back();
    const auto others = shared_.find(page);
    if (others == shared_.end()) {
      free_.push_back(page);
      lent_--;
    } else if (--others->second == 0) {
      shared_.erase(others);
    }
  }
}

}  // namespace exo

#include "hadamard.hpp"

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace exo {

namespace {

void multiply(float* row, const std::vector<float>& by) {
  for (size_t i = 0; i < by.size(); i++) row[i] *= by[i];
}

// Sums and differences of what stands `half` apart.
void step(float* block, int64_t size, int64_t half) {
  for (int64_t begin = 0; begin < size; begin += 2 * half) {
    float *low = block + begin, *high = low + half;
    for (int64_t i = 0; i < half; i++) {
      const float sum = low[i] + high[i], difference = low[i] - high[i];
      low[i] = sum, high[i] = difference;
    }
  }
}

// The steps of `half` and of twice that, at once: half the loads, the same bits.
void two_steps(float* block, int64_t size, int64_t half) {
  for (int64_t begin = 0; begin < size; begin += 4 * half) {
    float* __restrict a = block + begin;
    float* __restrict b = a + half, * __restrict c = b + half, * __restrict d = c + half;
    for (int64_t i = 0; i < half; i++) {
      const float ab = a[i] + b[i], a_b = a[i] - b[i], cd = c[i] + d[i], c_d = c[i] - d[i];
      a[i] = ab + cd, b[i] = a_b + c_d, c[i] = ab - cd, d[i] = a_b - c_d;
    }
  }
}

}  // namespace

Hadamard::Hadamard(int64_t block, std::map<int64_t, std::vector<float>> signs)
    : block_(block), signs_(std::move(signs)) {
  bool fits = block > 0 && (block & (block - 1)) == 0;
  for (const auto& [cols, of_cols] : signs_) {
    fits = fits && cols % block == 0 && cols == static_cast<int64_t>(of_cols.size());
  }
  if (!fits) throw std::invalid_argument("no Hadamard matrix of " + std::to_string(block));
  scale_ = 1.f / std::sqrt(static_cast<float>(block));
}

void Hadamard::transform(float* row, int64_t cols) const {
  for (float* block = row; block < row + cols; block += block_) {
    int64_t half = 1;
    for (; 4 * half <= block_; half *= 4) two_steps(block, block_, half);
    if (half < block_) step(block, block_, half);
    for (int64_t i = 0; i < block_; i++) block[i] *= scale_;
  }
}

void Hadamard::turn(float* row, int64_t cols) const {
  const auto found = signs_.find(cols);
  if (found == signs_.end()) return;
  multiply(row, found->second);
  transform(row, cols);
}

void Hadamard::turn_back(float* row, int64_t cols) const {
  const auto found = signs_.find(cols);
  if (found == signs_.end()) return;
  transform(row, cols);
  multiply(row, found->second);
}

}  // namespace exo

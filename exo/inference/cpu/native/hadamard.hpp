// Activations turned as weights are that were stored turned (QuaRot, arXiv:2404.00456, 3.1; Bonsai
// 2): x' = H (s * x), where s are signs and H is the Sylvester-Hadamard matrix of each block of
// columns over the square root of its size, which is its own inverse.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace exo {

class Hadamard {
 public:
  // `signs`: by how many columns there are, 1 or -1 of each. Other rows are left as they are.
  // Throws std::invalid_argument: `block` is no power of two, or does not divide the columns.
  Hadamard(int64_t block, std::map<int64_t, std::vector<float>> signs);

  void turn(float* row, int64_t cols) const;
  void turn_back(float* row, int64_t cols) const;

 private:
  void transform(float* row, int64_t cols) const;

  int64_t block_;
  float scale_;
  std::map<int64_t, std::vector<float>> signs_;
};

}  // namespace exo

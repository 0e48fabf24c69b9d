// Linear layers of a step: several at once, their blocks shared among the threads.
#pragma once

#include <memory>
#include <vector>

#include "hadamard.hpp"
#include "kernels.hpp"
#include "lines.hpp"

namespace exo {

// Rows of activations as the linear layers that read them want them: float32, and quantized for
// each group size among the weights. Memory is kept and grown.
class Activations {
 public:
  // Groups of 0 stand for float activations.
  void resize(int64_t rows, int64_t cols, const std::vector<int>& groups);
  float* row(int64_t index) { return values_.data() + index * cols_; }
  const float* values() const { return values_.data(); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  // What rows are turned by before anything reads them; none: null.
  void set_hadamard(const Hadamard* hadamard) { hadamard_ = hadamard; }
  // Turns and quantizes rows [first, first + count), twice as finely where `fine`; once for each,
  // different rows may be done on different threads.
  void quantize(int64_t first, int64_t count, bool fine = false);
  // Copies one quantized row of another with the same columns and groups; its floats only where a
  // weight reads them, or where asked to.
  void copy_row(int64_t to, const Activations& from, int64_t row, bool floats);
  // Rows from `first` on, quantized in groups of `group`.
  QuantizedRows quantized(int group, int64_t first) const;

 private:
  struct Part {
    Lines<int8_t> values;
    Lines<QuantizedGroup> groups;
    Lines<QuantizedSuper> supers;  // instead
  };
  struct Quantized {
    int group;
    Part coarse, fine;
    std::vector<uint8_t> is_fine;
    Lines<int8_t> split;

    QuantizedRows rows(int64_t first, int64_t cols) const;
  };

  int64_t rows_ = 0, cols_ = 0;
  bool reads_floats_ = false;
  const Hadamard* hadamard_ = nullptr;
  Lines<float> values_;
  std::vector<Quantized> quantized_;
};

// out[row * stride + n] for rows [first, first + count) of x.
struct LinearJob {
  const Matrix* weights;
  const Activations* x;
  int64_t first, count;
  float* out;
  int64_t stride;
  bool beside = false;  // other matrices fill the rest of the rows of `out`
};

// Which form of activations a matrix reads: its group size, kSuperCols for super-blocks, or 0 for
// float.
int activation_group(const Matrix& weights, bool precise);

void run_linear(const std::vector<LinearJob>& jobs, bool precise);

}  // namespace exo

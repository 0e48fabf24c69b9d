// The quantized tensors of GGUF files, packed for the kernels without a change of any number.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "matrix.hpp"

namespace exo {

// A row is blocks of `cols` columns, `bytes` long each.
struct GgmlFormat {
  std::string name;  // as ggml calls its types: Q4_K
  int64_t cols;
  int64_t bytes;
};

const std::vector<GgmlFormat>& ggml_formats();

// data: [rows, cols / format.cols] blocks. Uses all threads of the pool. Throws
// std::invalid_argument for an unknown format or a shape that is not whole blocks.
std::shared_ptr<Matrix> pack_ggml(const uint8_t* data, const std::string& format, int64_t rows,
                                  int64_t cols);

}  // namespace exo

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

// The codebooks of the IQ formats (iq2xxs_grid and so on in ggml-common.h) are tables of thousands
// of numbers, which PyPI's gguf has: entries of 8 or of 4, each the place of its magnitude (of IQ1:
// of its value) among those that there are, the least first. To be given before such a tensor is
// packed.
enum class Grid : uint8_t { kIq2Xxs, kIq2Xs, kIq2S, kIq3Xxs, kIq3S, kIq1 };
inline constexpr int kGrids = 6;

// Throws std::invalid_argument where there are not as many as the format's indices can say.
void set_grid(Grid grid, std::vector<uint8_t> places);

// data: [rows, cols / format.cols] blocks. Uses all threads of the pool. Throws
// std::invalid_argument for an unknown format, a shape that is not whole blocks, a codebook that
// was not given.
std::shared_ptr<Matrix> pack_ggml(const uint8_t* data, const std::string& format, int64_t rows,
                                  int64_t cols);

}  // namespace exo

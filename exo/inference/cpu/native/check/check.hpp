// What the checks share: random numbers and matrices, a digest of what was computed.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../ggml.hpp"
#include "../matrix.hpp"
#include "../model.hpp"

namespace exo::check {

inline std::mt19937 generator(1);

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAILED on %s: %s\n", kernels().name, what.c_str());
  std::exit(1);
}

inline std::vector<uint8_t> random_bytes(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(generator());
  return bytes;
}

// About normal, and the same on every machine: the library's distributions need not be.
inline std::vector<float> random_floats(size_t count, float size = 1.f) {
  std::vector<float> values(count);
  for (auto& value : values) {
    float sum = -2.f;
    for (int i = 0; i < 4; i++) sum += static_cast<float>(generator() >> 16) * 0x1p-16f;
    value = sum * 1.7320508f * size;
  }
  return values;
}

inline uint64_t digest;  // FNV-1a, 64 bits

inline void add_to_digest(const std::vector<float>& values) {
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 32; i += 8) digest = (digest ^ (bits >> i & 255)) * 0x100000001b3;
  }
}

inline const uint8_t* as_bytes(const std::vector<float>& values) {
  return reinterpret_cast<const uint8_t*>(values.data());
}

inline MatrixPtr random_affine(int64_t rows, int64_t cols, int bits, int group) {
  const auto values = random_bytes(static_cast<size_t>(rows * cols * bits / 8));
  const auto scales = random_floats(static_cast<size_t>(rows * cols / group), 0.02f);
  const auto offsets = random_floats(static_cast<size_t>(rows * cols / group), 0.02f);
  const AffineSource source{values.data(), as_bytes(scales), as_bytes(offsets), DType::kFloat32};
  return pack_affine(source, rows, cols, {bits}, group);
}

// A format of GGUF; small bytes, so that what is a scale is no infinity.
inline MatrixPtr random_ggml(const GgmlFormat& format, int64_t rows, int64_t cols) {
  auto data = random_bytes(static_cast<size_t>(rows * cols / format.cols * format.bytes));
  for (auto& byte : data) byte &= 0x3f;
  return pack_ggml(data.data(), format.name, rows, cols);
}

inline MatrixPtr random_dense(int64_t rows, int64_t cols) {
  const auto values = random_floats(static_cast<size_t>(rows * cols), 0.1f);
  return pack_dense({as_bytes(values), DType::kFloat32, cols, 1}, rows, cols);
}

inline MatrixPtr random_bfloat16(int64_t rows, int64_t cols) {
  const auto values = random_floats(static_cast<size_t>(rows * cols), 0.1f);
  std::vector<uint16_t> halves(values.size());
  for (size_t i = 0; i < values.size(); i++)
    std::memcpy(&halves[i], as_bytes(values) + 4 * i + 2, 2);
  const auto* data = reinterpret_cast<const uint8_t*>(halves.data());
  return pack_dense({data, DType::kBFloat16, cols, 1}, rows, cols);
}

// The last group is shorter.
inline MatrixPtr random_float8(int64_t rows, int64_t cols, int group) {
  const auto values = random_bytes(static_cast<size_t>(rows * cols));
  const auto scales = random_floats(static_cast<size_t>(rows * ((cols + group - 1) / group)));
  return pack_float8(values.data(), scales.data(), rows, cols, group);
}

inline MatrixPtr random_float4(int64_t rows, int64_t cols) {
  const auto values = random_bytes(static_cast<size_t>(rows * cols / 2));
  const auto scales = random_bytes(static_cast<size_t>(rows * cols / kFloat4Cols));
  return pack_float4(values.data(), scales.data(), 0.3f, rows, cols);
}

// models.cpp: whole models, decoded and prefilled, in pieces and in company.
void check_models();
void check_states();

}  // namespace exo::check

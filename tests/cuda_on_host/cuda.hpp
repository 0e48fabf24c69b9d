// As much of CUDA as exo's kernels use, on the host: a fake of the card, whose arithmetic is
// written down from its manuals. A block's threads are threads, and blocks run one after the other.

#pragma once

#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define EXO_ON_HOST
#define __device__
#define __forceinline__ inline
#define __shared__ static

using std::min;

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim;

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint4 __ldcs(const uint4* from) { return *from; }
inline uint4 __ldg(const uint4* from) { return *from; }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) {
    found |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return found;
}

/// A number of `mantissa` bits beside the leading one, exponents down to `least`, kept in its 16
/// bits' place.
template <int mantissa, int least, int bias>
struct Number {
  uint16_t bits;

  Number() = default;
  explicit Number(double value) {
    int exponent;
    std::frexp(value, &exponent);
    const int unit = std::max(exponent - 1, least) - mantissa;
    const double steps = std::nearbyint(std::ldexp(std::fabs(value), -unit));
    // Bits of numbers are as ordered as the numbers are: a carry goes into the exponent.
    const int base = value == 0 ? 0 : (unit + mantissa + bias - 1) << mantissa;
    bits = static_cast<uint16_t>((std::signbit(value) ? 0x8000 : 0) |
                                 (static_cast<int>(steps) + (value == 0 ? 0 : base)));
  }
  operator float() const {
    const int exponent = (bits & 0x7fff) >> mantissa;
    const int fraction = bits & ((1 << mantissa) - 1);
    const int whole = exponent == 0 ? fraction : fraction | 1 << mantissa;
    const double value = std::ldexp(whole, std::max(exponent, 1) - bias - mantissa);
    return static_cast<float>(bits & 0x8000 ? -value : value);
  }
};
using __half = Number<10, -14, 15>;
using __nv_bfloat16 = Number<7, -126, 127>;

template <typename T>
struct Pair {
  T x, y;
};
using __half2 = Pair<__half>;
using __nv_bfloat162 = Pair<__nv_bfloat16>;

inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
template <typename T>
Pair<T> __hsub2(Pair<T> a, Pair<T> b) {
  return {T(double(a.x) - double(b.x)), T(double(a.y) - double(b.y))};
}
template <typename T>
Pair<T> __hfma2(Pair<T> a, Pair<T> b, Pair<T> c) {
  return {T(double(a.x) * b.x + c.x), T(double(a.y) * b.y + c.y)};
}

/// What the threads of a block wait at.
struct Block {
  struct Fragments {
    unsigned a[4], b[2];
  };
  explicit Block(int threads) : all(threads), lanes(threads) {
    for (int i = 0; i < threads / 32; ++i) {
      warps.push_back(std::make_unique<std::barrier<>>(32));
    }
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<Fragments> lanes;
};
inline Block* running;

inline void __syncthreads() { running->all.arrive_and_wait(); }

inline void launch(int blocks, int threads, const std::function<void()>& kernel) {
  for (int block = 0; block < blocks; ++block) {
    Block waits(threads);
    running = &waits;
    std::vector<std::thread> started;
    for (int i = 0; i < threads; ++i) {
      started.emplace_back([=, &kernel] {
        threadIdx.x = i;
        blockIdx.x = block;
        blockDim.x = threads;
        kernel();
      });
    }
    for (std::thread& thread : started) {
      thread.join();
    }
  }
}

namespace mlx::core::cu {

/// mma.m16n8k16: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <typename T>
void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                  unsigned b1) {
  const unsigned warp = threadIdx.x / 32;
  Block::Fragments* lanes = &running->lanes[warp * 32];
  lanes[threadIdx.x % 32] = {{a0, a1, a2, a3}, {b0, b1}};
  running->warps[warp]->arrive_and_wait();
  const auto number = [](unsigned pair, int half) {
    T found;
    found.bits = static_cast<uint16_t>(pair >> 16 * half);
    return double(float(found));
  };
  const int group = threadIdx.x % 32 / 4;
  const int in_group = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + (i < 2 ? 0 : 8);
    const int column = in_group * 2 + i % 2;
    double sum = sums[i];
    for (int k = 0; k < 16; ++k) {
      const Block::Fragments& of_a = lanes[row % 8 * 4 + k % 8 / 2];
      const Block::Fragments& of_b = lanes[column * 4 + k % 8 / 2];
      sum += number(of_a.a[row / 8 + k / 8 * 2], k % 2) * number(of_b.b[k / 8], k % 2);
    }
    sums[i] = static_cast<float>(sum);
  }
  running->warps[warp]->arrive_and_wait();
}

}  // namespace mlx::core::cu

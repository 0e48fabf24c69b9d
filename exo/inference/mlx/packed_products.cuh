// Matrices of 4- or 8-bit weights, for mx.fast.cuda_kernel: products of a few rows, and unpacking.

namespace mlx::core::cu {

template <typename To, typename From>
__device__ __forceinline__ To as(From value) {
  return *reinterpret_cast<To*>(&value);
}

__device__ __forceinline__ __half2 twice(__half value) { return __half2half2(value); }

__device__ __forceinline__ __nv_bfloat162 twice(__nv_bfloat16 value) {
  return __bfloat162bfloat162(value);
}

/// The weights `scale * q + bias` of a group, two at a time. `base` is the bits of two numbers
/// whose lowest bits count ones: with q in these they are base + q.
template <typename T, unsigned base>
struct BasedGroup {
  using Two = decltype(twice(T()));
  Two scale, bias;
  __device__ BasedGroup(T s, T b) : scale(twice(s)), bias(twice(b)) {}
  __device__ unsigned weights(unsigned based) const {
    return as<unsigned>(__hfma2(__hsub2(as<Two>(based), as<Two>(base)), scale, bias));
  }
};

template <typename T>
constexpr unsigned base_of = 0x64006400u;  // 1024
template <>
constexpr unsigned base_of<__nv_bfloat16> = 0x43004300u;  // 128

/// The weights of a group, out of a word of packed ones.
template <typename T, int bits>
struct Group;

template <typename T>
struct Group<T, 4> : BasedGroup<T, base_of<T>> {
  using BasedGroup<T, base_of<T>>::BasedGroup;
  /// Weights p and p + 4.
  __device__ unsigned pair(unsigned word, int p) const {
    return this->weights(((word >> (4 * p)) & 0x000f000fu) | base_of<T>);
  }
};

template <>
struct Group<__half, 8> : BasedGroup<__half, base_of<__half>> {
  using BasedGroup::BasedGroup;
  /// Weights 2 p and 2 p + 1.
  __device__ unsigned pair(unsigned word, int p) const {
    return weights(__byte_perm(word, base_of<__half>, p == 0 ? 0x5150 : 0x5352));
  }
};

template <>
struct Group<__nv_bfloat16, 8> {
  float scale, bias;
  __device__ Group(__nv_bfloat16 s, __nv_bfloat16 b)
      : scale(__bfloat162float(s)), bias(__bfloat162float(b)) {}
  __device__ float one(unsigned word, int i) const {
    // A bfloat16 has no eight bits that count ones; a float's 2^23 has.
    const float v = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388608.0f;
    return fmaf(v, scale, bias);
  }
  __device__ unsigned pair(unsigned word, int p) const {
    return as<unsigned>(__floats2bfloat162_rn(one(word, 2 * p), one(word, 2 * p + 1)));
  }
};

#ifndef EXO_ON_HOST  // where a test gives its own
/// sums += a * b of 16 x 16 and 16 x 8 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
template <typename T>
__device__ void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                             unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&sums)[4], unsigned a0, unsigned a1,
                                                     unsigned a2, unsigned a3, unsigned b0,
                                                     unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&sums)[4], unsigned a0,
                                                            unsigned a1, unsigned a2, unsigned a3,
                                                            unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

/// A matrix (outputs, cols), packed, cols a multiple of 128 / bits; scales and biases are (outputs,
/// cols / group).
template <typename T>
struct Packed {
  const uint32_t* words;
  const T* scales;
  const T* biases;
  int outputs;
};

constexpr int warps = 8;  // of a block
constexpr int tile_rows = 8;
constexpr int tile_outputs = 16;

/// out[b][o] = sum over k of x[b][k] * weight[o][k], for each of `count` matrices.
///
/// A block computes 16 outputs of one of them, for 8 `row_tiles` rows; its warps share the columns,
/// tile by tile. Lane 4 g + c of a warp holds what mma.m16n8k16 wants of it: outputs g and g + 8,
/// row g of each row tile, and a quarter c of the tile's columns. Which columns a fragment calls
/// its own is free where both factors agree, so a lane reads 16 bytes of each output and the same
/// columns of its row. Rows after the last are zeros. What a row comes to depends on no other row.
///
/// x: (rows, cols); products: (rows, outputs) of each matrix. Grid: the blocks of each matrix's
/// outputs, one matrix after the other.
template <typename T, int bits, int group, int row_tiles, int count>
__device__ __forceinline__ void few_rows(const T* x, int rows, int cols,
                                         const Packed<T> (&matrices)[count],
                                         T* const (&products)[count]) {
  Packed<T> matrix = matrices[0];
  T* out = products[0];
  int block = blockIdx.x;
#pragma unroll
  for (int i = 1; i < count; ++i) {
    const int before = (matrices[i - 1].outputs + tile_outputs - 1) / tile_outputs;
    if (block < before) {
      break;
    }
    block -= before;
    matrix = matrices[i];
    out = products[i];
  }

  constexpr int per_load = 128 / bits;      // weights in 16 bytes
  constexpr int loads_of_x = per_load / 8;  // of 16 bytes, for as many columns

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const int outputs = matrix.outputs;
  const int first_output = block * tile_outputs;

  const long long loads = cols / per_load;
  const long long groups = cols / group;
  const long long output0 = min(first_output + g, outputs - 1);
  const long long output1 = min(first_output + g + 8, outputs - 1);
  const uint4* weight0 = reinterpret_cast<const uint4*>(matrix.words) + output0 * loads;
  const uint4* weight1 = reinterpret_cast<const uint4*>(matrix.words) + output1 * loads;
  const int tiles = (cols + 4 * per_load - 1) / (4 * per_load);

  float sums[row_tiles][4] = {};
  for (int tile = warp; tile < tiles; tile += warps) {
    const int load = tile * 4 + c;
    const bool is_inside = load < loads;
    uint4 packed0 = make_uint4(0, 0, 0, 0);
    uint4 packed1 = packed0;
    T numbers[4] = {T(0.0f), T(0.0f), T(0.0f), T(0.0f)};
    if (is_inside) {
      packed0 = __ldcs(weight0 + load);
      packed1 = __ldcs(weight1 + load);
      const int in_row = load * per_load / group;
      numbers[0] = matrix.scales[output0 * groups + in_row];
      numbers[1] = matrix.biases[output0 * groups + in_row];
      numbers[2] = matrix.scales[output1 * groups + in_row];
      numbers[3] = matrix.biases[output1 * groups + in_row];
    }
    const Group<T, bits> group0(numbers[0], numbers[1]);
    const Group<T, bits> group1(numbers[2], numbers[3]);
    const unsigned words0[4] = {packed0.x, packed0.y, packed0.z, packed0.w};
    const unsigned words1[4] = {packed1.x, packed1.y, packed1.z, packed1.w};
#pragma unroll
    for (int i = 0; i < loads_of_x; ++i) {
      unsigned a0[4];
      unsigned a1[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int word = bits == 4 ? i : 2 * i + p / 2;
        const int in_word = bits == 4 ? p : p % 2;
        a0[p] = group0.pair(words0[word], in_word);
        a1[p] = group1.pair(words1[word], in_word);
      }
#pragma unroll
      for (int t = 0; t < row_tiles; ++t) {
        const int row = t * tile_rows + g;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (is_inside && row < rows) {
          v = __ldg(reinterpret_cast<const uint4*>(x + static_cast<long long>(row) * cols) +
                    load * loads_of_x + i);
        }
        unsigned b[4] = {v.x, v.y, v.z, v.w};
        if constexpr (bits == 4) {
          b[0] = __byte_perm(v.x, v.z, 0x5410);
          b[1] = __byte_perm(v.x, v.z, 0x7632);
          b[2] = __byte_perm(v.y, v.w, 0x5410);
          b[3] = __byte_perm(v.y, v.w, 0x7632);
        }
        multiply_add<T>(sums[t], a0[0], a1[0], a0[1], a1[1], b[0], b[1]);
        multiply_add<T>(sums[t], a0[2], a1[2], a0[3], a1[3], b[2], b[3]);
      }
    }
  }

  __shared__ float parts[warps][row_tiles][tile_rows][tile_outputs];
#pragma unroll
  for (int t = 0; t < row_tiles; ++t) {
    parts[warp][t][2 * c][g] = sums[t][0];
    parts[warp][t][2 * c + 1][g] = sums[t][1];
    parts[warp][t][2 * c][g + 8] = sums[t][2];
    parts[warp][t][2 * c + 1][g + 8] = sums[t][3];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < row_tiles * tile_rows * tile_outputs; i += warps * 32) {
    const int row = i / tile_outputs;
    const int output = first_output + i % tile_outputs;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      sum += (&parts[w][0][0][0])[i];
    }
    if (row < rows && output < outputs) {
      out[static_cast<long long>(row) * outputs + output] = static_cast<T>(sum);
    }
  }
}

/// Weights of a word of each thread of the grid, in their order.
template <typename T, int bits, int group>
__device__ __forceinline__ void unpack(const Packed<T>& matrix, int cols, T* out) {
  constexpr int per_word = 32 / bits;
  const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long first = at * per_word;
  if (first >= static_cast<long long>(matrix.outputs) * cols) {
    return;
  }
  const unsigned word = matrix.words[at];
  const Group<T, bits> numbers(matrix.scales[first / group], matrix.biases[first / group]);
  if constexpr (bits == 4) {
    const unsigned p[4] = {numbers.pair(word, 0), numbers.pair(word, 1), numbers.pair(word, 2),
                           numbers.pair(word, 3)};
    *reinterpret_cast<uint4*>(out + first) =
        make_uint4(__byte_perm(p[0], p[1], 0x5410), __byte_perm(p[2], p[3], 0x5410),
                   __byte_perm(p[0], p[1], 0x7632), __byte_perm(p[2], p[3], 0x7632));
  } else {
    *reinterpret_cast<uint2*>(out + first) =
        make_uint2(numbers.pair(word, 0), numbers.pair(word, 1));
  }
}

}  // namespace mlx::core::cu

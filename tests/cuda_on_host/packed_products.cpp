// The kernels of exo/inference/mlx/packed_products.cuh as functions that Python can call.

#include "cuda.hpp"
// What a card's compiler has of itself comes first.
#include "packed_products.cuh"

namespace {

using namespace mlx::core::cu;

constexpr int threads = warps * 32;

template <typename T, int bits, int group>
void run(const T* x, int rows, int cols, const Packed<T> (&matrices)[2], T* const (&out)[2],
         T* const (&unpacked)[2]) {
  int blocks = 0;
  for (const Packed<T>& matrix : matrices) {
    blocks += (matrix.outputs + tile_outputs - 1) / tile_outputs;
  }
  launch(blocks, threads, [&] {
    rows <= tile_rows ? few_rows<T, bits, group, 1>(x, rows, cols, matrices, out)
                      : few_rows<T, bits, group, 4>(x, rows, cols, matrices, out);
  });
  for (int i = 0; i < 2; ++i) {
    const int words = matrices[i].outputs * (cols * bits / 32);
    launch((words + threads - 1) / threads, threads,
           [&] { unpack<T, bits, group>(matrices[i], cols, unpacked[i]); });
  }
}

template <typename T>
bool dispatch(int bits, int group, const T* x, int rows, int cols, const Packed<T> (&matrices)[2],
              T* const (&out)[2], T* const (&unpacked)[2]) {
  if (bits == 4 && group == 32) {
    run<T, 4, 32>(x, rows, cols, matrices, out, unpacked);
  } else if (bits == 4 && group == 64) {
    run<T, 4, 64>(x, rows, cols, matrices, out, unpacked);
  } else if (bits == 8 && group == 32) {
    run<T, 8, 32>(x, rows, cols, matrices, out, unpacked);
  } else if (bits == 8 && group == 128) {
    run<T, 8, 128>(x, rows, cols, matrices, out, unpacked);
  } else {
    return false;
  }
  return true;
}

template <typename T>
bool call(int bits, int group, const void* x, int rows, int cols, const int* outputs,
          const uint32_t* const* words, void* const* scales, void* const* biases, void* const* out,
          void* const* unpacked) {
  const auto matrix = [&](int i) {
    return Packed<T>{words[i], static_cast<T*>(scales[i]), static_cast<T*>(biases[i]), outputs[i]};
  };
  const Packed<T> matrices[] = {matrix(0), matrix(1)};
  T* const products[] = {static_cast<T*>(out[0]), static_cast<T*>(out[1])};
  T* const dense[] = {static_cast<T*>(unpacked[0]), static_cast<T*>(unpacked[1])};
  return dispatch<T>(bits, group, static_cast<const T*>(x), rows, cols, matrices, products, dense);
}

}  // namespace

extern "C" bool packed_products(bool is_bfloat, int bits, int group, const void* x, int rows,
                                int cols, const int* outputs, const uint32_t* const* words,
                                void* const* scales, void* const* biases, void* const* out,
                                void* const* unpacked) {
  return is_bfloat ? call<__nv_bfloat16>(bits, group, x, rows, cols, outputs, words, scales, biases,
                                         out, unpacked)
                   : call<__half>(bits, group, x, rows, cols, outputs, words, scales, biases, out,
                                  unpacked);
}

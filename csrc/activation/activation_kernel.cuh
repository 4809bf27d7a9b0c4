// Gated activation of gate_up rows, read by pair, written by permuted row and by pair.
#pragma once

#include "../common/ptx.cuh"
#include "../common/vector.cuh"
#include "activation.h"
#include "activation_math.h"

namespace moelora {

constexpr int kActivationThreads = 256;

// Eight gates and eight ups of one row in fp32.
struct GatedVector {
  float gate[8], up[8];
};

// Columns column..column+7 of both halves; `row_ptr` is a row of 2 * width elements.
template <class T>
__device__ __forceinline__ GatedVector load_gated(const T* row_ptr, int64_t width, int64_t column,
                                                  GateUpLayout layout) {
  const bool interleaved = layout == GateUpLayout::kInterleaved;
  const int64_t first = interleaved ? 2 * column : column;
  float low[8], high[8];
  unpack8<T>(load_raw8(row_ptr + first), low);
  unpack8<T>(load_raw8(row_ptr + first + (interleaved ? 8 : width)), high);
  const bool swapped = layout == GateUpLayout::kUpGate;
  GatedVector result;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float* pairs = (j < 4 ? low : high) + 2 * (j % 4);
    result.gate[j] = interleaved ? pairs[0] : (swapped ? high[j] : low[j]);
    result.up[j] = interleaved ? pairs[1] : (swapped ? low[j] : high[j]);
  }
  return result;
}

// One thread does eight columns of one pair. I and so every row start are multiples of 8 elements.
template <class T>
__global__ void __launch_bounds__(kActivationThreads)
    activation_kernel(const ActivationParams params) {
  ptx::wait_for_previous_kernel();
  const int64_t width = params.intermediate_size;
  const uint64_t vectors = width / 8;
  const uint64_t item = uint64_t{blockIdx.x} * kActivationThreads + threadIdx.x;
  const uint64_t pair = item / vectors;
  if (pair >= static_cast<uint64_t>(params.num_pairs)) return;
  const int64_t column = (item - pair * vectors) * 8;
  T* lora_input = params.lora_input_ptr == nullptr
                      ? nullptr
                      : static_cast<T*>(params.lora_input_ptr) + pair * width + column;
  const int64_t row = params.expanded_to_permuted_ptr[pair];
  if (row < 0 || row >= params.max_rows) {
    if (lora_input != nullptr) store_raw8(lora_input, make_uint4(0, 0, 0, 0));
    return;
  }

  const T* gate_up = static_cast<const T*>(params.gate_up_ptr) + row * 2 * width;
  GatedVector in = load_gated(gate_up, width, column, params.layout);
  if (params.delta_ptr != nullptr) {
    const T* delta = static_cast<const T*>(params.delta_ptr) + pair * 2 * width;
    const GatedVector add = load_gated(delta, width, column, GateUpLayout::kGateUp);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      in.gate[j] += add.gate[j];
      in.up[j] += add.up[j];
    }
  }
  float result[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    result[j] =
        gated_activation(params.activation, in.gate[j], in.up[j], params.alpha, params.limit);
  }
  const uint4 z = pack8<T>(result);
  store_raw8(static_cast<T*>(params.z_ptr) + row * width + column, z);
  if (lora_input != nullptr) store_raw8(lora_input, z);
}

}  // namespace moelora

// Gathers rows of hidden_states into permuted order.
#pragma once

#include "../common/vector.cuh"
#include "permute.h"

namespace moelora {

constexpr int kPermuteWarps = 8;
// Vectors of 8 elements that a lane has in flight, and elements that a warp copies.
constexpr int kPermuteVectors = 4;
constexpr int kPermuteSegment = 32 * 8 * kPermuteVectors;

// One warp copies one segment of one permuted row; `segments` of them make a row. A short segment
// keeps all SMs busy with the few rows of a decode batch.
template <class T>
__global__ void __launch_bounds__(32 * kPermuteWarps)
    permute_kernel(const PermuteParams params, int32_t segments) {
  ptx::wait_for_previous_kernel();
  const int64_t item = int64_t{blockIdx.x} * kPermuteWarps + threadIdx.x / 32;
  const int64_t row = item / segments;
  if (row >= params.max_rows) return;
  const int64_t pair = params.permuted_to_expanded_ptr[row];
  if (pair < 0 || pair >= params.num_tokens * params.top_k) return;

  const int64_t token = pair / params.top_k;
  const T* from =
      static_cast<const T*>(params.hidden_states_ptr) + token * params.hidden_states_stride;
  T* to = static_cast<T*>(params.permuted_ptr) + row * params.hidden_size;
  const int64_t first = (item % segments) * kPermuteSegment + threadIdx.x % 32 * 8;
  uint4 values[kPermuteVectors];
#pragma unroll
  for (int i = 0; i < kPermuteVectors; ++i) {
    const int64_t column = first + i * 256;
    if (column < params.hidden_size) values[i] = load_raw8(from + column);
  }
  if (params.row_weights.kind != WeightMatrix::Kind::kOne) {
    const float weight = params.row_weights(pair);
#pragma unroll
    for (int i = 0; i < kPermuteVectors; ++i) {
      float weighted[8];
      unpack8<T>(values[i], weighted);
#pragma unroll
      for (float& value : weighted) value *= weight;
      values[i] = pack8<T>(weighted);
    }
  }
#pragma unroll
  for (int i = 0; i < kPermuteVectors; ++i) {
    const int64_t column = first + i * 256;
    if (column < params.hidden_size) store_raw8(to + column, values[i]);
  }
}

}  // namespace moelora

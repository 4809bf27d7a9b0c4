// The weighted sum over a token's pairs.
#pragma once

#include "../common/ptx.cuh"
#include "../common/vector.cuh"
#include "finalize.h"

namespace moelora {

constexpr int kFinalizeThreads = 128;
constexpr int kFinalizeColumns = 8 * kFinalizeThreads;

// One block does kFinalizeColumns columns of one token, eight a thread; `chunks` blocks make a row.
// The rows of several k are in flight at once, and added in ascending k.
template <class T, bool kHasDelta>
__global__ void __launch_bounds__(kFinalizeThreads)
    finalize_kernel(const FinalizeParams params, int32_t chunks) {
  constexpr int kInFlight = kHasDelta ? 4 : 8;
  __shared__ int32_t rows[kMaxTopK];
  __shared__ float weights[kMaxTopK];
  ptx::wait_for_previous_kernel();
  const int64_t token = blockIdx.x / static_cast<uint32_t>(chunks);
  const int64_t column =
      int64_t{blockIdx.x % static_cast<uint32_t>(chunks)} * kFinalizeColumns + threadIdx.x * 8;
  const int64_t first_pair = token * params.top_k;
  if (threadIdx.x < params.top_k) {
    const int32_t row = params.expanded_to_permuted_ptr[first_pair + threadIdx.x];
    const bool local = row >= 0 && row < params.max_rows;
    rows[threadIdx.x] = local ? row : -1;
    weights[threadIdx.x] = local ? params.weights(first_pair + threadIdx.x) : 0.0f;
  }
  __syncthreads();
  if (column >= params.hidden_size) return;

  const T* down = static_cast<const T*>(params.down_ptr) + column;
  const T* delta =
      static_cast<const T*>(params.delta_ptr) + first_pair * params.hidden_size + column;
  float sum[8] = {};
  for (int first = 0; first < params.top_k; first += kInFlight) {
    uint4 down_values[kInFlight], delta_values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = first + i;
      if (k >= params.top_k || rows[k] < 0) continue;
      down_values[i] = load_raw8(down + rows[k] * params.hidden_size);
      if constexpr (kHasDelta) delta_values[i] = load_raw8(delta + k * params.hidden_size);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int k = first + i;
      if (k >= params.top_k || rows[k] < 0) continue;
      const float weight = weights[k];
      const float delta_weight = params.delta_is_weighted ? 1.0f : weight;
      float values[8];
      unpack8<T>(down_values[i], values);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += weight * values[j];
      if constexpr (kHasDelta) {
        unpack8<T>(delta_values[i], values);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += delta_weight * values[j];
      }
    }
  }
#pragma unroll
  for (float& value : sum) value *= params.routed_scaling_factor;
  store_raw8(static_cast<T*>(params.out_ptr) + token * params.out_stride + column, pack8<T>(sum));
}

}  // namespace moelora

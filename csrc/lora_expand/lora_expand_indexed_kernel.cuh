// B v for few pairs: no sort, fp32 products.
#pragma once

#include "../common/lora_rows.h"
#include "../common/ptx.cuh"
#include "../common/vector.cuh"
#include "lora_expand_part.cuh"

namespace moelora {

constexpr int kExpandIndexedThreads = 256;
constexpr int kExpandIndexedInFlight = 4;  // vectors of B that a thread has in flight
// With more blocks an SM the compiler would save registers by having fewer loads in flight.
constexpr int kExpandIndexedBlocksPerSm = 4;

// B[row, :rank] v, ranks in ascending order; v ends in zeros up to a multiple of 32. Columns of B
// beyond the slot's rank may hold anything: they are not multiplied.
template <class T, bool kAligned>
__device__ __forceinline__ float dot_ranks(const T* b_row, const float* v, int32_t rank) {
  float sum = 0.0f;
  if constexpr (kAligned) {
    for (int32_t first = 0; first < rank; first += 8 * kExpandIndexedInFlight) {
      uint4 raw[kExpandIndexedInFlight];
#pragma unroll
      for (int i = 0; i < kExpandIndexedInFlight; ++i) {
        const int32_t k = first + 8 * i;
        raw[i] = k < rank ? load_raw8(b_row + k) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kExpandIndexedInFlight; ++i) {
        float values[8];
        unpack8<T>(raw[i], values);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int32_t k = first + 8 * i + j;
          sum += (k < rank ? values[j] : 0.0f) * v[k];
        }
      }
    }
  } else {
    for (int32_t k = 0; k < rank; ++k) sum += to_float(b_row[k]) * v[k];
  }
  return sum;
}

// One block computes kExpandIndexedThreads columns of one part of one pair's delta, one a thread;
// blocks_per_part of them make a part. kAligned: rows of B start at multiples of 16 bytes and hold
// a multiple of 8 elements.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kExpandIndexedThreads, kExpandIndexedBlocksPerSm)
    lora_expand_indexed_kernel(const LoraExpandParams params, int32_t blocks_per_part) {
  static_assert(kExpandIndexedThreads == kMaxRank);
  __shared__ float v[kMaxRank];
  ptx::wait_for_previous_kernel();
  const uint32_t part_index = blockIdx.x / static_cast<uint32_t>(blocks_per_part);
  const uint32_t parts = num_expand_parts(params);
  const int64_t pair = part_index / parts;
  const ExpandPart part = expand_part(params, static_cast<int32_t>(part_index % parts));
  const int64_t column =
      int64_t{blockIdx.x % static_cast<uint32_t>(blocks_per_part)} * kExpandIndexedThreads +
      threadIdx.x;
  const MatrixIndex index = matrix_of_pair(params, pair);
  if (index.exists()) {
    const int32_t k = threadIdx.x;
    v[k] = k < index.rank ? rank_vector(params, pair)[part.first_rank + k] : 0.0f;
  }
  __syncthreads();
  if (column >= part.num_columns) return;

  float delta = 0.0f;
  if (index.exists()) {
    const T* b = static_cast<const T*>(params.lora_b_ptr) + index.slot * params.slot_stride +
                 index.expert * params.expert_stride +
                 (part.first_column + column) * params.row_stride;
    delta = expand_scale(params, pair, index.slot, part.component) *
            dot_ranks<T, kAligned>(b, v, index.rank);
  }
  static_cast<T*>(params.delta_ptr)[pair * params.out_features + part.first_column + column] =
      from_float<T>(delta);
}

}  // namespace moelora

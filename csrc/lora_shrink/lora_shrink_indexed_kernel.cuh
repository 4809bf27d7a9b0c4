// A x for few rows: no sort, no tiles, as many blocks as there are (row, rank rows).
#pragma once

#include "../common/lora_rows.h"
#include "../common/ptx.cuh"
#include "../common/vector.cuh"
#include "lora_shrink.h"

namespace moelora {

constexpr int kIndexedRankRows = 2;  // rank rows of one block
constexpr int kIndexedSplits = 4;    // warps that share one rank row, each a quarter of its columns
constexpr int kIndexedInFlight = 4;  // vectors of x and of A that a lane has in flight
constexpr int kIndexedThreads = 32 * kIndexedRankRows * kIndexedSplits;

// Eight elements of A; a row of any alignment unless kAligned.
template <bool kAligned>
__device__ __forceinline__ uint4 load_a8(const uint16_t* ptr) {
  if constexpr (kAligned) {
    return load_raw8(ptr);
  } else {
    const auto two = [&](int j) { return ptr[j] | uint32_t{ptr[j + 1]} << 16; };
    return make_uint4(two(0), two(2), two(4), two(6));
  }
}

// Four blocks an SM: with more, the compiler would save registers by having fewer loads in flight.
constexpr int kIndexedBlocksPerSm = 4;

// One block computes kIndexedRankRows elements of one row of v; `blocks_per_row` of them make a
// row. The partial sums meet in a fixed order. kAligned: A's rows start at multiples of 16 bytes.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kIndexedThreads, kIndexedBlocksPerSm)
    lora_shrink_indexed_kernel(const LoraShrinkParams params, int32_t blocks_per_row) {
  __shared__ float partial[kIndexedRankRows][kIndexedSplits];
  ptx::wait_for_previous_kernel();
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t split = warp % kIndexedSplits, local_row = warp / kIndexedSplits;
  const int64_t row = blockIdx.x / static_cast<uint32_t>(blocks_per_row);
  const int32_t first_rank_row =
      static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(blocks_per_row)) * kIndexedRankRows;
  const int32_t rank_rows = params.num_components * params.rank;
  const MatrixIndex index =
      params.v_per_token() ? matrix_of_token(params, row) : matrix_of_pair(params, row);

  // A row beyond the slot's rank may hold anything: it is not read.
  const int32_t rank_row = first_rank_row + local_row;
  const bool used = index.exists() && rank_row < rank_rows && rank_row % params.rank < index.rank;
  float sum = 0.0f;
  if (used) {
    const T* x = static_cast<const T*>(params.x_ptr) + params.x_row(row) * params.x_stride;
    const uint16_t* a = static_cast<const uint16_t*>(params.lora_a_ptr) +
                        index.slot * params.slot_stride + index.expert * params.expert_stride +
                        rank_row * params.row_stride;
    constexpr int kStep = 8 * 32 * kIndexedSplits;
    for (int64_t first = 8 * (32 * split + lane); first < params.in_features;
         first += kIndexedInFlight * kStep) {
      uint4 x_raw[kIndexedInFlight], a_raw[kIndexedInFlight];
#pragma unroll
      for (int i = 0; i < kIndexedInFlight; ++i) {
        const int64_t column = first + i * kStep;
        const bool inside = column < params.in_features;
        x_raw[i] = inside ? load_raw8(x + column) : make_uint4(0, 0, 0, 0);
        a_raw[i] = inside ? load_a8<kAligned>(a + column) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kIndexedInFlight; ++i) {
        float x_values[8], a_values[8];
        unpack8<T>(x_raw[i], x_values);
        unpack8<T>(a_raw[i], a_values);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += a_values[j] * x_values[j];
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
  }
  if (lane == 0) partial[local_row][split] = sum;
  __syncthreads();

  const int32_t out_row = first_rank_row + static_cast<int32_t>(threadIdx.x);
  if (threadIdx.x < kIndexedRankRows && out_row < rank_rows) {
    const float* parts = partial[threadIdx.x];
    params.v_ptr[row * rank_rows + out_row] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
}

}  // namespace moelora

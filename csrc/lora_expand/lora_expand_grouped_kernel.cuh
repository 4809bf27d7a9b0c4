// B v for many pairs: tensor-core tiles over windows of rows that mostly share a matrix.
#pragma once

#include "../common/lora_window.cuh"
#include "../common/ptx.cuh"
#include "../common/vector.cuh"
#include "lora_expand_part.cuh"

namespace moelora {

constexpr int kExpandRows = 64;  // rows of a window
constexpr int kExpandThreads = 128;
// Blocks an SM holds: as many as registers allow without spills, so that stores go on while new
// blocks look up their rows.
constexpr int expand_blocks_per_sm(int steps) { return steps == 1 ? 5 : steps == 2 ? 4 : 3; }
constexpr int kExpandWarpColumns = 32;
constexpr int kExpandPassColumns = kExpandThreads / 32 * kExpandWarpColumns;  // of all warps
constexpr int kClearRows = 64;  // pairs that a clearing block looks at

// Floats from one row of rank vectors to the next in shared memory: whole K steps of 16, and an odd
// multiple of 16, so that the two rows that eight lanes read lie in different banks.
MOELORA_HOST_DEVICE int32_t expand_v_pitch(int32_t rank) {
  const int32_t steps = (rank + 15) / 16;
  return 16 * (steps + (steps + 1) % 2);
}

// Copies the rank vectors of the window's rows for one part; zero beyond a row's rank, whatever v
// or B hold there.
__device__ inline void load_rank_vectors(const LoraExpandParams& params,
                                         const LoraWindow<kExpandRows>& window,
                                         const ExpandPart& part, float* v_rows, float* scales) {
  const int32_t pitch = expand_v_pitch(params.rank), experts = experts_per_slot(params);
  for (int32_t i = threadIdx.x; i < kExpandRows * pitch; i += kExpandThreads) {
    const int32_t r = i / pitch, k = i % pitch, matrix = window.matrix[r];
    float value = 0.0f;
    if (matrix != kNoMatrix && k < params.slots.rank(matrix / experts, params.part, params.rank)) {
      value = rank_vector(params, window.row[r])[part.first_rank + k];
    }
    v_rows[i] = value;
  }
  for (int32_t r = threadIdx.x; r < kExpandRows; r += kExpandThreads) {
    const int32_t matrix = window.matrix[r];
    scales[r] = matrix == kNoMatrix
                    ? 0.0f
                    : expand_scale(params, window.row[r], matrix / experts, part.component);
  }
}

// B[row, k..k+3] as loaded, zero from `rank` on.
template <bool kAligned>
__device__ __forceinline__ uint2 load_b4(const uint16_t* b_row, int32_t k, int32_t rank) {
  uint2 raw = make_uint2(0, 0);
  if constexpr (kAligned) {
    if (k < rank) raw = *reinterpret_cast<const uint2*>(b_row + k);
    if (k + 1 >= rank) raw.x &= 0xffffu;
    if (k + 2 >= rank) raw.y = 0;
    if (k + 3 >= rank) raw.y &= 0xffffu;
  } else {
    if (k < rank) raw.x = b_row[k];
    if (k + 1 < rank) raw.x |= uint32_t{b_row[k + 1]} << 16;
    if (k + 2 < rank) raw.y = b_row[k + 2];
    if (k + 3 < rank) raw.y |= uint32_t{b_row[k + 3]} << 16;
  }
  return raw;
}

// The B operands of one K step of 16 for 32 columns of the warp. The MMA's column c of tile j is
// column c / 2 * 8 + 2 * j + c % 2, so that the four tiles leave a lane eight neighbouring columns
// to store; its K slots t and t + 4 of the two products are k = 4 t .. 4 t + 3, so that a lane
// loads four neighbours.
struct BStep {
  uint2 raw[4];  // four half-precision values of each tile
};

template <bool kAligned>
__device__ __forceinline__ BStep load_b_step(const uint16_t* b, int64_t row_stride, int32_t columns,
                                             int32_t k, int32_t rank) {
  const int lane = threadIdx.x % 32, group = lane / 4;
  BStep step;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int32_t column = group / 2 * 8 + 2 * j + group % 2;
    step.raw[j] =
        load_b4<kAligned>(b + column * row_stride, k + lane % 4 * 4, column < columns ? rank : 0);
  }
  return step;
}

// The two row operands of one K step for the two products of eight K slots. v is split into two
// tf32 terms, which together hold 22 bits of it: the product is as good as fp32.
struct VStep {
  uint32_t high[2][4], low[2][4];
};

__device__ __forceinline__ VStep load_v_step(const float* v_rows, int32_t pitch, int32_t k) {
  const int lane = threadIdx.x % 32;
  const float* row = v_rows + lane / 4 * pitch + k + lane % 4 * 4;
  const float4 top = *reinterpret_cast<const float4*>(row);
  const float4 bottom = *reinterpret_cast<const float4*>(row + 8 * pitch);
  const float values[2][4] = {{top.x, bottom.x, top.y, bottom.y},
                              {top.z, bottom.z, top.w, bottom.w}};
  VStep step;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      step.high[half][i] = ptx::to_tf32(values[half][i]);
      step.low[half][i] = ptx::to_tf32(values[half][i] - __uint_as_float(step.high[half][i]));
    }
  }
  return step;
}

// bf16 and fp16 are exact in tf32. Neighbouring products go to different sums, so that none waits
// for the one before.
template <class T>
__device__ __forceinline__ void multiply_step(const VStep& v, const BStep& b, float (&sums)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float2 operands[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      operands[j] = ptx::unpack2<T>(half == 0 ? b.raw[j].x : b.raw[j].y);
      ptx::mma_m16n8k8_tf32(sums[j], v.high[half], __float_as_uint(operands[j].x),
                            __float_as_uint(operands[j].y));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::mma_m16n8k8_tf32(sums[j], v.low[half], __float_as_uint(operands[j].x),
                            __float_as_uint(operands[j].y));
    }
  }
}

// Writes 0 to the deltas of pairs first..first+kClearRows-1 that have no adapter or are not local.
// Each warp looks at its share of them and writes their rows one after the other.
template <class T>
__device__ void clear_unused_pairs(const LoraExpandParams& params, int64_t first) {
  constexpr int kPairsPerWarp = kClearRows / (kExpandThreads / 32);
  const int lane = threadIdx.x % 32;
  first += threadIdx.x / 32 * kPairsPerWarp;
  bool unused = false;
  if (lane < kPairsPerWarp && first + lane < params.num_tokens * params.top_k) {
    unused = !matrix_of_pair(params, first + lane).exists();
  }
  for (uint32_t mask = __ballot_sync(0xffffffffu, unused); mask != 0; mask &= mask - 1) {
    const int64_t pair = first + __ffs(mask) - 1;
    T* delta = static_cast<T*>(params.delta_ptr) + pair * params.out_features;
    for (int64_t column = 8 * lane; column < params.out_features; column += 8 * 32) {
      store_raw8(delta + column, make_uint4(0, 0, 0, 0));
    }
  }
}

// Blocks 0..num_windows * blocks_per_window - 1 compute columns_per_block columns of one part of a
// window of sorted rows; the blocks after them clear the pairs without adapter. A warp owns 32
// columns at a time: for every matrix of the window it holds B's operands of kSteps K steps in
// registers (ranks beyond them are loaded again for each 16 rows) and runs over the rows in
// sixteens. Rows do not mix, and the K order is fixed. kAligned: rows of B start at multiples of 16
// bytes and hold a multiple of 8 elements.
template <class T, int kSteps, bool kAligned>
__global__ void __launch_bounds__(kExpandThreads, expand_blocks_per_sm(kSteps))
    lora_expand_grouped_kernel(const LoraExpandParams params, int32_t num_windows,
                               int32_t blocks_per_window, int32_t columns_per_block) {
  extern __shared__ __align__(16) float v_rows[];
  __shared__ LoraWindow<kExpandRows> window;
  __shared__ float scales[kExpandRows];
  ptx::wait_for_previous_kernel();
  const int64_t window_index = blockIdx.x / blocks_per_window;
  if (window_index >= num_windows) {
    const int64_t first =
        int64_t{static_cast<int32_t>(blockIdx.x) - num_windows * blocks_per_window} * kClearRows;
    return clear_unused_pairs<T>(params, first);
  }
  load_window(window, params, window_index * kExpandRows, false);
  __syncthreads();
  const int32_t blocks_per_part = blocks_per_window / num_expand_parts(params);
  const int32_t block_in_window = blockIdx.x % blocks_per_window;
  const ExpandPart part = expand_part(params, block_in_window / blocks_per_part);
  load_rank_vectors(params, window, part, v_rows, scales);
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const int32_t pitch = expand_v_pitch(params.rank);
  const int64_t first_column = int64_t{block_in_window % blocks_per_part} * columns_per_block;
  for (int32_t matrix = next_matrix(window, -1); matrix != kNoMatrix;
       matrix = next_matrix(window, matrix)) {
    const int32_t slot = matrix / experts_per_slot(params);
    const int32_t expert = matrix % experts_per_slot(params);
    const int32_t rank = params.slots.rank(slot, params.part, params.rank);
    const uint16_t* b = static_cast<const uint16_t*>(params.lora_b_ptr) +
                        slot * params.slot_stride + expert * params.expert_stride +
                        part.first_column * params.row_stride;
    for (int32_t pass = 0; pass < columns_per_block; pass += kExpandPassColumns) {
      const int64_t column = first_column + pass + threadIdx.x / 32 * kExpandWarpColumns;
      if (column >= part.num_columns) break;
      const int32_t columns =
          static_cast<int32_t>(min(part.num_columns - column, int64_t{kExpandWarpColumns}));
      const uint16_t* b_columns = b + column * params.row_stride;
      BStep resident[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        resident[step] =
            load_b_step<kAligned>(b_columns, params.row_stride, columns, 16 * step, rank);
      }
#pragma unroll 1
      for (int first_row = 0; first_row < kExpandRows; first_row += 16) {
        const int row = first_row + lane / 4;
        const bool top = window.matrix[row] == matrix, bottom = window.matrix[row + 8] == matrix;
        if (!__any_sync(0xffffffffu, top || bottom)) continue;
        const float* v_tile = v_rows + first_row * pitch;
        float sums[4][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (16 * step >= rank) continue;
          const VStep v = load_v_step(v_tile, pitch, 16 * step);
          multiply_step<T>(v, resident[step], sums);
        }
        for (int32_t k = 16 * kSteps; k < rank; k += 16) {
          const VStep v = load_v_step(v_tile, pitch, k);
          const BStep later = load_b_step<kAligned>(b_columns, params.row_stride, columns, k, rank);
          multiply_step<T>(v, later, sums);
        }
        // A lane holds columns 8 t .. 8 t + 7 of two rows.
        if (lane % 4 * 8 >= columns) continue;
        T* delta = static_cast<T*>(params.delta_ptr) + part.first_column + column + lane % 4 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!(half == 0 ? top : bottom)) continue;
          const float scale = scales[row + 8 * half];
          float values[8];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            values[2 * j] = scale * sums[j][2 * half];
            values[2 * j + 1] = scale * sums[j][2 * half + 1];
          }
          store_raw8(delta + int64_t{window.row[row + 8 * half]} * params.out_features,
                     pack8<T>(values));
        }
      }
    }
  }
}

}  // namespace moelora

// A x for many rows: tensor-core tiles over windows of rows that mostly share a matrix.
#pragma once

#include "../common/lora_window.cuh"
#include "../common/ptx.cuh"
#include "lora_shrink.h"

namespace moelora {

// The tile of one block: kTileRows rows of v times kTileRanks rank rows. Four warps take 16 rows
// each; with fewer rows than that, they share the rows and split the columns of a stage.
template <int kTileRows_, int kTileRanks_>
struct ShrinkTile {
  static constexpr int kTileRows = kTileRows_, kTileRanks = kTileRanks_;
  static constexpr int kThreads = 128;
  static constexpr int kWarpsRows = kTileRows / 16, kWarpsColumns = 4 / kWarpsRows;
  static constexpr int kVectors = 8 * kWarpsColumns;  // 16-byte vectors of a row in one stage
  static constexpr int kColumns = 8 * kVectors;
  static constexpr int kStages = kTileRows == 16 ? 3 : 4;
  static constexpr int kStageBytes = (kTileRows + kTileRanks) * kVectors * 16;
  // How the block copies: a thread owns one vector position and every kCopyStep-th row.
  static constexpr int kCopyStep = kThreads / kVectors;
  static constexpr int kXCopies = kTileRows / kCopyStep, kACopies = kTileRanks / kCopyStep;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes >= kWarpsColumns * kTileRows * kTileRanks * 4);

  // Vectors are swizzled inside groups of eight, so that eight rows of one vector position lie in
  // different banks.
  static __device__ __forceinline__ uint32_t offset(int row, int vector) {
    return (row * kVectors + (vector ^ (row & 7))) * 16;
  }
};

// One matrix times the rows of the window that use it.
template <class T, class Tile>
struct ShrinkMatrix {
  const T *x_base, *x_ptr[Tile::kXCopies];  // null: the row is not of this matrix
  const T* a_ptr;                           // this thread's first row, at its vector position
  int64_t a_step, in_features;
  uint32_t a_used;  // bit i: copy i is of a row within the rank

  // Starts the copy of one stage's columns; what lies outside is zero.
  __device__ __forceinline__ void copy_stage(uint32_t stage, int64_t chunk) const {
    const int vector = threadIdx.x % Tile::kVectors, first = threadIdx.x / Tile::kVectors;
    const int64_t column = chunk * Tile::kColumns + vector * 8;
    const bool inside = column < in_features;
#pragma unroll
    for (int i = 0; i < Tile::kXCopies; ++i) {
      const bool used = inside && x_ptr[i] != nullptr;
      ptx::cp_async_16(stage + Tile::offset(first + i * Tile::kCopyStep, vector),
                       used ? x_ptr[i] + column : x_base, used ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < Tile::kACopies; ++i) {
      const bool used = inside && (a_used >> i & 1) != 0;
      ptx::cp_async_16(stage + Tile::offset(Tile::kTileRows + first + i * Tile::kCopyStep, vector),
                       used ? a_ptr + i * a_step + column : x_base, used ? 16 : 0);
    }
  }
};

// The warp's share of one stage.
template <class T, class Tile>
__device__ __forceinline__ void multiply_stage(uint32_t stage,
                                               float (&sums)[Tile::kTileRanks / 8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = warp % Tile::kWarpsRows * 16, first_vector = warp / Tile::kWarpsRows * 8;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int vector = first_vector + 2 * step;
    uint32_t x[4];
    ptx::ldmatrix_x4(x, stage + Tile::offset(first_row + lane % 16, vector + lane / 16));
#pragma unroll
    for (int n = 0; n < Tile::kTileRanks / 16; ++n) {
      uint32_t a[4];
      const int row = Tile::kTileRows + 16 * n + lane % 8 + lane / 16 * 8;
      ptx::ldmatrix_x4(a, stage + Tile::offset(row, vector + lane / 8 % 2));
      ptx::mma_m16n8k16<T>(sums[2 * n], x, a[0], a[1]);
      ptx::mma_m16n8k16<T>(sums[2 * n + 1], x, a[2], a[3]);
    }
  }
}

// Writes 0 to the rows of v in first..first+kThreads-1 that have no adapter: no window holds them,
// or holds them as rows without a matrix.
__device__ inline void clear_unused_rows(const LoraShrinkParams& params, int64_t first,
                                         bool* used) {
  const int64_t row = first + threadIdx.x, num_rows = params.num_rank_vectors();
  used[threadIdx.x] =
      row >= num_rows ||
      (params.v_per_token() ? matrix_of_token(params, row) : matrix_of_pair(params, row)).exists();
  __syncthreads();
  const int32_t rank_rows = params.num_components * params.rank;
  for (int32_t i = threadIdx.x; i < rank_rows * blockDim.x; i += blockDim.x) {
    if (!used[i / rank_rows]) params.v_ptr[first * rank_rows + i] = 0.0f;
  }
}

// Blocks 0..num_windows * rank_blocks - 1 compute a tile each, rank_blocks of them on one window of
// rows; the blocks after them clear rows without adapter, kThreads rows each. For every matrix that
// occurs in the window (rows are sorted, so mostly one) the block runs through all columns with the
// rows of that matrix. The K order of a row is fixed, and rows do not mix.
// Needs x rows and A rows at multiples of 16 bytes.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    lora_shrink_grouped_kernel(const LoraShrinkParams params, int32_t num_windows,
                               int32_t rank_blocks) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ LoraWindow<Tile::kTileRows> window;
  ptx::wait_for_previous_kernel();
  const int64_t window_index = blockIdx.x / rank_blocks;
  if (window_index >= num_windows) {
    const int64_t first =
        int64_t{static_cast<int32_t>(blockIdx.x) - num_windows * rank_blocks} * Tile::kThreads;
    return clear_unused_rows(params, first, reinterpret_cast<bool*>(shared));
  }
  load_window(window, params, window_index * Tile::kTileRows, params.v_per_token());
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % Tile::kWarpsRows * 16;
  const int copy_row = threadIdx.x / Tile::kVectors;
  const int32_t rank_rows = params.num_components * params.rank;
  const int32_t first_rank_row = blockIdx.x % rank_blocks * Tile::kTileRanks;
  const uint32_t stages = ptx::shared_address(shared);
  const int64_t num_chunks = (params.in_features + Tile::kColumns - 1) / Tile::kColumns;

  for (int32_t matrix = next_matrix(window, -1); matrix != kNoMatrix;
       matrix = next_matrix(window, matrix)) {
    const int32_t slot = matrix / experts_per_slot(params);
    const int32_t expert = matrix % experts_per_slot(params);
    const int32_t rank = params.slots.rank(slot, params.part, params.rank);

    ShrinkMatrix<T, Tile> operands;
    operands.x_base = static_cast<const T*>(params.x_ptr);
#pragma unroll
    for (int i = 0; i < Tile::kXCopies; ++i) {
      const int r = copy_row + i * Tile::kCopyStep;
      operands.x_ptr[i] = window.matrix[r] == matrix
                              ? operands.x_base + params.x_row(window.row[r]) * params.x_stride
                              : nullptr;
    }
    operands.a_ptr = static_cast<const T*>(params.lora_a_ptr) + slot * params.slot_stride +
                     expert * params.expert_stride +
                     (first_rank_row + copy_row) * params.row_stride;
    operands.a_step = Tile::kCopyStep * params.row_stride;
    operands.in_features = params.in_features;
    operands.a_used = 0;
#pragma unroll
    for (int i = 0; i < Tile::kACopies; ++i) {
      const int32_t n = first_rank_row + copy_row + i * Tile::kCopyStep;
      if (n < rank_rows && n % params.rank < rank) operands.a_used |= 1u << i;
    }

    float sums[Tile::kTileRanks / 8][4] = {};
#pragma unroll
    for (int stage = 0; stage < Tile::kStages - 1; ++stage) {
      if (stage < num_chunks) operands.copy_stage(stages + stage * Tile::kStageBytes, stage);
      ptx::cp_async_commit();
    }
    const bool has_rows =
        __any_sync(0xffffffffu, window.matrix[warp_row + lane % 16] == matrix) != 0;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      ptx::cp_async_wait_group<Tile::kStages - 2>();
      // Also: every warp is done with the stage that is filled next.
      __syncthreads();
      const int64_t next = chunk + Tile::kStages - 1;
      if (next < num_chunks) {
        operands.copy_stage(stages + next % Tile::kStages * Tile::kStageBytes, next);
      }
      ptx::cp_async_commit();
      if (has_rows) {
        multiply_stage<T, Tile>(stages + chunk % Tile::kStages * Tile::kStageBytes, sums);
      }
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();

    // Every warp puts its sums into shared memory, then they are added in the order of the columns.
    float* partial = reinterpret_cast<float*>(shared);
    float* warp_sums =
        partial + (warp / Tile::kWarpsRows * Tile::kTileRows + warp_row) * Tile::kTileRanks;
#pragma unroll
    for (int n = 0; n < Tile::kTileRanks / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = 8 * n + lane % 4 * 2 + i % 2;
        warp_sums[row * Tile::kTileRanks + column] = sums[n][i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Tile::kTileRows * Tile::kTileRanks; i += Tile::kThreads) {
      const int r = i / Tile::kTileRanks;
      const int32_t n = first_rank_row + i % Tile::kTileRanks;
      if (window.matrix[r] != matrix || n >= rank_rows) continue;
      float sum = partial[i];
#pragma unroll
      for (int part = 1; part < Tile::kWarpsColumns; ++part) {
        sum += partial[part * Tile::kTileRows * Tile::kTileRanks + i];
      }
      // 0 times an infinite x is not 0.
      params.v_ptr[int64_t{window.row[r]} * rank_rows + n] = n % params.rank < rank ? sum : 0.0f;
    }
    __syncthreads();
  }
}

}  // namespace moelora

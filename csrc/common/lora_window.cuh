// The rows that one block of a grouped LoRA kernel works on, and the adapter matrices among them.
#pragma once

#include "lora_rows.h"

namespace moelora {

constexpr int32_t kNoMatrix = INT32_MAX;

// Lives in shared memory. A matrix is named by slot * experts + expert, experts being 1 where one
// matrix serves all.
template <int kRows>
struct LoraWindow {
  int32_t row[kRows];     // row of the result: a pair or a token
  int32_t matrix[kRows];  // kNoMatrix: padding, or a row without adapter
};

template <class Params>
__device__ __forceinline__ int32_t experts_per_slot(const Params& params) {
  return params.shared_outer ? 1 : params.num_local_experts;
}

// Fills the window with the rows first..first+kRows-1 of the sorted order, or with these tokens
// where v is per token. A block barrier must follow.
template <int kRows, class Params>
__device__ void load_window(LoraWindow<kRows>& window, const Params& params, int64_t first,
                            bool by_token) {
  const int64_t end = by_token ? params.num_tokens : params.maps.num_tiles * params.maps.tile_rows;
  for (int r = threadIdx.x; r < kRows; r += blockDim.x) {
    const int64_t at = first + r;
    int64_t row = at;
    MatrixIndex index{-1, 0, 0};
    if (at < end && by_token) {
      index = matrix_of_token(params, row);
    } else if (at < end) {
      row = params.maps.permuted_to_expanded_ptr[at];
      if (row >= 0 && row < params.num_tokens * params.top_k) index = matrix_of_pair(params, row);
    }
    window.row[r] = static_cast<int32_t>(row);
    window.matrix[r] =
        index.exists() ? index.slot * experts_per_slot(params) + index.expert : kNoMatrix;
  }
}

// The smallest matrix of the window above `last`, or kNoMatrix; the same in every lane of the warp.
template <int kRows>
__device__ int32_t next_matrix(const LoraWindow<kRows>& window, int32_t last) {
  int32_t next = kNoMatrix;
  for (int r = threadIdx.x % 32; r < kRows; r += 32) {
    const int32_t matrix = window.matrix[r];
    if (matrix > last && matrix < next) next = matrix;
  }
  return __reduce_min_sync(0xffffffffu, next);
}

}  // namespace moelora

#pragma once

#include "../common/views.h"

namespace moelora {

// out[t] = routed_scaling_factor * sum_k (w * down[row] + w * delta), fp32, k ascending, one
// rounding; pairs that are not local contribute nothing (their delta is not read).
// delta_is_weighted: the delta already holds w.
struct FinalizeParams {
  const void* down_ptr;                     // [P_max, H] contiguous
  WeightMatrix weights;                     // kOne in weight-on-input mode
  const void* delta_ptr;                    // [P, H] contiguous, by pair, or null
  const int32_t* expanded_to_permuted_ptr;  // [P], outside 0..P_max-1: not local
  void* out_ptr;                            // [T, H], last dim contiguous
  int64_t out_stride;
  int64_t num_tokens, max_rows, hidden_size;
  int32_t top_k;
  bool delta_is_weighted;
  float routed_scaling_factor;
  DType dtype;
};

void finalize_cpu(const FinalizeParams& params);
void launch_finalize(const FinalizeParams& params, void* stream);

}  // namespace moelora

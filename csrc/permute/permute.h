#pragma once

#include "../common/views.h"

namespace moelora {

struct PermuteParams {
  const void* hidden_states_ptr;  // [T, H], last dim contiguous
  int64_t hidden_states_stride;
  const int32_t* permuted_to_expanded_ptr;  // [P_max], outside 0..P-1: padding, row left unwritten
  WeightMatrix row_weights;  // kOne, or w that multiplies the row (weight-on-input mode)
  void* permuted_ptr;        // [P_max, H] contiguous
  int64_t num_tokens, hidden_size, max_rows;
  int32_t top_k;
  DType dtype;
};

void permute_cpu(const PermuteParams& params);
void launch_permute(const PermuteParams& params, void* stream);

}  // namespace moelora

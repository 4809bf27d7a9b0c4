#pragma once

#include "../common/views.h"

namespace moelora {

// v[p, :] = A[s, e] x, fp32, for pair p = t*K + k with slot s and local expert e; 0 where there is
// no adapter, the pair is not local, or the row lies beyond the slot's rank (per component: rows
// r..R-1 of each of `num_components` blocks of R rows). Where A is shared outer and x is per token,
// v is per token and locality plays no part.
struct LoraShrinkParams {
  const void* x_ptr;  // [T, in], or [P, in] with x_by_pair; last dim contiguous
  int64_t x_stride;
  const void* lora_a_ptr;  // [L, E_loc or 1, num_components * R, in], last dim contiguous
  int64_t slot_stride, expert_stride, row_stride;  // elements, any value
  bool shared_outer;                               // A has one matrix for all experts
  bool x_by_pair;
  float* v_ptr;  // [num_rank_vectors(), num_components * R] contiguous
  IdMatrix ids;
  SlotView slots;
  LoraPart part;  // which column of `ranks` holds
  RowMaps maps;   // permuted_to_expanded_ptr null: no sort was made, use the indexed kernel
  int64_t num_tokens, in_features;
  int32_t top_k, rank, num_components;  // rank = R
  int32_t num_local_experts, expert_offset;
  DType dtype;

  MOELORA_HOST_DEVICE bool v_per_token() const { return shared_outer && !x_by_pair; }
  MOELORA_HOST_DEVICE int64_t num_rank_vectors() const {
    return v_per_token() ? num_tokens : num_tokens * top_k;
  }
  // The row of x behind row `row` of v.
  MOELORA_HOST_DEVICE int64_t x_row(int64_t row) const {
    return x_by_pair || v_per_token() ? row : row / top_k;
  }
};

void lora_shrink_cpu(const LoraShrinkParams& params);
void launch_lora_shrink(const LoraShrinkParams& params, void* stream);

}  // namespace moelora

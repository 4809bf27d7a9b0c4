#pragma once

#include "../common/views.h"

namespace moelora {

// delta[p, n] = scale * (B[s, e] v[p])[n], model dtype, for pair p with slot s and local expert e;
// 0 where there is no adapter or the pair is not local. part kGateUp: columns [0, N/2) use
// scaling[s, 0] and gate's rank vector, columns [N/2, N) scaling[s, 1] and up's (the second block
// of R, or the same block when v has only R columns). part kDown: scaling[s, 2].
struct LoraExpandParams {
  const float* v_ptr;  // [P or T, v_columns] contiguous (lora_shrink's output)
  int64_t v_stride;
  const void* lora_b_ptr;                          // [L, E_loc or 1, N, R], last dim contiguous
  int64_t slot_stride, expert_stride, row_stride;  // elements
  bool shared_outer;                               // B has one matrix for all experts
  bool v_per_token;                                // row t of v serves all pairs of token t
  const float* scaling_ptr;                        // [L, 3] contiguous, or null: 1
  WeightMatrix row_weights;  // kOne, or w that multiplies the delta (weight-on-input mode)
  void* delta_ptr;           // [P, N] contiguous
  IdMatrix ids;
  SlotView slots;
  LoraPart part;
  RowMaps maps;                      // permuted_to_expanded_ptr null: use the indexed kernel
  int64_t num_tokens, out_features;  // T, N
  int32_t top_k, rank, v_columns;    // rank = R; v_columns = R or 2R
  int32_t num_local_experts, expert_offset;
  DType dtype;
};

void lora_expand_cpu(const LoraExpandParams& params);
void launch_lora_expand(const LoraExpandParams& params, void* stream);

}  // namespace moelora

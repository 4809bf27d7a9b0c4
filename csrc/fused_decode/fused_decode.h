#pragma once

#include "../common/views.h"

namespace moelora {

// One of the four adapter stacks as the kernel reads it: [L, E_loc or 1, rows, columns], last dim
// contiguous. A null `ptr` means that the adapters have no such part.
struct LoraStack {
  const void* ptr;
  int64_t slot_stride, expert_stride, row_stride;  // elements
  bool shared_outer;  // one matrix for all experts: expert_stride is unused
};

// The whole MoE-LoRA layer of spec.md section 2 for few tokens, in one persistent kernel:
// out[t] = routed_scaling_factor * sum_k w (W2 act(W13 x + b13 + adapters) + b2 + adapter).
// Either both stacks of a part are given (gate_up_a with gate_up_b, down_a with down_b), or none.
struct FusedDecodeParams {
  const void* hidden_states_ptr;  // [T, H], last dim contiguous
  int64_t hidden_states_stride;
  WeightOperand w13;                       // [E_loc, 2I, H]
  WeightOperand w2;                        // [E_loc, H, I]
  const void *w13_bias_ptr, *w2_bias_ptr;  // [E_loc, 2I] and [E_loc, H] contiguous, or null
  IdMatrix ids;                            // [T, K]
  WeightMatrix weights;                    // [T, K]
  SlotView slots;                          // num_slots 0: no adapters
  LoraStack gate_up_a, gate_up_b, down_a, down_b;
  const float* scaling_ptr;         // [L, 3] contiguous (gate, up, down), or null: 1
  int32_t gate_up_rank, down_rank;  // R1, R2: what the stacks are allocated for
  int32_t gate_up_a_components;     // 2: gate's A, then up's; 1: one A for both
  void* out_ptr;                    // [T, H], last dim contiguous
  int64_t out_stride;
  void* workspace_ptr;  // fused_decode_workspace_bytes(params), contents arbitrary
  int64_t num_tokens, hidden_size, intermediate_size;  // T, H, I
  int32_t top_k, num_experts, num_local_experts, expert_offset;
  GateUpLayout layout;
  ActivationKind activation;
  float alpha, limit;  // of kSwigluOai
  bool weight_on_input;
  float routed_scaling_factor;
  DType dtype;
};

// Null where this path can run the call, else a sentence that says why not. Looks at shapes,
// strides and dtypes only, so that a captured graph takes the same path for any contents.
const char* fused_decode_unsupported(const FusedDecodeParams& params);

// Bytes of scratch; a function of shapes alone (pointers count only as null or not).
int64_t fused_decode_workspace_bytes(const FusedDecodeParams& params);

// Name of the tile configuration that the shapes pick, for explain() and benchmarks.
const char* fused_decode_config_name(const FusedDecodeParams& params);

void launch_fused_decode(const FusedDecodeParams& params, void* stream);

}  // namespace moelora

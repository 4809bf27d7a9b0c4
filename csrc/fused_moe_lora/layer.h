// One call of the MoE-LoRA layer, as every path (decomposed, fused) reads it. Shape letters as in
// spec.md section 1.
#pragma once

#include "../common/views.h"

namespace moelora {

// One side (gate_up or down) of the adapter stacks; rank 0: that side has no adapter.
struct LoraSide {
  const void* a_ptr = nullptr;  // [L, E_loc or 1, num_components * R, in]
  int64_t a_slot_stride = 0, a_expert_stride = 0, a_row_stride = 0;  // elements
  bool a_shared_outer = false;
  const void* b_ptr = nullptr;  // [L, E_loc or 1, out, R]
  int64_t b_slot_stride = 0, b_expert_stride = 0, b_row_stride = 0;
  bool b_shared_outer = false;
  int32_t rank = 0;            // R, what the stack is allocated for
  int32_t num_components = 1;  // 2: gate and up have their own A

  bool exists() const { return rank > 0; }
  int32_t v_columns() const { return num_components * rank; }
};

struct LayerParams {
  int64_t num_tokens, hidden_size, intermediate_size;  // T, H, I
  int32_t top_k, num_experts, num_local_experts, expert_offset;
  DType dtype;

  const void* hidden_states_ptr;  // [T, H]
  int64_t hidden_states_stride;
  IdMatrix ids;
  WeightMatrix weights;
  WeightOperand w13, w2;
  const void* w13_bias_ptr;  // [E_loc, 2I] or null
  const void* w2_bias_ptr;   // [E_loc, H] or null
  GateUpLayout layout;
  ActivationKind activation;
  float activation_alpha, activation_limit;
  bool weight_on_input;
  float routed_scaling_factor;

  LoraSide gate_up, down;
  SlotView slots;
  const float* scaling_ptr;  // [L, 3] or null

  const void* gate_up_delta_ptr;  // [T, K, 2I] given by the caller, or null
  const void* down_delta_ptr;     // [T, K, H] given by the caller, or null
  bool down_delta_is_weighted;

  // Finished: out_ptr. Unfinished (do_finalize=False): the other three, out_ptr null.
  void* out_ptr;  // [T, H]
  int64_t out_stride;
  void* down_output_ptr;              // [P_max, H]
  int32_t* expanded_to_permuted_ptr;  // [P]
  void* lora_input_ptr;               // [P, I] or null

  int64_t num_pairs() const { return num_tokens * top_k; }
  // Rows an expert gets on average, rounded up: from shapes alone.
  int64_t expected_rows() const { return (num_pairs() + num_experts - 1) / num_experts; }
  bool finished() const { return out_ptr != nullptr; }
};

// Raw cudaEvent_t / cudaStream_t handles; null: not given.
struct LayerStreams {
  void* main = nullptr;
  void* side = nullptr;  // null: everything runs on `main`
  void* fork_event = nullptr;
  void* join_event = nullptr;
  void* lora_ready_event = nullptr;  // the caller's: waited for right before gate_up_delta is read
  void* down_gemm_done_event = nullptr;  // the caller's: recorded right after the down GEMM
};

}  // namespace moelora

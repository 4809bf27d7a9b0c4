#pragma once

#include "../common/views.h"

namespace moelora {

// z[row(p)] = act(g + delta_g, u + delta_u), fp32 maths, one rounding, for every local pair p.
struct ActivationParams {
  const void* gate_up_ptr;  // [P_max, 2I] contiguous, columns in w13's row order
  const void* delta_ptr;    // [P, 2I] contiguous, always [gate | up], by pair; or null
  const int32_t* expanded_to_permuted_ptr;  // [P], outside 0..P_max-1: not local
  void* z_ptr;                              // [P_max, I] contiguous; rows of no pair stay unwritten
  void* lora_input_ptr;  // [P, I] contiguous, by pair, 0 for pairs that are not local; or null
  int64_t num_pairs, max_rows, intermediate_size;
  ActivationKind activation;
  GateUpLayout layout;
  float alpha, limit;  // of kSwigluOai
  DType dtype;
};

void activation_cpu(const ActivationParams& params);
void launch_activation(const ActivationParams& params, void* stream);

}  // namespace moelora

#pragma once

#include "../common/types.h"

namespace moelora {

struct RoutingParams {
  const void* logits_ptr;  // [T, E], last dim contiguous
  int64_t logits_stride;
  DType logits_dtype;
  const void* correction_bias_ptr;  // [E] or null
  DType correction_bias_dtype;
  const int32_t* num_valid_tokens_ptr;  // device scalar or null
  float* topk_weights_ptr;              // [T, K] contiguous; null when packed
  int32_t* topk_ids_ptr;                // [T, K] contiguous: ids, or packed words
  void* replay_ids_ptr;                 // [T, K] contiguous int16 / int32, or null
  bool replay_is_int16;
  bool packed;
  int64_t num_tokens;
  int32_t num_experts, top_k, n_group, topk_group;
  RoutingMethod method;
  bool renormalize;  // of the "deepseek_v3" and "sigmoid" methods
  float routed_scaling_factor;
};

void routing_cpu(const RoutingParams& params);
void launch_routing(const RoutingParams& params, void* stream);

}  // namespace moelora

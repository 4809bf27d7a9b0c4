// The columns of a delta that share a rank vector, a scale and so a kernel's inner loop.
#pragma once

#include "lora_expand.h"

namespace moelora {

// gate_up has two parts of I columns (gate, up), down has one of H.
struct ExpandPart {
  int64_t first_column, num_columns;
  int32_t first_rank;  // of its rank vector in a row of v
  int32_t component;   // column of `scaling`
};

MOELORA_HOST_DEVICE int32_t num_expand_parts(const LoraExpandParams& params) {
  return params.part == LoraPart::kDown ? 1 : 2;
}

MOELORA_HOST_DEVICE ExpandPart expand_part(const LoraExpandParams& params, int32_t part) {
  if (params.part == LoraPart::kDown) return {0, params.out_features, 0, 2};
  const int64_t half = params.out_features / 2;
  return {part * half, half, part * (params.v_columns - params.rank), part};
}

// What multiplies B v: the slot's scaling, and the router weight in the weight-on-input mode.
MOELORA_HOST_DEVICE float expand_scale(const LoraExpandParams& params, int64_t pair, int32_t slot,
                                       int32_t component) {
  const float weight = params.row_weights(pair);
  if (params.scaling_ptr == nullptr) return weight;
  return weight * params.scaling_ptr[3 * static_cast<int64_t>(slot) + component];
}

// The rank vector of `pair`, of all parts.
MOELORA_HOST_DEVICE const float* rank_vector(const LoraExpandParams& params, int64_t pair) {
  return params.v_ptr + (params.v_per_token ? pair / params.top_k : pair) * params.v_stride;
}

}  // namespace moelora

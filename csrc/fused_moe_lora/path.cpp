#include "path.h"

#include <algorithm>

#include "../common/checks.h"
#include "../fused_decode/fused_decode.h"
#include "../fused_prefill/fused_prefill.h"
#include "plan.h"

namespace moelora {
namespace {

LoraStack a_stack(const LoraSide& side) {
  return {side.a_ptr, side.a_slot_stride, side.a_expert_stride, side.a_row_stride,
          side.a_shared_outer};
}
LoraStack b_stack(const LoraSide& side) {
  return {side.b_ptr, side.b_slot_stride, side.b_expert_stride, side.b_row_stride,
          side.b_shared_outer};
}

// What no fused path does: it hands back no intermediates and reads no delta made elsewhere.
const char* needs_decomposed(const LayerParams& layer) {
  if (!layer.finished()) return "do_finalize=False asks for the intermediates";
  if (layer.gate_up_delta_ptr != nullptr || layer.down_delta_ptr != nullptr) {
    return "a delta is given by the caller";
  }
  return nullptr;
}

bool has_few_rows(const LayerParams& layer) {
  const int64_t rows = layer.expected_rows();
  return layer.num_tokens > kDecodeMaxTokens && layer.num_tokens <= kFewRowsMaxTokens &&
         rows >= kFewRowsMin && rows <= kFewRowsMax && layer.slots.num_slots <= 1 &&
         std::max(layer.gate_up.rank, layer.down.rank) <= kFewRowsMaxRank;
}

}  // namespace

FusedDecodeParams fused_decode_params(const LayerParams& layer, void* workspace_ptr) {
  FusedDecodeParams params;
  params.hidden_states_ptr = layer.hidden_states_ptr;
  params.hidden_states_stride = layer.hidden_states_stride;
  params.w13 = layer.w13;
  params.w2 = layer.w2;
  params.w13_bias_ptr = layer.w13_bias_ptr;
  params.w2_bias_ptr = layer.w2_bias_ptr;
  params.ids = layer.ids;
  params.weights = layer.weights;
  params.slots = layer.slots;
  params.gate_up_a = a_stack(layer.gate_up);
  params.gate_up_b = b_stack(layer.gate_up);
  params.down_a = a_stack(layer.down);
  params.down_b = b_stack(layer.down);
  params.scaling_ptr = layer.scaling_ptr;
  params.gate_up_rank = layer.gate_up.rank;
  params.down_rank = layer.down.rank;
  params.gate_up_a_components = layer.gate_up.num_components;
  params.out_ptr = layer.out_ptr;
  params.out_stride = layer.out_stride;
  params.workspace_ptr = workspace_ptr;
  params.num_tokens = layer.num_tokens;
  params.hidden_size = layer.hidden_size;
  params.intermediate_size = layer.intermediate_size;
  params.top_k = layer.top_k;
  params.num_experts = layer.num_experts;
  params.num_local_experts = layer.num_local_experts;
  params.expert_offset = layer.expert_offset;
  params.layout = layer.layout;
  params.activation = layer.activation;
  params.alpha = layer.activation_alpha;
  params.limit = layer.activation_limit;
  params.weight_on_input = layer.weight_on_input;
  params.routed_scaling_factor = layer.routed_scaling_factor;
  params.dtype = layer.dtype;
  return params;
}

PathChoice choose_path(const LayerParams& layer, LayerPath path, bool sm90) {
  if (path == LayerPath::kDecomposed) return {Path::kDecomposed, "stream_mode asks for it"};
  if (const char* reason = needs_decomposed(layer)) return {Path::kDecomposed, reason};
  if (layer.num_tokens <= kDecodeMaxTokens) {
    const char* reason = fused_decode_unsupported(fused_decode_params(layer, nullptr));
    if (reason == nullptr) return {Path::kFusedDecode, "few tokens"};
    return {Path::kDecomposed, reason};
  }
  if (sm90 && has_few_rows(layer) &&
      fused_decode_unsupported(fused_decode_params(layer, nullptr)) == nullptr) {
    return {Path::kFusedDecode, "few rows an expert"};
  }
  if (!sm90) return {Path::kDecomposed, "the fused prefill kernels are for compute capability 9.0"};
  const char* reason = fused_prefill_unsupported(layer);
  if (reason == nullptr) return {Path::kFusedPrefill, "many tokens"};
  return {Path::kDecomposed, reason};
}

int64_t layer_workspace_bytes(const LayerParams& layer, LayerPath path, bool cuda,
                              std::optional<int64_t> limit) {
  const auto needed = [&](std::optional<int64_t> allowed) {
    const int64_t tokens = decomposed_chunk_tokens(layer, cuda, allowed);
    const int64_t bytes = plan_decomposed(layer_chunk(layer, 0, tokens), cuda).bytes;
    if (path == LayerPath::kDecomposed || !cuda || layer.num_tokens == 0) return bytes;
    const bool few_tokens = layer.num_tokens <= kDecodeMaxTokens;
    int64_t most = bytes;
    if (few_tokens || has_few_rows(layer)) {
      most = std::max(most, fused_decode_workspace_bytes(fused_decode_params(layer, nullptr)));
    }
    if (few_tokens) return most;
    const int64_t prefill_limit = allowed.value_or(kFusedPrefillWorkspaceLimit);
    return std::max(most, fused_prefill_workspace_bytes(layer, prefill_limit));
  };
  const int64_t bytes = needed(limit);
  if (limit.has_value() && bytes > *limit) {
    check_value(false, "workspace_limit_bytes: expected at least ", needed(0),
                " for this call, got ", *limit);
  }
  return bytes;
}

}  // namespace moelora

#include "plan.h"

#include "../fused_prefill/fused_prefill_config.h"
#include "../moe_sort/moe_sort.h"

namespace moelora {
namespace {

const void* advance(const void* ptr, int64_t bytes) {
  return ptr == nullptr ? nullptr : static_cast<const char*>(ptr) + bytes;
}

}  // namespace

DecomposedPlan plan_decomposed(const LayerParams& layer, bool cuda) {
  DecomposedPlan plan;
  const int64_t pairs = layer.num_pairs(), tokens = layer.num_tokens;
  plan.max_rows = max_padded_rows(pairs, layer.num_local_experts, kTileRows);
  plan.num_tiles = plan.max_rows / kTileRows;

  int64_t end = 0;
  const auto take = [&end](int64_t bytes) {
    const int64_t offset = end;
    end += (bytes + 255) / 256 * 256;
    return offset;
  };
  const int64_t element = dtype_bytes(layer.dtype), index = sizeof(int32_t), fp32 = sizeof(float);
  const int64_t hidden = layer.hidden_size, inner = layer.intermediate_size;
  plan.expanded_to_permuted = take(pairs * index);
  plan.permuted_to_expanded = take(plan.max_rows * index);
  plan.expert_offsets = take((layer.num_local_experts + 1) * index);
  plan.tile_expert = take(plan.num_tiles * index);
  plan.tile_row_limit = take(plan.num_tiles * index);
  plan.num_padded_rows = take(index);
  const int32_t slots = layer.slots.num_slots;
  plan.sort_workspace =
      take(cuda ? moe_sort_workspace_bytes(tokens, layer.num_local_experts, slots) : 0);
  plan.permuted = take(plan.max_rows * hidden * element);
  plan.gate_up = take(plan.max_rows * 2 * inner * element);
  plan.z = take(plan.max_rows * inner * element);
  plan.down_output = take(plan.max_rows * hidden * element);

  const bool gate_up = layer.gate_up.exists(), down = layer.down.exists();
  const int64_t gate_up_v_rows = layer.gate_up.a_shared_outer ? tokens : pairs;
  plan.gate_up_v = take(gate_up ? gate_up_v_rows * layer.gate_up.v_columns() * fp32 : 0);
  plan.gate_up_delta = take(gate_up ? pairs * 2 * inner * element : 0);
  plan.lora_input = take(down ? pairs * inner * element : 0);
  plan.down_v = take(down ? pairs * layer.down.v_columns() * fp32 : 0);
  plan.down_delta = take(down ? pairs * hidden * element : 0);
  plan.bytes = end;
  return plan;
}

LayerParams layer_chunk(const LayerParams& layer, int64_t first, int64_t tokens) {
  LayerParams chunk = layer;
  const int64_t element = dtype_bytes(layer.dtype), pair = first * layer.top_k;
  chunk.num_tokens = tokens;
  chunk.hidden_states_ptr =
      advance(layer.hidden_states_ptr, first * layer.hidden_states_stride * element);
  const int64_t id_bytes = layer.ids.kind == IdMatrix::Kind::kInt64 ? 8 : 4;
  chunk.ids.ptr = advance(layer.ids.ptr, first * layer.ids.row_stride * id_bytes);
  const int64_t weight_bytes = layer.weights.kind == WeightMatrix::Kind::kBFloat16 ? 2 : 4;
  chunk.weights.ptr = advance(layer.weights.ptr, first * layer.weights.row_stride * weight_bytes);
  const int64_t slot_bytes = layer.slots.ids_are_int64 ? 8 : 4;
  chunk.slots.adapter_ids_ptr =
      advance(layer.slots.adapter_ids_ptr, first * layer.slots.stride * slot_bytes);
  chunk.gate_up_delta_ptr =
      advance(layer.gate_up_delta_ptr, pair * 2 * layer.intermediate_size * element);
  chunk.down_delta_ptr = advance(layer.down_delta_ptr, pair * layer.hidden_size * element);
  chunk.out_ptr = const_cast<void*>(advance(layer.out_ptr, first * layer.out_stride * element));
  return chunk;
}

int64_t decomposed_chunk_tokens(const LayerParams& layer, bool cuda, std::optional<int64_t> limit) {
  if (!limit.has_value()) return layer.num_tokens;
  for (int64_t chunks = 1;; ++chunks) {
    const int64_t tokens = (layer.num_tokens + chunks - 1) / chunks;
    if (tokens <= kMinPrefillChunk) return tokens;
    if (plan_decomposed(layer_chunk(layer, 0, tokens), cuda).bytes <= *limit) return tokens;
  }
}

}  // namespace moelora

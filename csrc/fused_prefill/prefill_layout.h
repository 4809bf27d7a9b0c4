// Plain records that the prefill kernels share, and where they lie in the workspace: a pure
// function of shapes that host and tests read too.
#pragma once

#include "../fused_moe_lora/layer.h"
#include "../moe_sort/moe_sort.h"
#include "fused_prefill_config.h"

namespace moelora::fused_prefill {

constexpr int kRowStep = 16;   // experts' rows are padded to this, token tiles are multiples of it
constexpr int kRankStep = 16;  // ranks of one k16 step of wgmma

constexpr int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

// A token tile: rows first_row .. first_row + rows - 1 of the permuted order, all of one expert.
struct alignas(16) TokenTile {
  int32_t expert;
  int32_t first_row;
  int32_t rows;   // a multiple of 16
  int32_t units;  // LoraUnits of this tile, for the GEMM whose list it stands in
};

// Which rows of B a unit multiplies, and so which half of v it reads (down uses kBoth only).
enum LoraComponent : int16_t { kGateComponent = 0, kUpComponent = 1, kBothComponents = 2 };

// Rank vectors of gate_up hold gate's ranks (scaled for gate), then up's: with one A for both too,
// because the two scales may differ.
inline int64_t gate_up_v_columns(const LoraSide& side) { return 2 * int64_t{side.rank}; }

// Sixteen ranks of one slot in a token tile: one k16 step of the adapter expand.
struct alignas(16) LoraUnit {
  int32_t slot;
  int16_t component;   // a LoraComponent
  int16_t ranks;       // how many of the sixteen are the slot's own, 1..16
  int32_t first_rank;  // inside the component
  int16_t begin, end;  // rows of the tile that belong to the slot
};

// Row counts and capacities of a call, or of one chunk of it.
struct PrefillSizes {
  int64_t pairs, max_rows, max_tiles;
  // LoraUnits that a tile can have: by slot, for as many slots as fit its rows.
  int64_t gate_up_units, down_units;
  int64_t gate_up_v_rows;
};

inline PrefillSizes prefill_sizes(const LayerParams& layer, int64_t tokens,
                                  const FusedPrefillConfig& config) {
  PrefillSizes s = {};
  s.pairs = tokens * layer.top_k;
  s.max_rows = max_padded_rows(s.pairs, layer.num_local_experts, kRowStep);
  const int64_t experts =
      s.pairs < layer.num_local_experts ? s.pairs : int64_t{layer.num_local_experts};
  // Each expert with rows adds at most one cluster's tiles to those that max_rows would fill.
  s.max_tiles = config.cluster * (experts + s.max_rows / (config.cluster * config.max_tokens));
  const int64_t slots =
      layer.slots.num_slots < config.max_tokens ? layer.slots.num_slots : config.max_tokens;
  s.gate_up_units = slots * 2 * ceil_div(layer.gate_up.rank, kRankStep);
  s.down_units = slots * ceil_div(layer.down.rank, kRankStep);
  s.gate_up_v_rows = layer.gate_up.a_shared_outer ? tokens : s.max_rows;
  return s;
}

// What a call runs as: a tile configuration, chunks of at most `chunk_tokens` tokens, and where a
// chunk's data lies in the workspace (byte offsets, 256-byte aligned).
struct PrefillPlan {
  int32_t config_index;
  int64_t chunk_tokens;
  int64_t expanded_to_permuted, permuted_to_expanded, expert_offsets, sort_tile_expert,
      sort_tile_row_limit, num_padded_rows, sort_workspace;
  int64_t gate_up_tiles, down_tiles, num_tiles, next_items, z_ready, row_token, row_slot,
      row_weight, gate_up_units, down_units;
  int64_t gate_up_v, down_v, z, y;
  int64_t bytes;
};

inline bool has_lora(const LayerParams& layer) {
  return layer.slots.num_slots > 0 && (layer.gate_up.exists() || layer.down.exists());
}

// The plan for chunks of `tokens` tokens with one tile configuration.
inline PrefillPlan plan_prefill_chunk(const LayerParams& layer, int64_t tokens,
                                      int32_t config_index) {
  PrefillPlan plan = {};
  plan.chunk_tokens = tokens;
  plan.config_index = config_index;
  const PrefillSizes s = prefill_sizes(layer, tokens, kFusedPrefillConfigs[plan.config_index]);
  const auto take = [&plan](int64_t bytes) {
    const int64_t offset = plan.bytes;
    plan.bytes += ceil_div(bytes, 256) * 256;
    return offset;
  };
  const int64_t index = sizeof(int32_t), element = dtype_bytes(layer.dtype);
  plan.expanded_to_permuted = take(s.pairs * index);
  plan.permuted_to_expanded = take(s.max_rows * index);
  plan.expert_offsets = take((layer.num_local_experts + 1) * index);
  plan.sort_tile_expert = take(s.max_rows / kRowStep * index);
  plan.sort_tile_row_limit = take(s.max_rows / kRowStep * index);
  plan.num_padded_rows = take(index);
  plan.sort_workspace = take(moe_sort_workspace_bytes(s.pairs, layer.num_local_experts,
                                                      has_lora(layer) ? layer.slots.num_slots : 0));
  plan.gate_up_tiles = take(s.max_tiles * sizeof(TokenTile));
  plan.down_tiles = take(s.max_tiles * sizeof(TokenTile));
  plan.num_tiles = take(index);
  plan.next_items = take(2 * index);
  plan.z_ready = take(s.max_tiles * index);
  plan.row_token = take(s.max_rows * index);
  plan.row_slot = take(has_lora(layer) ? s.max_rows * index : 0);
  plan.row_weight = take(layer.weight_on_input ? s.max_rows * sizeof(float) : 0);
  plan.gate_up_units = take(s.max_tiles * s.gate_up_units * sizeof(LoraUnit));
  plan.down_units = take(s.max_tiles * s.down_units * sizeof(LoraUnit));
  plan.gate_up_v = take(s.gate_up_v_rows * gate_up_v_columns(layer.gate_up) * element);
  plan.down_v = take(s.max_rows * layer.down.rank * element);
  plan.z = take(s.max_rows * layer.intermediate_size * element);
  plan.y = take(s.max_rows * layer.hidden_size * element);
  return plan;
}

// One chunk where that stays under `limit` bytes, else even chunks, until kMinPrefillChunk.
inline PrefillPlan plan_prefill(const LayerParams& layer, int64_t limit) {
  for (int64_t chunks = 1;; ++chunks) {
    const int64_t tokens = ceil_div(layer.num_tokens, chunks);
    const int64_t expected_rows = ceil_div(tokens * layer.top_k, layer.num_experts);
    const int config_index = fused_prefill_config_index(expected_rows);
    const PrefillPlan plan = plan_prefill_chunk(layer, tokens, config_index);
    if (plan.bytes <= limit || tokens <= kMinPrefillChunk) return plan;
  }
}

// Runs a call as planned, on a workspace of plan.bytes (fused_prefill_sm90.cu).
void run_prefill(const LayerParams& layer, const PrefillPlan& plan, void* workspace_ptr,
                 void* stream);

}  // namespace moelora::fused_prefill

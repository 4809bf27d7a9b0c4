// Cuts the experts' sorted rows into token tiles and lists the adapter slots of each tile.
#pragma once

#include "prefill_layout.h"

namespace moelora::fused_prefill {

struct PrefillTilesParams {
  // From moe_sort with tiles of kRowStep rows.
  const int32_t* expert_offsets;        // [E_loc + 1]
  const int32_t* permuted_to_expanded;  // [P_max], -1: padding
  WeightMatrix weights;                 // read where row_weight is wanted
  SlotView slots;                       // num_slots 0: no adapters
  int32_t top_k, num_local_experts;
  int32_t max_tokens;  // of a tile
  int32_t cluster;     // an expert's tiles come in multiples of this
  int64_t max_tiles;

  // Per side: R (0: the side has no adapter) and a tile's room for units.
  int32_t gate_up_rank, gate_up_units_capacity;
  int32_t down_rank, down_units_capacity;
  bool gate_up_shares_a;     // gate and up have one A
  const float* scaling_ptr;  // [L, 3] or null

  TokenTile *gate_up_tiles, *down_tiles;  // [max_tiles]; they differ in `units` only
  int32_t* num_tiles;                     // [1]
  int32_t* next_items;                    // [2] counters of the two GEMMs: set to 0
  uint32_t* z_ready;                      // [max_tiles] counters of stored parts of z: set to 0
  LoraUnit *gate_up_units, *down_units;   // [max_tiles, capacity]
  int32_t* row_token;                     // [P_max] token behind a row; 0 for padding
  int32_t* row_slot;                      // [P_max] its slot or -1; null without adapters
  float* row_weight;                      // [P_max] its router weight, 0 for padding; or null
};

void launch_prefill_tiles(const PrefillTilesParams& params, void* stream);

}  // namespace moelora::fused_prefill

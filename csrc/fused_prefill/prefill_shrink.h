// Rank vectors of many rows: v = scaling * A x, one rounding to the model's dtype.
#pragma once

#include "prefill_layout.h"

namespace moelora::fused_prefill {

// v[row, :] = scaling[slot, :] * (A[slot, e] x_row); gate_up: [gate's ranks | up's ranks], both
// from the same A where it has one component. Two forms:
//  - by token tile (`tiles` given): rows of a tile, expert e = the tile's; x_row is row
//    row_token[row] of x, or row `row` where row_token is null; slots from row_slot;
//  - by token (`tiles` null, A shared outer): row t is token t, slots from `slots`.
// Rows without adapter are not written, nor read by whoever follows the token tiles' units.
struct PrefillShrinkParams {
  const TokenTile* tiles;
  const int32_t* num_tiles;
  int32_t max_tokens;  // of a tile
  // [tiles] of z as x: a tile is read when its counter has come to z_parts. Null for hidden_states.
  const uint32_t* z_ready;
  uint32_t z_parts;
  const int32_t* row_token;
  const int32_t* row_slot;
  int64_t num_tokens;
  // Experts, or one group of all tokens, and a group's rows on average: for a block's size.
  int64_t num_groups, expected_rows;

  const void* x_ptr;  // last dim contiguous
  int64_t x_stride;   // elements
  int32_t in_features;

  const void* a_ptr;  // [L, E_loc or 1, components * R, in_features]
  int64_t a_slot_stride, a_expert_stride, a_row_stride;  // elements
  int32_t rank, components;                              // R, and of A
  SlotView slots;
  LoraPart part;
  const float* scaling_ptr;  // [L, 3] (gate, up, down) or null

  void* v_ptr;  // [rows, 2 R] for gate_up, [rows, R] for down, contiguous
  DType dtype;
};

void launch_prefill_shrink(const PrefillShrinkParams& params, void* stream);

}  // namespace moelora::fused_prefill

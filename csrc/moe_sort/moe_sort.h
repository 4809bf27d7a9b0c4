#pragma once

#include "../common/views.h"

namespace moelora {

// Rows that every expert's rows are padded to: the smallest token tile of the tensor cores' N side,
// so that an expert with one token costs 16 rows at most and no tile choice leaks into shapes.
constexpr int32_t kTileRows = 16;

// P_max of spec.md section 5: the least upper bound of padded rows from shapes alone.
inline int64_t max_padded_rows(int64_t num_pairs, int64_t num_local_experts, int64_t tile_rows) {
  const int64_t full = num_pairs < num_local_experts ? num_pairs : num_local_experts;
  return full == 0 ? 0 : (full + (num_pairs - full) / tile_rows) * tile_rows;
}

struct MoeSortParams {
  IdMatrix ids;
  SlotView slots;                     // num_slots 0: sort by expert only
  int32_t* expanded_to_permuted_ptr;  // [P]
  int32_t* permuted_to_expanded_ptr;  // [P_max], every element written
  int32_t* expert_offsets_ptr;        // [E_loc + 1] padded rows before each expert
  int32_t* tile_expert_ptr;           // [P_max / tile_rows], every element written
  int32_t* tile_row_limit_ptr;   // [P_max / tile_rows], every element written (0 for unused tiles)
  int32_t* num_padded_rows_ptr;  // [1]
  void* workspace_ptr;           // moe_sort_workspace_bytes(...), contents arbitrary
  int64_t num_pairs, max_rows;   // P, P_max
  int32_t num_local_experts, expert_offset, tile_rows;
};

// Where the CUDA path cuts the work: blocks that count in parallel, and the bins one pass of the
// sort can tell apart.
constexpr int kSortMaxChunks = 128;
constexpr int kSortBits = 10;
constexpr int kSortMaxBins = 1 << kSortBits;

// Bytes of scratch the CUDA path needs; a function of shapes alone: a count per (chunk, bin) and
// two orders of the tokens. moelora/ops.py holds the same formula.
inline int64_t moe_sort_workspace_bytes(int64_t num_tokens, int64_t num_local_experts,
                                        int64_t num_slots) {
  return 8 * num_tokens + 4 * kSortMaxChunks * (num_local_experts + num_slots + 1);
}

void moe_sort_cpu(const MoeSortParams& params);
void launch_moe_sort(const MoeSortParams& params, void* stream);

}  // namespace moelora

#include <algorithm>
#include <numeric>
#include <vector>

#include "moe_sort_items.h"

namespace moelora {
namespace {

// Tokens by slot ascending, none last; those of one slot in order.
std::vector<int32_t> tokens_by_slot(const MoeSortParams& params, int64_t num_tokens) {
  std::vector<int32_t> tokens(num_tokens);
  std::iota(tokens.begin(), tokens.end(), 0);
  if (num_slot_digits(params) > 0) {
    std::vector<int32_t> keys(num_tokens);
    for (int64_t t = 0; t < num_tokens; ++t) keys[t] = slot_key(params, t);
    std::stable_sort(tokens.begin(), tokens.end(),
                     [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
  }
  return tokens;
}

}  // namespace

// Two stable passes: tokens by slot, then their pairs by expert.
void moe_sort_cpu(const MoeSortParams& params) {
  const int32_t num_experts = params.num_local_experts, tile = params.tile_rows;
  std::vector<int32_t> count(num_experts, 0);
  for (int64_t pair = 0; pair < params.num_pairs; ++pair) {
    const int32_t expert = local_expert(params, pair);
    if (expert >= 0) ++count[expert];
  }

  int32_t* const tile_expert = params.tile_expert_ptr;
  int32_t* const tile_row_limit = params.tile_row_limit_ptr;
  const int64_t num_tiles = params.max_rows / tile;
  std::fill(tile_expert, tile_expert + num_tiles, -1);
  std::fill(tile_row_limit, tile_row_limit + num_tiles, 0);
  std::fill(params.permuted_to_expanded_ptr, params.permuted_to_expanded_ptr + params.max_rows, -1);
  int64_t offset = 0;
  std::vector<int64_t> next_row(num_experts);
  for (int32_t e = 0; e < num_experts; ++e) {
    params.expert_offsets_ptr[e] = static_cast<int32_t>(offset);
    next_row[e] = offset;
    const int64_t tiles = (static_cast<int64_t>(count[e]) + tile - 1) / tile;
    for (int64_t i = offset / tile; i < offset / tile + tiles; ++i) {
      tile_expert[i] = e;
      tile_row_limit[i] = static_cast<int32_t>(offset + count[e]);
    }
    offset += tiles * tile;
  }
  params.expert_offsets_ptr[num_experts] = static_cast<int32_t>(offset);
  *params.num_padded_rows_ptr = static_cast<int32_t>(offset);

  const int64_t top_k = params.ids.num_cols;
  for (const int64_t token : tokens_by_slot(params, params.num_pairs / top_k)) {
    for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
      const int32_t expert = local_expert(params, pair);
      int64_t row = -1;
      if (expert >= 0) {
        row = next_row[expert]++;
        params.permuted_to_expanded_ptr[row] = static_cast<int32_t>(pair);
      }
      params.expanded_to_permuted_ptr[pair] = static_cast<int32_t>(row);
    }
  }
}

}  // namespace moelora

// Tensor maps of the prefill GEMMs: how weights, z and y lie in memory, as TMA reads and writes
// them.
#pragma once

#include "../common/views.h"
#include "prefill_gemm_params.h"

namespace moelora::fused_prefill {

// w13 [E_loc, 2I, H] as {H, 8 rows, 2 halves, I / 8, E_loc}: a box lays 8 rows of one half (gate or
// up, whichever the layout has first) and the matching 8 of the other in turn, `box_rows` in
// all. evict_first: as they are loaded.
CUtensorMap gate_up_weight_map(const WeightOperand& w13, GateUpLayout layout, int64_t experts,
                               int64_t intermediate, int64_t hidden, int32_t box_rows,
                               bool evict_first);

// w2 [E_loc, H, I], boxes of `box_rows` rows.
CUtensorMap down_weight_map(const WeightOperand& w2, int64_t experts, int64_t hidden,
                            int64_t intermediate, int32_t box_rows, bool evict_first);

// Contiguous rows [rows, columns] in boxes of `box_columns` (64: 128-byte swizzle, 32: 64-byte).
RowMaps64And16 row_maps(const void* ptr, DType dtype, int64_t rows, int64_t columns,
                        int box_columns);

}  // namespace moelora::fused_prefill

#pragma once

#include "../common/views.h"

namespace moelora {

// out[r, n] = sum_k weight[e, n, k] * rows[r, k] + bias[e, n] for every real row r of every local
// expert e. Rows of expert e: expert_offsets[e] .. its row limit; padding rows may be left
// unwritten.
struct GroupedGemmParams {
  const void* rows_ptr;               // [P_max, K] contiguous
  WeightOperand weight;               // [E_loc, N, K]
  const void* bias_ptr;               // [E_loc, N] contiguous, model dtype, or null
  void* out_ptr;                      // [P_max, N] contiguous
  const int32_t* expert_offsets_ptr;  // [E_loc + 1]
  RowMaps maps;
  int64_t max_rows, in_features, out_features;  // P_max, K, N
  int64_t expected_rows;  // rows an expert gets on average, from shapes: picks the token tile
  int32_t num_local_experts;
};

void grouped_gemm_cpu(const GroupedGemmParams& params);
void launch_grouped_gemm(const GroupedGemmParams& params, void* stream);

}  // namespace moelora

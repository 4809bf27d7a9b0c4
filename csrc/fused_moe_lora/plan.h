// Where the decomposed path keeps its intermediates: offsets into one workspace, a pure function of
// shapes.
#pragma once

#include "layer.h"

namespace moelora {

struct DecomposedPlan {
  int64_t max_rows, num_tiles;
  // Byte offsets, 256-byte aligned.
  int64_t expanded_to_permuted, permuted_to_expanded, expert_offsets, tile_expert, tile_row_limit,
      num_padded_rows, sort_workspace, permuted, gate_up, gate_up_v, gate_up_delta, z, lora_input,
      down_v, down_delta, down_output;
  int64_t bytes;
};

// Reads sizes, dtype, and which lora sides there are; no pointer is followed. `cuda`: with the
// scratch of the CUDA kernels.
DecomposedPlan plan_decomposed(const LayerParams& layer, bool cuda);

// Runs the layer. `workspace_ptr`: plan_decomposed(...).bytes of scratch, contents arbitrary.
void run_decomposed_cpu(const LayerParams& layer, void* workspace_ptr);
void run_decomposed_cuda(const LayerParams& layer, const LayerStreams& streams,
                         void* workspace_ptr);

}  // namespace moelora

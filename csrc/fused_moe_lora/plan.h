// Where the decomposed path keeps its intermediates: offsets into one workspace, a pure function of
// shapes.
#pragma once

#include <optional>

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

// The call for tokens first..first+tokens-1 only, of a finished layer.
LayerParams layer_chunk(const LayerParams& layer, int64_t first, int64_t tokens);

// Tokens that the layer is run for at a time: all of them where there is no limit or their plan
// stays under it, else even chunks, until kMinPrefillChunk.
int64_t decomposed_chunk_tokens(const LayerParams& layer, bool cuda, std::optional<int64_t> limit);

// Runs the layer in such chunks. `workspace_ptr`: scratch for the plan of the first, contents
// arbitrary.
void run_decomposed_cpu(const LayerParams& layer, std::optional<int64_t> limit,
                        void* workspace_ptr);
void run_decomposed_cuda(const LayerParams& layer, std::optional<int64_t> limit,
                         const LayerStreams& streams, void* workspace_ptr);

}  // namespace moelora

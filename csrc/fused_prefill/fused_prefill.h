#pragma once

#include "../fused_moe_lora/layer.h"

namespace moelora {

// The whole layer of spec.md section 2 for many tokens on Hopper (sm_90a): moe_sort, a tile list,
// two grouped wgmma GEMMs (rows of x gathered in the load, activation in the epilogue, adapter
// expand as more K), the adapters' shrinks before them, and finalize.

// Above this much scratch a call is cut into token chunks that reuse one workspace. Chunks of some
// thousand tokens cost 2 % (they read the weights again); more scratch gains nothing else.
constexpr int64_t kFusedPrefillWorkspaceLimit = int64_t{2} << 30;

// Null where this path can run the call, else a sentence that says why not. Looks at shapes,
// strides and dtypes only, never at device data, so that a captured graph serves any contents.
const char* fused_prefill_unsupported(const LayerParams& layer);

// Bytes of scratch; a function of shapes alone. Above `limit` only where a chunk of
// kMinPrefillChunk tokens (fused_prefill_config.h) needs more.
int64_t fused_prefill_workspace_bytes(const LayerParams& layer,
                                      int64_t limit = kFusedPrefillWorkspaceLimit);

// Runs a supported call. `workspace_ptr`: fused_prefill_workspace_bytes(layer, limit) bytes,
// 256-byte aligned, contents arbitrary. Only in builds with MOELORA_BUILT_SM90, on a GPU of that
// arch.
void launch_fused_prefill(const LayerParams& layer, void* stream, void* workspace_ptr,
                          int64_t limit = kFusedPrefillWorkspaceLimit);

}  // namespace moelora

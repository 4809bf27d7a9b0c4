// Which path a call takes: decided from shapes alone, and explained by moelora.explain.
#pragma once

#include "layer.h"

namespace moelora {

// The codes of the op's `path` argument.
enum class LayerPath : int32_t {
  kAuto = 0,        // the fastest path there is
  kDecomposed = 1,  // the ops one by one, on one stream or, where a side stream is given, on two
};
constexpr int64_t kNumLayerPaths = 2;

// Workspace that any path of this call may need.
int64_t layer_workspace_bytes(const LayerParams& layer, bool cuda);

void run_layer_cuda(const LayerParams& layer, LayerPath path, const LayerStreams& streams,
                    void* workspace_ptr);

}  // namespace moelora

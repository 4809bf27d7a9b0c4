// Which path a call takes: decided from shapes alone, and explained by moelora.explain.
#pragma once

#include "../fused_decode/fused_decode.h"
#include "layer.h"

namespace moelora {

// The codes of the op's `path` argument.
enum class LayerPath : int32_t {
  kAuto = 0,        // the fastest path there is
  kDecomposed = 1,  // the ops one by one, on one stream or, where a side stream is given, on two
};
constexpr int64_t kNumLayerPaths = 2;

enum class Path : int32_t { kDecomposed, kFusedDecode, kFusedPrefill };

struct PathChoice {
  Path path;
  const char* reason;
};

// The most tokens for which the one-kernel path is the fastest (benchmarks/results/).
constexpr int64_t kDecodeMaxTokens = 256;

PathChoice choose_path(const LayerParams& layer, LayerPath path, bool sm90);

FusedDecodeParams fused_decode_params(const LayerParams& layer, void* workspace_ptr);

// Workspace that any path of this call may need.
int64_t layer_workspace_bytes(const LayerParams& layer, bool cuda);

// sm90: the GPU is of compute capability 9.0.
void run_layer_cuda(const LayerParams& layer, LayerPath path, bool sm90,
                    const LayerStreams& streams, void* workspace_ptr);

}  // namespace moelora

// Which path a call takes: decided from shapes alone, and explained by moelora.explain.
#pragma once

#include <optional>

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

// Tokens up to which the fused decode path is the fastest (benchmarks/results/), and up to which it
// is with so many rows an expert on average, and no more than one adapter slot of no more than this
// rank. (More adapters cost it more than the prefill path: S1 T=512 with four of rank 32 and base
// rows 418 µs; and of fewer rows S3 T=512 has 16, 690 µs against 675. All this is of compute
// capability 9.0 and about even routing: a long list is slow to sort, in every block.)
constexpr int64_t kDecodeMaxTokens = 256, kFewRowsMaxTokens = 512;
constexpr int64_t kFewRowsMin = 17, kFewRowsMax = 32, kFewRowsMaxRank = 16;

PathChoice choose_path(const LayerParams& layer, LayerPath path, bool sm90);

FusedDecodeParams fused_decode_params(const LayerParams& layer, void* workspace_ptr);

// Workspace that any path of this call may need. Under `limit`, which cuts more than
// kMinPrefillChunk tokens into chunks that share the workspace; raises where that is impossible.
int64_t layer_workspace_bytes(const LayerParams& layer, LayerPath path, bool cuda,
                              std::optional<int64_t> limit);

// sm90: the GPU is of compute capability 9.0.
void run_layer_cuda(const LayerParams& layer, LayerPath path, bool sm90,
                    std::optional<int64_t> limit, const LayerStreams& streams, void* workspace_ptr);

}  // namespace moelora

#pragma once

#include <cuda_runtime.h>

#include "fused_decode.h"

namespace moelora::fused_decode {

// The call with a tile configuration of the caller's choice, for tuning; the workspace is
// workspace_layout(p, config_index). Its lists must fit (fused_decode_unsupported).
void launch_with_config(const FusedDecodeParams& p, int config_index, cudaStream_t stream);

// All tile configurations of one dtype.
template <class T>
struct Launcher {
  static void launch(const FusedDecodeParams& p, int config_index, cudaStream_t stream);
};

}  // namespace moelora::fused_decode

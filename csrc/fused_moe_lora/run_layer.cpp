#include "../common/stream.h"
#include "../fused_prefill/fused_prefill.h"
#include "path.h"
#include "plan.h"

namespace moelora {

void run_layer_cuda(const LayerParams& layer, LayerPath path, bool sm90,
                    std::optional<int64_t> limit, const LayerStreams& streams,
                    void* workspace_ptr) {
  switch (choose_path(layer, path, sm90).path) {
    case Path::kFusedDecode:
      launch_fused_decode(fused_decode_params(layer, workspace_ptr), streams.main);
      break;
    case Path::kFusedPrefill:
#ifdef MOELORA_BUILT_SM90
      launch_fused_prefill(layer, streams.main, workspace_ptr,
                           limit.value_or(kFusedPrefillWorkspaceLimit));
#endif
      break;
    case Path::kDecomposed:
      return run_decomposed_cuda(layer, limit, streams, workspace_ptr);
  }
  if (streams.down_gemm_done_event != nullptr) {
    record_event(streams.down_gemm_done_event, streams.main);
  }
}

}  // namespace moelora

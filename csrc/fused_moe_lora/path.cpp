#include "path.h"

#include "plan.h"

namespace moelora {

int64_t layer_workspace_bytes(const LayerParams& layer, bool cuda) {
  return plan_decomposed(layer, cuda).bytes;
}

void run_layer_cuda(const LayerParams& layer, LayerPath, const LayerStreams& streams,
                    void* workspace_ptr) {
  run_decomposed_cuda(layer, streams, workspace_ptr);
}

}  // namespace moelora

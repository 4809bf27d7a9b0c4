#include "prefill_gemm_launch.cuh"

namespace moelora::fused_prefill {

void launch_prefill_down_fp16(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                              int config_index, void* stream) {
  launch_gemm<__half, false>(maps, params, config_index, stream);
}

}  // namespace moelora::fused_prefill

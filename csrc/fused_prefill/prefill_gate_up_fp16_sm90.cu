#include "prefill_gemm_launch.cuh"

namespace moelora::fused_prefill {

void launch_prefill_gate_up_fp16(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                                 int config_index, void* stream) {
  launch_gemm<__half, true>(maps, params, config_index, stream);
}

}  // namespace moelora::fused_prefill

#include "prefill_gemm_launch.cuh"

namespace moelora::fused_prefill {

void launch_prefill_gate_up_bf16(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                                 int config_index, void* stream) {
  launch_gemm<__nv_bfloat16, true>(maps, params, config_index, stream);
}

}  // namespace moelora::fused_prefill

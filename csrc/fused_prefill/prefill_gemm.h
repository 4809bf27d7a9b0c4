#pragma once

#include "prefill_gemm_params.h"

namespace moelora::fused_prefill {

// The GEMM of one side (prefill_gemm.cuh) with tile configuration `config_index`.
void launch_prefill_gate_up(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                            int config_index, DType dtype, void* stream);
void launch_prefill_down(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                         int config_index, DType dtype, void* stream);

// Their halves by dtype, one source file each.
void launch_prefill_gate_up_bf16(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                                 int config_index, void* stream);
void launch_prefill_gate_up_fp16(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                                 int config_index, void* stream);
void launch_prefill_down_bf16(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                              int config_index, void* stream);
void launch_prefill_down_fp16(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                              int config_index, void* stream);

}  // namespace moelora::fused_prefill

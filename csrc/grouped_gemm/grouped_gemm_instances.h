// What the dispatcher needs to know of the CUTLASS kernels: one function per (architecture, dtype,
// config), instantiated in grouped_gemm_<arch>_<dtype>.cu.
#pragma once

#include <cuda_runtime.h>

#include "grouped_gemm.h"

namespace moelora {

// Architectures that a kernel is built for (sm_103 runs sm100's source, compiled for 103a).
enum class GemmArch { kSm90, kSm100 };

// Launches config kConfig of kArch's table in grouped_gemm_config.h. Its token tile must divide
// params.maps.tile_rows.
template <GemmArch kArch, DType kDType, int kConfig>
void run_grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream, int32_t num_sms);

}  // namespace moelora

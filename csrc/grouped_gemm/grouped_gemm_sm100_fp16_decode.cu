#include "grouped_gemm_launch.cuh"

namespace moelora {

template void run_grouped_gemm<GemmArch::kSm100, DType::kFloat16, 0>(const GroupedGemmParams&,
                                                                     cudaStream_t, int32_t);
template void run_grouped_gemm<GemmArch::kSm100, DType::kFloat16, 1>(const GroupedGemmParams&,
                                                                     cudaStream_t, int32_t);

}  // namespace moelora

#include "grouped_gemm_launch.cuh"

namespace moelora {

template void run_grouped_gemm<GemmArch::kSm100, DType::kFloat16, 2>(const GroupedGemmParams&,
                                                                     cudaStream_t, int32_t);
template void run_grouped_gemm<GemmArch::kSm100, DType::kFloat16, 3>(const GroupedGemmParams&,
                                                                     cudaStream_t, int32_t);
template void run_grouped_gemm<GemmArch::kSm100, DType::kFloat16, 4>(const GroupedGemmParams&,
                                                                     cudaStream_t, int32_t);

}  // namespace moelora

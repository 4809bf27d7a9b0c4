#include "grouped_gemm_launch.cuh"

namespace moelora {

template void run_grouped_gemm<GemmArch::kSm100, DType::kBFloat16, 2>(const GroupedGemmParams&,
                                                                      cudaStream_t, int32_t);
template void run_grouped_gemm<GemmArch::kSm100, DType::kBFloat16, 3>(const GroupedGemmParams&,
                                                                      cudaStream_t, int32_t);
template void run_grouped_gemm<GemmArch::kSm100, DType::kBFloat16, 4>(const GroupedGemmParams&,
                                                                      cudaStream_t, int32_t);

}  // namespace moelora

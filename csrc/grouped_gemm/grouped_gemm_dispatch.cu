// Picks the kernel of a grouped GEMM: architecture from the device, dtype from the weights, tiles
// from the shapes.
#include "../common/launch.h"
#include "grouped_gemm_config.h"
#include "grouped_gemm_instances.h"

namespace moelora {
namespace {

int32_t device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "grouped_gemm: device query");
  return value;
}

template <GemmArch kArch, DType kDType>
void run_config(int index, const GroupedGemmParams& params, cudaStream_t stream, int32_t num_sms) {
  static_assert(kNumGroupedGemmConfigs == 5);
  switch (index) {
    case 0:
      return run_grouped_gemm<kArch, kDType, 0>(params, stream, num_sms);
    case 1:
      return run_grouped_gemm<kArch, kDType, 1>(params, stream, num_sms);
    case 2:
      return run_grouped_gemm<kArch, kDType, 2>(params, stream, num_sms);
    case 3:
      return run_grouped_gemm<kArch, kDType, 3>(params, stream, num_sms);
    case 4:
      return run_grouped_gemm<kArch, kDType, 4>(params, stream, num_sms);
    default:
      fail("moelora: ", "grouped_gemm: ", params.max_rows,
           " rows are more than a kernel can address");
  }
}

template <GemmArch kArch>
void run_arch(const GroupedGemmConfig (&configs)[kNumGroupedGemmConfigs],
              const GroupedGemmParams& params, cudaStream_t stream, int32_t num_sms) {
  const int index = pick_grouped_gemm_config(configs, params.expected_rows, params.max_rows);
  switch (params.weight.dtype) {
    case DType::kBFloat16:
      return run_config<kArch, DType::kBFloat16>(index, params, stream, num_sms);
    case DType::kFloat16:
      return run_config<kArch, DType::kFloat16>(index, params, stream, num_sms);
    default:
      fail("moelora type error: ", "grouped_gemm: expected bfloat16 or float16 weights on CUDA");
  }
}

}  // namespace

void launch_grouped_gemm(const GroupedGemmParams& params, void* stream) {
  if (params.max_rows == 0) return;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "grouped_gemm: device query");
  // Attribute queries cost tens of nanoseconds: nothing to cache.
  const int32_t major = device_attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int32_t minor = device_attribute(cudaDevAttrComputeCapabilityMinor, device);
  const int32_t num_sms = device_attribute(cudaDevAttrMultiProcessorCount, device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
#ifdef MOELORA_BUILT_SM90
  if (major == 9) {
    return run_arch<GemmArch::kSm90>(kSm90GroupedGemmConfigs, params, cuda_stream, num_sms);
  }
#endif
#ifdef MOELORA_BUILT_SM100
  if (major == 10) {
    return run_arch<GemmArch::kSm100>(kSm100GroupedGemmConfigs, params, cuda_stream, num_sms);
  }
#endif
  fail("moelora: ", "grouped_gemm: this build has no kernel for compute capability ", major, ".",
       minor, " (it knows 9.0, 10.0 and 10.3; TORCH_CUDA_ARCH_LIST chose which of them to build)");
}

}  // namespace moelora

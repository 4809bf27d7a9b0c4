#include "../common/grid.h"
#include "../common/launch.h"
#include "permute_kernel.cuh"

namespace moelora {
namespace {

template <class T>
void launch(const PermuteParams& params, cudaStream_t stream) {
  const int64_t segments = (params.hidden_size + kPermuteSegment - 1) / kPermuteSegment;
  LaunchConfig config;
  config.grid = blocks_for(params.max_rows * segments, kPermuteWarps);
  config.block = dim3(32 * kPermuteWarps);
  config.stream = stream;
  config.dependent = true;
  launch_kernel("permute", permute_kernel<T>, config, params, segments);
}

}  // namespace

void launch_permute(const PermuteParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(params, cuda_stream);
  launch<__half>(params, cuda_stream);
}

}  // namespace moelora

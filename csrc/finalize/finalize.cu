#include "../common/grid.h"
#include "../common/launch.h"
#include "finalize_kernel.cuh"

namespace moelora {
namespace {

template <class T>
void launch(const FinalizeParams& params, cudaStream_t stream) {
  const int64_t chunks = (params.hidden_size + kFinalizeColumns - 1) / kFinalizeColumns;
  LaunchConfig config;
  config.grid = blocks_for(params.num_tokens * chunks, 1);
  config.block = dim3(kFinalizeThreads);
  config.stream = stream;
  config.dependent = true;
  const auto kernel =
      params.delta_ptr == nullptr ? finalize_kernel<T, false> : finalize_kernel<T, true>;
  launch_kernel("finalize", kernel, config, params, chunks);
}

}  // namespace

void launch_finalize(const FinalizeParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(params, cuda_stream);
  launch<__half>(params, cuda_stream);
}

}  // namespace moelora

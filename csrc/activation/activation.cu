#include "../common/grid.h"
#include "../common/launch.h"
#include "activation_kernel.cuh"

namespace moelora {
namespace {

template <class T>
void launch(const ActivationParams& params, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = blocks_for(params.num_pairs * (params.intermediate_size / 8), kActivationThreads);
  config.block = dim3(kActivationThreads);
  config.stream = stream;
  config.dependent = true;
  launch_kernel("activation", activation_kernel<T>, config, params);
}

}  // namespace

void launch_activation(const ActivationParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(params, cuda_stream);
  launch<__half>(params, cuda_stream);
}

}  // namespace moelora

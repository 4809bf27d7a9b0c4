#include "../common/grid.h"
#include "../common/launch.h"
#include "routing_kernel.cuh"

namespace moelora {

void launch_routing(const RoutingParams& params, void* stream) {
  if (params.num_tokens == 0) return;
  LaunchConfig config;
  config.grid = blocks_for(params.num_tokens, kRoutingWarps);
  config.block = dim3(kRoutingWarps * kLanes);
  config.stream = static_cast<cudaStream_t>(stream);
  if (params.n_group > 1) {
    config.shared_bytes = kRoutingWarps * (params.num_experts + params.n_group) * sizeof(uint32_t);
  }
  // The kernel with the fewest keys a lane that holds E.
  const auto kernel = params.num_experts <= 32    ? routing_kernel<1>
                      : params.num_experts <= 64  ? routing_kernel<2>
                      : params.num_experts <= 128 ? routing_kernel<4>
                      : params.num_experts <= 256 ? routing_kernel<8>
                      : params.num_experts <= 512 ? routing_kernel<16>
                                                  : routing_kernel<32>;
  launch_kernel("routing", kernel, config, params);
}

}  // namespace moelora

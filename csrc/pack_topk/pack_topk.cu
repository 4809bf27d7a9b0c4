#include "../common/grid.h"
#include "../common/launch.h"
#include "pack_topk_kernel.cuh"

namespace moelora {
namespace {

LaunchConfig thread_per_pair(int64_t num_pairs, void* stream) {
  constexpr int kThreads = 256;
  LaunchConfig config;
  config.grid = blocks_for(num_pairs, kThreads);
  config.block = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return config;
}

}  // namespace

void launch_pack_topk(const PackTopkParams& params, void* stream) {
  if (params.num_pairs == 0) return;
  launch_kernel("pack_topk", pack_topk_kernel, thread_per_pair(params.num_pairs, stream), params);
}

void launch_unpack_topk(const UnpackTopkParams& params, void* stream) {
  if (params.num_pairs == 0) return;
  launch_kernel("unpack_topk", unpack_topk_kernel, thread_per_pair(params.num_pairs, stream),
                params);
}

}  // namespace moelora

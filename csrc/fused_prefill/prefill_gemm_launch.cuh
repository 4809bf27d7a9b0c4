// Launches one instantiation of the prefill GEMM on every SM.
#pragma once

#include <algorithm>

#include "../common/grid.h"
#include "prefill_gemm.cuh"
#include "prefill_gemm.h"

namespace moelora::fused_prefill {

inline int multiprocessor_count() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "prefill_gemm");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "prefill_gemm");
  return count;
}

template <class T, bool kGateUp, int kConfigIndex>
void launch_gemm(const PrefillGemmMaps& maps, const PrefillGemmParams& params, void* stream) {
  const auto kernel = prefill_gemm_kernel<T, kConfigIndex, kGateUp>;
  constexpr int kBytes = GemmTile<kConfigIndex>::kSharedBytes;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
             "prefill_gemm");
  LaunchConfig config;
  // Whole clusters, which max_tiles holds too.
  constexpr int kCluster = GemmTile<kConfigIndex>::kCluster;
  const int64_t most_items = params.max_tiles * params.weight_blocks;
  const int64_t blocks_at_once = multiprocessor_count() / kCluster * kCluster;
  config.grid = blocks_for(std::min(blocks_at_once, most_items), 1);
  config.cluster = kCluster;
  config.block = dim3(kGemmThreads);
  config.shared_bytes = kBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.dependent = true;
  launch_kernel("prefill_gemm", kernel, config, maps, params);
}

template <class T, bool kGateUp>
void launch_gemm(const PrefillGemmMaps& maps, const PrefillGemmParams& params, int config_index,
                 void* stream) {
  static_assert(kNumFusedPrefillConfigs == 4, "one call for each");
  if (config_index == 0) return launch_gemm<T, kGateUp, 0>(maps, params, stream);
  if (config_index == 1) return launch_gemm<T, kGateUp, 1>(maps, params, stream);
  if (config_index == 3) return launch_gemm<T, kGateUp, 3>(maps, params, stream);
  launch_gemm<T, kGateUp, 2>(maps, params, stream);
}

}  // namespace moelora::fused_prefill

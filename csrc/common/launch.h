// How every kernel is launched: one checked call, with or without programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include "checks.h"

namespace moelora {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    // Clear the sticky last-error slot, so that a later, innocent launch is not blamed.
    cudaGetLastError();
    fail("moelora: ", what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  }
}

struct LaunchConfig {
  dim3 grid, block;
  size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
  // Programmatic dependent launch: the kernel must call griddepcontrol.wait before it reads what
  // its predecessor wrote, or wait for that in another way, and then call it before it ends,
  // because later kernels rely on that.
  bool dependent = false;
  // Blocks a cluster, along x: they run at the same time and reach each other's shared memory.
  unsigned cluster = 1;
};

template <class... KernelArgs, class... Args>
void launch_kernel(const char* name, void (*kernel)(KernelArgs...), const LaunchConfig& config,
                   Args&&... args) {
  // No tokens, no pairs or no rows: no blocks, and nothing to do.
  if (config.grid.x == 0) return;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = config.grid;
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = config.stream;
  cudaLaunchAttribute attributes[2] = {};
  launch.attrs = attributes;
  if (config.dependent) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[launch.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = config.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  check_cuda(cudaLaunchKernelEx(&launch, kernel, KernelArgs(args)...), name);
}

}  // namespace moelora

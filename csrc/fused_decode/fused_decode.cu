#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/launch.h"
#include "../common/ptx.cuh"
#include "decode_layout.h"
#include "fused_decode.h"
#include "fused_decode_launch.h"

namespace moelora {
namespace fused_decode {
namespace {

// One block: zeroes the call's counters. A kernel, not a memset, so that the chain of dependent
// launches is not broken.
__global__ void __launch_bounds__(512) reset_counters_kernel(uint32_t* counters, int count) {
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  for (int i = threadIdx.x; i < count; i += 512) counters[i] = 0;
}

}  // namespace

void launch_with_config(const FusedDecodeParams& p, int config_index, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  LaunchConfig reset;
  reset.grid = dim3(1);
  reset.block = dim3(512);
  reset.stream = stream;
  reset.dependent = true;
  launch_kernel("fused_decode: counters", reset_counters_kernel, reset,
                static_cast<uint32_t*>(p.workspace_ptr),
                int{workspace_layout(p, config_index).num_counters});
  if (p.dtype == DType::kBFloat16) {
    Launcher<__nv_bfloat16>::launch(p, config_index, stream);
  } else {
    Launcher<__half>::launch(p, config_index, stream);
  }
}

}  // namespace fused_decode

void launch_fused_decode(const FusedDecodeParams& params, void* stream) {
  if (const char* reason = fused_decode_unsupported(params)) fail("fused_decode: ", reason);
  fused_decode::launch_with_config(params, fused_decode::config_index(params),
                                   static_cast<cudaStream_t>(stream));
}

}  // namespace moelora

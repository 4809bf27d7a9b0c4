#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "../common/launch.h"
#include "decode_exchange.cuh"
#include "decode_layout.h"
#include "fused_decode.h"
#include "fused_decode_launch.h"

namespace moelora {
namespace fused_decode {
namespace {

constexpr int kResetThreads = 512;

// Zeroes the call's counters and marks the words that blocks will exchange as unwritten: a counter
// and 16 bytes a thread. A kernel, not a memset, so that the chain of dependent launches is not
// broken.
__global__ void __launch_bounds__(kResetThreads)
    reset_kernel(uint32_t* counters, int num_counters, uint4* exchange, int num_exchange) {
  const int i = blockIdx.x * kResetThreads + threadIdx.x;
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  if (i < num_counters) counters[i] = 0;
  if (i < num_exchange) exchange[i] = make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten);
}

}  // namespace

void launch_with_config(const FusedDecodeParams& p, int config_index, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const Workspace w = workspace_layout(p, config_index);
  char* const workspace = static_cast<char*>(p.workspace_ptr);
  const int num_exchange = static_cast<int>(w.exchange_bytes / 16);
  LaunchConfig reset;
  reset.grid =
      dim3(static_cast<unsigned>(ceil_div(std::max(w.num_counters, num_exchange), kResetThreads)));
  reset.block = dim3(kResetThreads);
  reset.stream = stream;
  reset.dependent = true;
  launch_kernel("fused_decode: reset", reset_kernel, reset, reinterpret_cast<uint32_t*>(workspace),
                int{w.num_counters}, reinterpret_cast<uint4*>(workspace + w.gate_up_v),
                int{num_exchange});
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

// CPU-only builds (no nvcc, or MOELORA_CUDA=0): every launch says so instead of being an undefined
// symbol.
#include "../activation/activation.h"
#include "../finalize/finalize.h"
#include "../fused_decode/fused_decode.h"
#include "../grouped_gemm/grouped_gemm.h"
#include "../lora_expand/lora_expand.h"
#include "../lora_shrink/lora_shrink.h"
#include "../moe_sort/moe_sort.h"
#include "../pack_topk/pack_topk.h"
#include "../permute/permute.h"
#include "../routing/routing.h"
#include "checks.h"
#include "device.h"
#include "stream.h"

namespace moelora {
namespace {

[[noreturn]] void no_cuda() {
  fail("moelora: ", "this build has no CUDA kernels; rebuild with nvcc on PATH and MOELORA_CUDA=1");
}

}  // namespace

void require_supported_device(int) { no_cuda(); }
bool is_sm90(int) { no_cuda(); }
void record_event(void*, void*) { no_cuda(); }
void wait_event(void*, void*) { no_cuda(); }
void launch_routing(const RoutingParams&, void*) { no_cuda(); }
void launch_pack_topk(const PackTopkParams&, void*) { no_cuda(); }
void launch_unpack_topk(const UnpackTopkParams&, void*) { no_cuda(); }
void launch_moe_sort(const MoeSortParams&, void*) { no_cuda(); }
void launch_permute(const PermuteParams&, void*) { no_cuda(); }
void launch_grouped_gemm(const GroupedGemmParams&, void*) { no_cuda(); }
void launch_lora_shrink(const LoraShrinkParams&, void*) { no_cuda(); }
void launch_lora_expand(const LoraExpandParams&, void*) { no_cuda(); }
void launch_activation(const ActivationParams&, void*) { no_cuda(); }
void launch_finalize(const FinalizeParams&, void*) { no_cuda(); }
void launch_fused_decode(const FusedDecodeParams&, void*) { no_cuda(); }

}  // namespace moelora

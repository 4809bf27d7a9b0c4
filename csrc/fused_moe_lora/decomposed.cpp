#include "decomposed.h"

#include <algorithm>

#include "../common/stream.h"

namespace moelora {
namespace {

struct CpuDevice {
  // The bits of an ATen GEMM row depend on its place among the rows, so adapters must not move it.
  static constexpr bool kRowsBySlot = false;
  struct Stream {};
  Stream main() { return {}; }
  Stream side() { return {}; }
  void fork() {}
  void join() {}
  void wait_lora_ready() {}
  void record_down_gemm_done() {}

  void run(Stream, const MoeSortParams& params) { moe_sort_cpu(params); }
  void run(Stream, const PermuteParams& params) { permute_cpu(params); }
  void run(Stream, const GroupedGemmParams& params) { grouped_gemm_cpu(params); }
  void run(Stream, const LoraShrinkParams& params) { lora_shrink_cpu(params); }
  void run(Stream, const LoraExpandParams& params) { lora_expand_cpu(params); }
  void run(Stream, const ActivationParams& params) { activation_cpu(params); }
  void run(Stream, const FinalizeParams& params) { finalize_cpu(params); }
};

class CudaDevice {
 public:
  // The grouped LoRA kernels read one matrix for neighbouring rows.
  static constexpr bool kRowsBySlot = true;
  using Stream = void*;
  explicit CudaDevice(const LayerStreams& streams) : streams_(streams) {}

  Stream main() { return streams_.main; }
  Stream side() { return streams_.side != nullptr ? streams_.side : streams_.main; }
  void fork() {
    if (streams_.side == nullptr) return;
    record_event(streams_.fork_event, streams_.main);
    wait_event(streams_.side, streams_.fork_event);
  }
  void join() {
    if (streams_.side == nullptr) return;
    record_event(streams_.join_event, streams_.side);
    wait_event(streams_.main, streams_.join_event);
  }
  void wait_lora_ready() {
    if (streams_.lora_ready_event != nullptr) wait_event(streams_.main, streams_.lora_ready_event);
  }
  void record_down_gemm_done() {
    if (streams_.down_gemm_done_event != nullptr) {
      record_event(streams_.down_gemm_done_event, streams_.main);
    }
  }

  void run(Stream stream, const MoeSortParams& params) { launch_moe_sort(params, stream); }
  void run(Stream stream, const PermuteParams& params) { launch_permute(params, stream); }
  void run(Stream stream, const GroupedGemmParams& params) { launch_grouped_gemm(params, stream); }
  void run(Stream stream, const LoraShrinkParams& params) { launch_lora_shrink(params, stream); }
  void run(Stream stream, const LoraExpandParams& params) { launch_lora_expand(params, stream); }
  void run(Stream stream, const ActivationParams& params) { launch_activation(params, stream); }
  void run(Stream stream, const FinalizeParams& params) { launch_finalize(params, stream); }

 private:
  LayerStreams streams_;
};

// The caller's events are waited for and recorded in every chunk: the last record is what counts.
template <class Device>
void run_chunks(const LayerParams& layer, std::optional<int64_t> limit, Device& device,
                void* workspace_ptr, bool cuda) {
  const int64_t tokens = decomposed_chunk_tokens(layer, cuda, limit);
  if (tokens == layer.num_tokens) {
    return DecomposedLayer<Device>(layer, device, workspace_ptr, cuda).run();
  }
  for (int64_t first = 0; first < layer.num_tokens; first += tokens) {
    const LayerParams chunk = layer_chunk(layer, first, std::min(tokens, layer.num_tokens - first));
    DecomposedLayer<Device>(chunk, device, workspace_ptr, cuda).run();
  }
}

}  // namespace

void run_decomposed_cpu(const LayerParams& layer, std::optional<int64_t> limit,
                        void* workspace_ptr) {
  CpuDevice device;
  run_chunks(layer, limit, device, workspace_ptr, false);
}

void run_decomposed_cuda(const LayerParams& layer, std::optional<int64_t> limit,
                         const LayerStreams& streams, void* workspace_ptr) {
  CudaDevice device(streams);
  run_chunks(layer, limit, device, workspace_ptr, true);
}

}  // namespace moelora

// Launches the instances of one dtype; fused_decode_bf16.cu and fused_decode_fp16.cu include it.
#pragma once

#include <atomic>
#include <utility>

#include "fused_decode_kernel.cuh"
#include "fused_decode_launch.h"
#include "tensor_maps.h"

namespace moelora::fused_decode {

inline KernelParams kernel_params(const FusedDecodeParams& p, const Workspace& w,
                                  const SharedLayout& shared, int down_rows) {
  char* base = static_cast<char*>(p.workspace_ptr);
  KernelParams k = {};
  k.p = p;
  k.shared = shared;
  k.counters = reinterpret_cast<uint32_t*>(base);
  k.z_ready = k.counters + kItemCounters;
  k.gate_up_v_ready = k.z_ready + w.max_items;
  k.down_v_ready = k.gate_up_v_ready + w.max_segments;
  k.row_blocks_done = k.down_v_ready + w.max_segments;
  k.z = base + w.z;
  k.y = base + w.y;
  k.gate_up_v = base + w.gate_up_v;
  k.down_v = base + w.down_v;
  k.down_parts = reinterpret_cast<float*>(base + w.down_parts);
  k.gate_up_rank = has_gate_up_lora(p) ? p.gate_up_rank : 0;
  k.down_rank = has_down_lora(p) ? p.down_rank : 0;
  k.gate_up_v_ranks = static_cast<int>(round_up(k.gate_up_rank, 16));
  k.down_v_ranks = static_cast<int>(round_up(k.down_rank, 16));
  k.items_per_piece = items_per_piece(p.intermediate_size, down_rows);
  k.w13_expert_blocks = static_cast<int>(w13_expert_blocks(p));
  k.w2_folded = w2_folds(p);
  k.token_scale = token_scale_of(p.top_k);
  if (k.gate_up_rank == 0) k.p.gate_up_a_components = 1;
  if (k.gate_up_rank > 0) k.gate_up_b_slot_step = static_cast<int>(gate_up_b_slot_step(p));
  return k;
}

template <int kConfigIndex, class T>
void launch_config(const FusedDecodeParams& p, cudaStream_t stream) {
  using C = Tiles<kConfigIndex>;
  const Workspace w = workspace_layout(p, kConfigIndex);
  const bool lora = has_gate_up_lora(p) || has_down_lora(p);
  const SharedLayout shared = shared_layout<C>(static_cast<int>(p.num_tokens) * p.top_k,
                                               p.num_local_experts, w.max_items, lora);
  const KernelParams k = kernel_params(p, w, shared, C::kDownRows);

  TensorMaps maps = {};
  maps.w13 = gate_up_weight_map(p, C::kGateUpRows, C::kGateUpColumns);
  maps.w2 = down_weight_map(p, C::kDownRows, C::kDownColumns);
  if (k.gate_up_rank > 0) {
    maps.gate_up_a =
        shrink_map(p, p.gate_up_a, p.hidden_size, p.gate_up_rank, p.gate_up_a_components);
    if (!C::kDirect) maps.gate_up_b = gate_up_b_map(p, C::kGateUpRows);
  }
  if (k.down_rank > 0 && !C::kDirect) {
    maps.down_a = shrink_map(p, p.down_a, p.intermediate_size, p.down_rank, 1);
    maps.down_b = down_b_map(p, C::kDownRows);
  }

  const auto kernel = fused_decode_kernel<kConfigIndex, T>;
  int device = 0, num_sms = 0;
  check_cuda(cudaGetDevice(&device), "fused_decode: device");
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
             "fused_decode: number of SMs");
  static std::atomic<uint64_t> prepared{0};  // devices, by bit
  if (device >= 64 || (prepared.load(std::memory_order_relaxed) >> device & 1) == 0) {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes),
        "fused_decode: shared memory");
    if (device < 64) prepared.fetch_or(uint64_t{1} << device, std::memory_order_relaxed);
  }

  LaunchConfig config;
  config.stream = stream;
  config.dependent = true;
  config.grid = dim3(num_sms);
  config.block = dim3(kThreads);
  config.shared_bytes = shared.bytes;
  launch_kernel("fused_decode", kernel, config, maps, k);
  if (C::kDirect) return;
  config.grid = dim3(static_cast<unsigned>(ceil_div(p.hidden_size, 8 * kSumThreads)),
                     static_cast<unsigned>(p.num_tokens));
  config.block = dim3(kSumThreads);
  config.shared_bytes = 0;
  launch_kernel("fused_decode: weighted sum", weighted_sum_kernel<T>, config, k);
}

template <class T, int... kIndices>
void launch_any(const FusedDecodeParams& p, int config_index, cudaStream_t stream,
                std::integer_sequence<int, kIndices...>) {
  ((config_index == kIndices ? launch_config<kIndices, T>(p, stream) : void()), ...);
}

template <class T>
void Launcher<T>::launch(const FusedDecodeParams& p, int config_index, cudaStream_t stream) {
  launch_any<T>(p, config_index, stream, std::make_integer_sequence<int, kNumFusedDecodeConfigs>{});
}

}  // namespace moelora::fused_decode

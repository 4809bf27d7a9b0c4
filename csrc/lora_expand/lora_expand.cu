#include "../common/grid.h"
#include "lora_expand_config.h"
#include "lora_expand_grouped_kernel.cuh"
#include "lora_expand_indexed_kernel.cuh"

namespace moelora {
namespace {

template <class T>
void launch_indexed(const LoraExpandParams& params, bool aligned, cudaStream_t stream) {
  const int64_t num_columns = expand_part(params, 0).num_columns;
  const int64_t blocks_per_part = (num_columns + kExpandIndexedThreads - 1) / kExpandIndexedThreads;
  LaunchConfig config;
  config.grid =
      blocks_for(params.num_tokens * params.top_k * num_expand_parts(params) * blocks_per_part, 1);
  config.block = dim3(kExpandIndexedThreads);
  config.stream = stream;
  config.dependent = true;
  const auto kernel =
      aligned ? lora_expand_indexed_kernel<T, true> : lora_expand_indexed_kernel<T, false>;
  launch_kernel("lora_expand", kernel, config, params, blocks_per_part);
}

template <class T, int kSteps, bool kAligned>
void launch_grouped(const LoraExpandParams& params, int32_t columns_per_block,
                    cudaStream_t stream) {
  const int64_t num_columns = expand_part(params, 0).num_columns;
  const int64_t blocks_per_window =
      num_expand_parts(params) * ((num_columns + columns_per_block - 1) / columns_per_block);
  const int64_t num_windows =
      (params.maps.num_tiles * params.maps.tile_rows + kExpandRows - 1) / kExpandRows;
  const int64_t num_pairs = params.num_tokens * params.top_k;
  LaunchConfig config;
  config.grid =
      blocks_for(num_windows * blocks_per_window + (num_pairs + kClearRows - 1) / kClearRows, 1);
  config.block = dim3(kExpandThreads);
  config.shared_bytes = kExpandRows * expand_v_pitch(params.rank) * sizeof(float);
  config.stream = stream;
  config.dependent = true;
  const auto kernel = lora_expand_grouped_kernel<T, kSteps, kAligned>;
  allow_shared_bytes("lora_expand", kernel, config.shared_bytes);
  launch_kernel("lora_expand", kernel, config, params, num_windows, blocks_per_window,
                columns_per_block);
}

template <class T>
void launch(const LoraExpandParams& params, cudaStream_t stream) {
  const bool aligned =
      params.rank % 8 == 0 && reinterpret_cast<uintptr_t>(params.lora_b_ptr) % 16 == 0 &&
      params.slot_stride % 8 == 0 && params.expert_stride % 8 == 0 && params.row_stride % 8 == 0;
  const LoraExpandConfig config =
      lora_expand_config(params.num_tokens * params.top_k, expand_part(params, 0).num_columns,
                         params.maps.permuted_to_expanded_ptr != nullptr);
  if (!config.grouped) return launch_indexed<T>(params, aligned, stream);
  const int32_t columns = config.columns_per_block;
  if (!aligned) return launch_grouped<T, 1, false>(params, columns, stream);
  if (params.rank <= 16) return launch_grouped<T, 1, true>(params, columns, stream);
  if (params.rank <= 32) return launch_grouped<T, 2, true>(params, columns, stream);
  launch_grouped<T, 4, true>(params, columns, stream);
}

}  // namespace

void launch_lora_expand(const LoraExpandParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(params, cuda_stream);
  launch<__half>(params, cuda_stream);
}

}  // namespace moelora

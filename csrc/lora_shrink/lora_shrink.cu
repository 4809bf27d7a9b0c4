#include "../common/grid.h"
#include "../common/launch.h"
#include "lora_shrink_config.h"
#include "lora_shrink_grouped_kernel.cuh"
#include "lora_shrink_indexed_kernel.cuh"

namespace moelora {
namespace {

template <class T>
void launch_indexed(const LoraShrinkParams& params, bool aligned, cudaStream_t stream) {
  const int32_t rank_rows = params.num_components * params.rank;
  const int32_t blocks_per_row = (rank_rows + kIndexedRankRows - 1) / kIndexedRankRows;
  LaunchConfig config;
  config.grid = blocks_for(params.num_rank_vectors() * blocks_per_row, 1);
  config.block = dim3(kIndexedThreads);
  config.stream = stream;
  config.dependent = true;
  const auto kernel =
      aligned ? lora_shrink_indexed_kernel<T, true> : lora_shrink_indexed_kernel<T, false>;
  launch_kernel("lora_shrink", kernel, config, params, blocks_per_row);
}

template <class T, class Tile>
void launch_grouped(const LoraShrinkParams& params, cudaStream_t stream) {
  const int32_t rank_rows = params.num_components * params.rank;
  const int64_t window_rows =
      params.v_per_token() ? params.num_tokens : params.maps.num_tiles * params.maps.tile_rows;
  const int64_t num_windows = (window_rows + Tile::kTileRows - 1) / Tile::kTileRows;
  const int32_t rank_blocks = (rank_rows + Tile::kTileRanks - 1) / Tile::kTileRanks;
  const int64_t clear_blocks = (params.num_rank_vectors() + Tile::kThreads - 1) / Tile::kThreads;
  LaunchConfig config;
  config.grid = blocks_for(num_windows * rank_blocks + clear_blocks, 1);
  config.block = dim3(Tile::kThreads);
  config.shared_bytes = Tile::kSharedBytes;
  config.stream = stream;
  config.dependent = true;
  const auto kernel = lora_shrink_grouped_kernel<T, Tile>;
  allow_shared_bytes("lora_shrink", kernel, Tile::kSharedBytes);
  launch_kernel("lora_shrink", kernel, config, params, num_windows, rank_blocks);
}

template <class T>
void launch(const LoraShrinkParams& params, cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(params.lora_a_ptr) % 16 == 0 &&
                       params.slot_stride % 8 == 0 && params.expert_stride % 8 == 0 &&
                       params.row_stride % 8 == 0;
  const bool sorted = params.v_per_token() || params.maps.permuted_to_expanded_ptr != nullptr;
  const LoraShrinkConfig config = lora_shrink_config(
      params.num_rank_vectors(), params.shared_outer ? 1 : params.num_local_experts,
      params.num_components * params.rank, sorted && aligned);
  if (!config.grouped) return launch_indexed<T>(params, aligned, stream);
  if (config.tile_rows == 16) {
    if (config.tile_ranks == 16) return launch_grouped<T, ShrinkTile<16, 16>>(params, stream);
    return launch_grouped<T, ShrinkTile<16, 32>>(params, stream);
  }
  if (config.tile_ranks == 16) return launch_grouped<T, ShrinkTile<64, 16>>(params, stream);
  if (config.tile_ranks == 32) return launch_grouped<T, ShrinkTile<64, 32>>(params, stream);
  launch_grouped<T, ShrinkTile<64, 64>>(params, stream);
}

}  // namespace

void launch_lora_shrink(const LoraShrinkParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(params, cuda_stream);
  launch<__half>(params, cuda_stream);
}

}  // namespace moelora

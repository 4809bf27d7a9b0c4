// The tile scheduler that turns CUTLASS's batched GEMM kernels into a grouped GEMM over experts.
//
// Work is cut into (token tile, feature tile) pairs, feature tiles innermost, and dealt out with
// the stride of the grid: blocks that run at the same time share an expert's weights and tokens in
// L2. A tile's batch coordinate is its expert and its row window (row_window.cuh), both found on
// the device from moe_sort's maps; the host knows nothing of the routing.
#pragma once

#include "../common/types.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "row_window.cuh"

namespace moelora {

struct ExpertTileSchedulerTag {};

struct ExpertTileSchedulerParams {
  const int32_t* expert_offsets_ptr;  // [num_experts + 1]
  const int32_t* tile_row_limit_ptr;  // [P_max / sort_tile_rows]
  int32_t num_experts;                // at most kMaxExperts
  int32_t sort_tile_rows;             // tile_rows of moe_sort
  int32_t num_feature_tiles;          // ceil(out_features / features of a cluster)
  // Where the block keeps its token_tile_offsets, in bytes of dynamic shared memory. They follow
  // CUTLASS's storage: as a static array they would lie before it and spoil its alignment.
  int32_t shared_offset;
};

// Token tiles before each expert, exclusive prefix sums [num_experts + 1], in shared memory.
CUTLASS_DEVICE int32_t* token_tile_offsets(const ExpertTileSchedulerParams& params) {
  extern __shared__ char shared[];
  return reinterpret_cast<int32_t*>(shared + params.shared_offset);
}

// Fills token_tile_offsets. Called by all threads of a block.
template <int kTokenTile>
CUTLASS_DEVICE void count_token_tiles(const ExpertTileSchedulerParams& params) {
  int32_t* offsets = token_tile_offsets(params);
  const int32_t num_experts = params.num_experts;
  for (int32_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    const int32_t rows = params.expert_offsets_ptr[e + 1] - params.expert_offsets_ptr[e];
    offsets[e] = (rows + kTokenTile - 1) / kTokenTile;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    // Each lane sums a run of experts, then turns the run into prefix sums.
    const int32_t run = (num_experts + 31) / 32;
    const int32_t lane = threadIdx.x;
    const int32_t begin = min(lane * run, num_experts), end = min(begin + run, num_experts);
    int32_t sum = 0;
    for (int32_t e = begin; e < end; ++e) sum += offsets[e];
    int32_t inclusive = sum;
    for (int32_t delta = 1; delta < 32; delta *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, inclusive, delta);
      if (lane >= delta) inclusive += other;
    }
    int32_t before = inclusive - sum;
    for (int32_t e = begin; e < end; ++e) {
      const int32_t tiles = offsets[e];
      offsets[e] = before;
      before += tiles;
    }
    if (lane == 31) offsets[num_experts] = before;
  }
  __syncthreads();
}

// kTokenTile: rows of a tile. kClusterSize: blocks of a cluster, side by side along the features.
//
// CUTLASS's static persistent schedulers differ in nothing but the order of tiles; what sm90 and
// sm100 kernels ask of any such scheduler is inherited, the state of the base class is not used.
// count_token_tiles must have run.
template <int kTokenTile, int kClusterSize>
class ExpertTileScheduler : public cutlass::gemm::kernel::detail::StaticPersistentTileScheduler100 {
  using Base = cutlass::gemm::kernel::detail::StaticPersistentTileScheduler100;

 public:
  using Params = ExpertTileSchedulerParams;
  using Arguments = ExpertTileSchedulerParams;

  struct WorkTileInfo {
    int32_t M_idx = 0;                      // feature tile of this block
    int32_t N_idx = 0;                      // always 0: a window holds one token tile
    cute::tuple<int32_t, int32_t> L_idx{};  // expert, packed row window
    bool valid = false;

    CUTLASS_DEVICE bool is_valid() const { return valid; }
    CUTLASS_DEVICE static int32_t reduction_subtile_idx() { return -1; }
  };

  CUTLASS_DEVICE explicit ExpertTileScheduler(const Params& params)
      : Base(nullptr, {}, {}), params_(params) {
    const int32_t cluster_idx = blockIdx.x / kClusterSize;
    const int32_t num_clusters = gridDim.x / kClusterSize;
    token_tile_ = cluster_idx / params.num_feature_tiles;
    feature_tile_ = cluster_idx % params.num_feature_tiles;
    token_step_ = num_clusters / params.num_feature_tiles;
    feature_step_ = num_clusters % params.num_feature_tiles;
  }

  // The constructor that sm100 kernels call.
  CUTLASS_DEVICE ExpertTileScheduler(CLCResponse*, const Params& params, dim3)
      : ExpertTileScheduler(params) {}

  template <class ProblemShape, class TileShape, class ClusterShape>
  static Params to_underlying_arguments(ProblemShape, TileShape, ClusterShape,
                                        const cutlass::KernelHardwareInfo&, const Arguments& args,
                                        void*, uint32_t = 1) {
    return args;
  }

  template <class ProblemShape, class TileShape, class AtomThrShape, class ClusterShape>
  static Params to_underlying_arguments(ProblemShape, TileShape, AtomThrShape, ClusterShape,
                                        const cutlass::KernelHardwareInfo&, const Arguments& args,
                                        void*) {
    return args;
  }

  template <class ProblemShape, class ElementAccumulator, class... Rest>
  static size_t get_workspace_size(const Arguments&, Rest&&...) {
    return 0;
  }

  template <class ClusterShape>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) {
    return get_current_work();
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    const int32_t* offsets = token_tile_offsets(params_);
    if (token_tile_ >= offsets[params_.num_experts]) return {};
    // The expert with offsets[expert] <= token_tile < offsets[expert + 1].
    int32_t expert = 0;
    for (int32_t end = params_.num_experts; end - expert > 1;) {
      const int32_t middle = (expert + end) / 2;
      (offsets[middle] <= token_tile_ ? expert : end) = middle;
    }
    const int32_t first =
        __ldg(params_.expert_offsets_ptr + expert) + (token_tile_ - offsets[expert]) * kTokenTile;
    const int32_t limit = __ldg(params_.tile_row_limit_ptr + first / params_.sort_tile_rows);
    const int32_t count = max(0, min(kTokenTile, limit - first));
    const int32_t block_in_cluster = blockIdx.x % kClusterSize;
    return {feature_tile_ * kClusterSize + block_in_cluster,
            0,
            {expert, RowWindow<kTokenTile>::pack(first, count)},
            true};
  }

  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) {
    for (uint32_t i = 0; i < count; ++i) {
      token_tile_ += token_step_;
      feature_tile_ += feature_step_;
      if (feature_tile_ >= params_.num_feature_tiles) {
        feature_tile_ -= params_.num_feature_tiles;
        ++token_tile_;
      }
    }
  }

  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

  template <class Pipeline, class PipelineState>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo work, Pipeline&, PipelineState) {
    return fetch_next_work(work);
  }

  // Work tiles name the block's own coordinates already.
  CUTLASS_DEVICE static auto work_tile_to_cta_coord(WorkTileInfo work) {
    return cute::make_coord(work.M_idx, work.N_idx, cute::_, work.L_idx);
  }

  // Each tile is computed by one block, over all of K, and ends in an epilogue.
  template <class ProblemShape, class TileShape>
  CUTLASS_DEVICE static int get_work_k_tile_count(const WorkTileInfo&, ProblemShape problem,
                                                  TileShape tile) {
    return cute::ceil_div(cute::get<2>(problem), cute::get<2>(tile));
  }
  CUTLASS_DEVICE static uint32_t get_work_k_tile_start(const WorkTileInfo&) { return 0; }
  template <class ProblemShape, class TileShape, class KTiles>
  CUTLASS_DEVICE static auto get_k_tile_iterator(const WorkTileInfo&, ProblemShape, TileShape,
                                                 KTiles k_tiles) {
    return cute::make_coord_iterator(k_tiles);
  }
  CUTLASS_DEVICE static bool valid_warpgroup_in_work_tile(const WorkTileInfo&) { return true; }
  CUTLASS_DEVICE static bool compute_epilogue(const WorkTileInfo&) { return true; }
  CUTLASS_DEVICE static bool compute_epilogue(const WorkTileInfo&, const Params&) { return true; }
  CUTLASS_DEVICE static bool requires_separate_reduction(const Params&) { return false; }

  template <class Accumulators>
  CUTLASS_DEVICE static void fixup(const Params&, const WorkTileInfo&, Accumulators&, uint32_t,
                                   uint32_t) {}
  template <bool kComplex, class TiledMma, class Accumulators, class Pipeline, class PipelineState,
            class CopyOp>
  CUTLASS_DEVICE static PipelineState fixup(const TiledMma&, const WorkTileInfo&, Accumulators&,
                                            Pipeline, PipelineState state, CopyOp) {
    return state;
  }

 private:
  Params params_;
  int32_t token_tile_, feature_tile_;
  int32_t token_step_, feature_step_;
};

}  // namespace moelora

// How a CUTLASS kernel finds the scheduler of its tag.
template <class ArchTag, class TileShape, class ClusterShape, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<
    moelora::ExpertTileSchedulerTag, ArchTag, TileShape, ClusterShape, kStages, void> {
  static_assert(cute::size<1>(ClusterShape{}) == 1, "clusters lie along the features");
  using Scheduler =
      moelora::ExpertTileScheduler<cute::size<1>(TileShape{}), cute::size<0>(ClusterShape{})>;
};

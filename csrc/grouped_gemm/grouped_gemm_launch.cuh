// The grouped GEMM as a CUTLASS kernel, for sm90 and sm100 from one source.
//
// One problem for all experts, tokens on the MMA's N side ("swap-AB"):
//   D[n, r] = sum_k A[n, k, e(r)] * B[r, k] + bias[n, e(r)]
//   A: weights [N, K, E_loc], one tensor map with an expert coordinate, any row and expert stride
//   B: rows [P_max, K], D: output [P_max, N], each one tensor map of row windows (row_window.cuh)
// A block computes feature_tile x token_tile tiles of D^T, one after the other, as
// ExpertTileScheduler deals them out. fp32 accumulation, the bias added in fp32, one rounding.
// What must hold: N and K multiples of 8, 16-byte aligned weights, rows and output, at most
// kMaxExperts experts. Only real rows are read and written, padding is not touched.
//
// A pointer-array (grouped) kernel would need one tensor map per expert, patched on the device at
// each change of expert, a second launch to lay out its arguments, and scratch memory; at decode
// nearly every tile changes expert.
#pragma once

#include <algorithm>

#include "../common/grid.h"
#include "../common/launch.h"
#include "cute/tensor.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/half.h"
#include "expert_tile_scheduler.cuh"
#include "grouped_gemm_config.h"
#include "grouped_gemm_instances.h"
#include "row_window.cuh"

namespace moelora {

// Shared memory that a block may have on sm90 and sm100, and what ExpertTileScheduler takes of it.
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kTokenTileOffsetsBytes = (kMaxExperts + 1) * sizeof(int32_t);

template <GemmArch kArch, int kConfig>
struct GemmArchTraits;

template <int kConfig>
struct GemmArchTraits<GemmArch::kSm90, kConfig> {
  static constexpr GroupedGemmConfig kTiles = kSm90GroupedGemmConfigs[kConfig];
  using Tag = cutlass::arch::Sm90;
  using MainloopSchedule =
      cute::conditional_t<kTiles.cooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using EpilogueSchedule =
      cute::conditional_t<kTiles.cooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                          cutlass::epilogue::TmaWarpSpecialized>;
  static constexpr int kBlockFeatures = kTiles.feature_tile;
  template <class Mainloop>
  using RowsMainloop = Sm90RowsMainloop<Mainloop, kTiles.token_tile>;
};

template <int kConfig>
struct GemmArchTraits<GemmArch::kSm100, kConfig> {
  static constexpr GroupedGemmConfig kTiles = kSm100GroupedGemmConfigs[kConfig];
  using Tag = cutlass::arch::Sm100;
  static constexpr bool kPair = kTiles.cluster == 2;
  using MainloopSchedule =
      cute::conditional_t<kPair, cutlass::gemm::KernelTmaWarpSpecialized2SmSm100,
                          cutlass::gemm::KernelTmaWarpSpecialized1SmSm100>;
  using EpilogueSchedule = cute::conditional_t<kPair, cutlass::epilogue::TmaWarpSpecialized2Sm,
                                               cutlass::epilogue::TmaWarpSpecialized1Sm>;
  static constexpr int kBlockFeatures = kTiles.feature_tile / kTiles.cluster;
  template <class Mainloop>
  using RowsMainloop = Sm100RowsMainloop<Mainloop, kTiles.token_tile>;
};

template <DType kDType>
using CutlassElement =
    cute::conditional_t<kDType == DType::kBFloat16, cutlass::bfloat16_t, cutlass::half_t>;

template <GemmArch kArch, DType kDType, int kConfig>
struct GroupedGemm {
  using Traits = GemmArchTraits<kArch, kConfig>;
  using Element = CutlassElement<kDType>;
  static constexpr GroupedGemmConfig kTiles = Traits::kTiles;
  static constexpr int kTokenTile = kTiles.token_tile;
  static constexpr int kAlignment = 8;  // elements of 16 bytes: what TMA asks of every stride

  using TileShape =
      cute::Shape<cute::Int<kTiles.feature_tile>, cute::Int<kTokenTile>, cute::Int<kTiles.k_tile>>;
  using BlockShape = cute::Shape<cute::Int<Traits::kBlockFeatures>, cute::Int<kTokenTile>,
                                 cute::Int<kTiles.k_tile>>;
  using ClusterShape = cute::Shape<cute::Int<kTiles.cluster>, cute::_1, cute::_1>;

  // Batch modes are (expert, packed row window); each operand follows one of the two.
  using StrideWeight = cute::Stride<int64_t, cute::_1, cute::Stride<int64_t, cute::_0>>;  // N, K
  using StrideRows = cute::Stride<int64_t, cute::_1, cute::Stride<cute::_0, int64_t>>;    // tile, K
  using StrideOut = cute::Stride<cute::_1, int64_t, cute::Stride<cute::_0, int64_t>>;     // N, tile
  using StrideBias = cute::Stride<cute::_1, cute::_0, cute::Stride<int64_t, cute::_0>>;   // N, tile

  // round(bias + accumulator); a null bias pointer reads as 0.
  using Fusion = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, Element, float,
                                             cutlass::FloatRoundStyle::round_to_nearest>,
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, BlockShape, Element, float, StrideBias, 1>,
      cutlass::epilogue::fusion::Sm90AccFetch>;

  using Epilogue = typename ReplaceTmaStore<
      typename cutlass::epilogue::collective::CollectiveBuilder<
          typename Traits::Tag, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
          cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, StrideOut,
          kAlignment, Element, StrideOut, kAlignment, typename Traits::EpilogueSchedule,
          Fusion>::CollectiveOp,
      TmaStoreRows<kTokenTile>>::type;

  static constexpr int kReservedShared =
      sizeof(typename Epilogue::SharedStorage) + kTokenTileOffsetsBytes;
  using Mainloop =
      typename Traits::template RowsMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
          typename Traits::Tag, cutlass::arch::OpClassTensorOp, Element, StrideWeight, kAlignment,
          Element, StrideRows, kAlignment, float, TileShape, ClusterShape,
          cutlass::gemm::collective::StageCountAutoCarveout<kReservedShared>,
          typename Traits::MainloopSchedule>::CollectiveOp>;

  // N, token tile, K, (E_loc, bound of packed windows)
  using ProblemShape = cute::Shape<int32_t, int32_t, int32_t, cute::Shape<int32_t, int32_t>>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue,
                                                      ExpertTileSchedulerTag>;
};

// Threads and shared memory as Kernel asks for them, a grid of whole clusters; blocks loop over
// their tiles. A block without a first tile leaves at once: sm100's kernel takes the first one for
// granted. The blocks of a cluster agree on that, it depends on the token tile alone.
template <class Kernel, int kTokenTile>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, Kernel::MinBlocksPerMultiprocessor)
    grouped_gemm_kernel(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ char shared[];
  count_token_tiles<kTokenTile>(params.scheduler);
  if (!typename Kernel::TileScheduler(params.scheduler).get_current_work().is_valid()) return;
  Kernel{}(params, shared);
}

// CUTLASS prints and goes on where a tensor map cannot be encoded, and leaves it all zero.
template <class TmaCopy>
void check_tensor_map(const TmaCopy& copy, const char* operand, const GroupedGemmParams& params) {
  const auto* words = reinterpret_cast<const uint64_t*>(copy.get_tma_descriptor());
  for (size_t i = 0; i < sizeof(cute::TmaDescriptor) / sizeof(uint64_t); ++i) {
    if (words[i] != 0) return;
  }
  fail("moelora: ", "grouped_gemm: the driver refused the tensor map of the ", operand, " (P_max ",
       params.max_rows, ", N ", params.out_features, ", K ", params.in_features, ", E_loc ",
       params.num_local_experts, ", weight strides ", params.weight.expert_stride, " and ",
       params.weight.row_stride, ")");
}

template <GemmArch kArch, DType kDType, int kConfig>
void run_grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream, int32_t num_sms) {
  using Gemm = GroupedGemm<kArch, kDType, kConfig>;
  using Kernel = typename Gemm::Kernel;
  using Element = typename Gemm::Element;
  constexpr GroupedGemmConfig kTiles = Gemm::kTiles;
  constexpr int kTokenTile = kTiles.token_tile;
  const int64_t in = params.in_features, out = params.out_features;
  const int64_t num_feature_tiles = (out + kTiles.feature_tile - 1) / kTiles.feature_tile;

  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kBatched;
  arguments.problem_shape = cute::make_shape(
      static_cast<int32_t>(out), int32_t{kTokenTile}, static_cast<int32_t>(in),
      cute::make_shape(params.num_local_experts, RowWindow<kTokenTile>::bound(params.max_rows)));
  arguments.mainloop.ptr_A = static_cast<const Element*>(params.weight.ptr);
  // The stride of a dim of size 1 may be anything; the tensor map wants a sound one.
  const int64_t expert_stride =
      params.num_local_experts > 1 ? params.weight.expert_stride : out * params.weight.row_stride;
  arguments.mainloop.dA = cute::make_stride(params.weight.row_stride, cute::_1{},
                                            cute::make_stride(expert_stride, cute::_0{}));
  arguments.mainloop.ptr_B = static_cast<const Element*>(params.rows_ptr) - kTokenTile * in;
  arguments.mainloop.dB = cute::make_stride(in, cute::_1{}, cute::make_stride(cute::_0{}, in));
  arguments.epilogue.ptr_D = static_cast<Element*>(params.out_ptr) - kTokenTile * out;
  arguments.epilogue.dD = cute::make_stride(cute::_1{}, out, cute::make_stride(cute::_0{}, out));
  arguments.epilogue.thread = {
      {static_cast<const Element*>(params.bias_ptr), Element(0),
       cute::make_stride(cute::_1{}, cute::_0{}, cute::make_stride(out, cute::_0{}))},
      {},
      {}};
  arguments.hw_info.sm_count = num_sms;
  arguments.scheduler = {params.expert_offsets_ptr,
                         params.maps.tile_row_limit_ptr,
                         params.num_local_experts,
                         params.maps.tile_rows,
                         static_cast<int32_t>(num_feature_tiles),
                         Kernel::SharedStorageSize};
  const typename Kernel::Params kernel_params =
      Kernel::to_underlying_arguments(arguments, /*workspace=*/nullptr);
  check_tensor_map(kernel_params.mainloop.tma_load_a, "weights", params);
  check_tensor_map(kernel_params.mainloop.tma_load_b, "rows", params);
  check_tensor_map(kernel_params.epilogue.tma_store_d, "output", params);

  // Padded to tile_rows, experts have at most this many token tiles together.
  const int64_t max_token_tiles = params.max_rows / std::min(params.maps.tile_rows, kTokenTile);
  const int64_t num_clusters =
      std::min<int64_t>(max_token_tiles * num_feature_tiles, num_sms / kTiles.cluster);

  static_assert(Kernel::SharedStorageSize + kTokenTileOffsetsBytes <= kMaxSharedBytes);
  static_assert(Kernel::SharedStorageSize % sizeof(int32_t) == 0);
  const size_t shared_bytes = Kernel::SharedStorageSize + kTokenTileOffsetsBytes;
  auto* kernel = grouped_gemm_kernel<Kernel, kTokenTile>;
  allow_shared_bytes(kTiles.name, kernel, shared_bytes);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(kTiles.cluster), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(num_clusters) * kTiles.cluster);
  launch.blockDim = dim3(Kernel::MaxThreadsPerBlock);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&launch, kernel, kernel_params), kTiles.name);
}

}  // namespace moelora

// Row windows: how a tile reads and writes exactly the rows of one expert with tensor maps that are
// built once, on the host, for the whole row matrix.
//
// A matrix of `num_rows` rows is described to TMA as {features, kTile, rows}: dim 1 and dim 2 both
// step by one row, so that element (c, u, v) is column c of row u + v - kTile. A tile whose `count`
// rows start at `first` has v = first + count and u = kTile - count + j for its row j: rows from
// `count` on have u >= kTile, which TMA takes for out of bounds, reading zeros and writing nothing.
// So every expert ends where its last real row ends, at no cost.
//
// The base address lies kTile rows before the matrix; no element that is in bounds does.
#pragma once

#include "cute/tensor.hpp"

namespace moelora {

// (v, u0) of a tile in one int32. CUTLASS hands it around as the second batch coordinate of a tile,
// the first being its expert.
template <int kTile>
struct RowWindow {
  CUTE_HOST_DEVICE static int32_t pack(int32_t first, int32_t count) {
    return (first + count) * kTile + (kTile - count);
  }
  CUTE_HOST_DEVICE static int32_t v(int32_t packed) { return packed / kTile; }
  CUTE_HOST_DEVICE static int32_t u0(int32_t packed) { return packed % kTile; }
  // A bound for all packed values, and so for v.
  static int32_t bound(int64_t num_rows) { return static_cast<int32_t>((num_rows + 2) * kTile); }
};

// Moves a coordinate tensor of TMA from window 0 to `packed`'s.
template <int kTile, class CoordTensor>
CUTE_DEVICE auto at_row_window(const CoordTensor& coords, int32_t packed) {
  using Window = RowWindow<kTile>;
  const auto offset =
      cute::make_arithmetic_tuple(cute::_0{}, Window::u0(packed), Window::v(packed));
  return cute::make_tensor(coords.data() + offset, coords.layout());
}

// TMA store whose third coordinate is a packed window.
template <int kTile>
struct TmaStoreRows {
  CUTE_HOST_DEVICE static void copy(const void* tensor_map, const void* shared, int32_t column,
                                    int32_t row_in_tile, int32_t packed) {
    using Window = RowWindow<kTile>;
    cute::SM90_TMA_STORE_3D::copy(tensor_map, shared, column, row_in_tile + Window::u0(packed),
                                  Window::v(packed));
  }
};

// Replaces SM90_TMA_STORE by `Store` among the template arguments of a collective epilogue.
template <class Epilogue, class Store>
struct ReplaceTmaStore;

template <template <class...> class Epilogue, class... Args, class Store>
struct ReplaceTmaStore<Epilogue<Args...>, Store> {
  using type =
      Epilogue<cute::conditional_t<cute::is_same_v<Args, cute::SM90_TMA_STORE>, Store, Args>...>;
};

// Mainloops that load the B operand from the window that the tile's batch coordinate names.
template <class Base, int kTile>
struct Sm90RowsMainloop : Base {
  template <class TensorA, class TensorB, class BlockCoord, class... Rest>
  CUTE_DEVICE void load(const typename Base::Params& params,
                        typename Base::MainloopPipeline pipeline,
                        typename Base::PipelineState state,
                        const cute::tuple<TensorA, TensorB>& inputs, const BlockCoord& block,
                        Rest&&... rest) {
    const auto [m, n, k, batch] = block;
    const auto [expert, packed] = batch;
    Base::load(
        params, pipeline, state,
        cute::make_tuple(cute::get<0>(inputs), at_row_window<kTile>(cute::get<1>(inputs), packed)),
        cute::make_coord(m, n, k, cute::make_coord(expert, 0)), static_cast<Rest&&>(rest)...);
  }
};

template <class Base, int kTile>
struct Sm100RowsMainloop : Base {
  using Base::Base;

  template <class LoadParams, class BlockCoord, class KTileIterator>
  CUTE_DEVICE auto load(typename Base::MainloopPipeline pipeline,
                        typename Base::MainloopPipelineState state, const LoadParams& inputs,
                        const BlockCoord& block, KTileIterator k_tile, int k_tile_count) {
    const auto [m, n, k, batch] = block;
    const auto [expert, packed] = batch;
    const auto [k_tiles, weights, rows, shared_weights, shared_rows, mask_a, mask_b] = inputs;
    return Base::load(pipeline, state,
                      cute::make_tuple(k_tiles, weights, at_row_window<kTile>(rows, packed),
                                       shared_weights, shared_rows, mask_a, mask_b),
                      cute::make_coord(m, n, k, cute::make_coord(expert, 0)), k_tile, k_tile_count);
  }
};

}  // namespace moelora

template <int kTile, class NumBitsPerTMA, class AuxParams>
struct cute::Copy_Traits<moelora::TmaStoreRows<kTile>, NumBitsPerTMA, AuxParams>
    : cute::Copy_Traits<cute::SM90_TMA_STORE, NumBitsPerTMA, AuxParams> {
  template <class SrcEngine, class SrcLayout, class DstEngine, class DstLayout>
  CUTE_HOST_DEVICE friend constexpr void copy_unpack(const Copy_Traits& traits,
                                                     const Tensor<SrcEngine, SrcLayout>& src,
                                                     Tensor<DstEngine, DstLayout>& dst) {
    const auto coord = dst.data().coord_;
    moelora::TmaStoreRows<kTile>::copy(traits.get_tma_descriptor(), raw_pointer_cast(src.data()),
                                       get<0>(coord), get<1>(coord), get<2>(coord));
  }
};

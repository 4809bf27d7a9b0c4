#include "../common/tensor_map.h"
#include "prefill_maps.h"

namespace moelora::fused_prefill {

CUtensorMap gate_up_weight_map(const WeightOperand& w13, GateUpLayout layout, int64_t experts,
                               int64_t intermediate, int64_t hidden, int32_t box_rows,
                               bool evict_first) {
  const bool interleaved = layout == GateUpLayout::kInterleaved;
  const int64_t row = w13.row_stride;
  const MapDim dims[] = {{hidden, 1, kBlockColumns},
                         {8, interleaved ? 2 * row : row, 8},
                         {2, interleaved ? row : intermediate * row, 2},
                         {intermediate / 8, interleaved ? 16 * row : 8 * row, box_rows / 16},
                         {experts, w13.expert_stride, 1}};
  return encode_tensor_map(w13.ptr, w13.dtype, 128, evict_first, dims);
}

CUtensorMap down_weight_map(const WeightOperand& w2, int64_t experts, int64_t hidden,
                            int64_t intermediate, int32_t box_rows, bool evict_first) {
  const MapDim dims[] = {{intermediate, 1, kBlockColumns},
                         {hidden, w2.row_stride, box_rows},
                         {experts, w2.expert_stride, 1}};
  return encode_tensor_map(w2.ptr, w2.dtype, 128, evict_first, dims);
}

RowMaps64And16 row_maps(const void* ptr, DType dtype, int64_t rows, int64_t columns,
                        int box_columns) {
  const auto map = [&](int box_rows) {
    const MapDim dims[] = {{columns, 1, box_columns}, {rows, columns, box_rows}};
    return encode_tensor_map(ptr, dtype, 2 * box_columns, /*evict_first=*/false, dims);
  };
  return {map(64), map(16)};
}

}  // namespace moelora::fused_prefill

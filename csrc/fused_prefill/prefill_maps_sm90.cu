#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "../common/launch.h"
#include "prefill_maps.h"

namespace moelora::fused_prefill {
namespace {

// The driver's encoder, found at run time: nothing links against libcuda.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
      fail("moelora: ", "this CUDA driver has no cuTensorMapEncodeTiled (12.0 or newer is needed)");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// One dim of a map: its length, its stride in elements (of the first dim: 1), the box's length.
struct MapDim {
  int64_t size, stride;
  uint32_t box;
};

template <int kDims>
CUtensorMap encode_map(const void* ptr, DType dtype, const MapDim (&dims)[kDims],
                       CUtensorMapSwizzle swizzle) {
  cuuint64_t sizes[kDims], strides[kDims - 1];
  cuuint32_t box[kDims], steps[kDims];
  for (int i = 0; i < kDims; ++i) {
    sizes[i] = static_cast<cuuint64_t>(dims[i].size);
    box[i] = dims[i].box;
    steps[i] = 1;
    // The stride of a dim of size 1 is never used, and may be anything.
    if (i > 0) strides[i - 1] = dims[i].size == 1 ? 16 : 2 * dims[i].stride;
  }
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map,
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      kDims, const_cast<void*>(ptr), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail("moelora: cuTensorMapEncodeTiled failed with CUresult ", static_cast<int>(result), " for ",
         kDims, " dims, the first of ", dims[0].size);
  }
  return map;
}

}  // namespace

CUtensorMap gate_up_weight_map(const WeightOperand& w13, GateUpLayout layout, int64_t experts,
                               int64_t intermediate, int64_t hidden, int32_t box_rows) {
  const bool interleaved = layout == GateUpLayout::kInterleaved;
  const int64_t row = w13.row_stride;
  const MapDim dims[] = {{hidden, 1, kBlockColumns},
                         {8, interleaved ? 2 * row : row, 8},
                         {2, interleaved ? row : intermediate * row, 2},
                         {intermediate / 8, interleaved ? 16 * row : 8 * row, box_rows / 16u},
                         {experts, w13.expert_stride, 1}};
  return encode_map(w13.ptr, w13.dtype, dims, CU_TENSOR_MAP_SWIZZLE_128B);
}

CUtensorMap down_weight_map(const WeightOperand& w2, int64_t experts, int64_t hidden,
                            int64_t intermediate, int32_t box_rows) {
  const MapDim dims[] = {{intermediate, 1, kBlockColumns},
                         {hidden, w2.row_stride, static_cast<uint32_t>(box_rows)},
                         {experts, w2.expert_stride, 1}};
  return encode_map(w2.ptr, w2.dtype, dims, CU_TENSOR_MAP_SWIZZLE_128B);
}

RowMaps64And16 row_maps(const void* ptr, DType dtype, int64_t rows, int64_t columns,
                        int box_columns) {
  const auto swizzle = box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const auto map = [&](uint32_t box_rows) {
    const MapDim dims[] = {{columns, 1, static_cast<uint32_t>(box_columns)},
                           {rows, columns, box_rows}};
    return encode_map(ptr, dtype, dims, swizzle);
  };
  return {map(64), map(16)};
}

}  // namespace moelora::fused_prefill

// Tensor maps, made on the host at each launch: how a tensor lies in memory, as TMA reads and
// writes it in boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "launch.h"
#include "types.h"

namespace moelora {

// One dimension: its extent, its stride in elements (the innermost's is 1), and the box's extent.
struct MapDim {
  int64_t extent, stride, box;
};

inline auto tensor_map_encoder() {
  // Through the runtime, so that nothing links libcuda.
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
      fail("moelora: ", "this CUDA driver has no cuTensorMapEncodeTiled (12.0 or newer is needed)");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return encode;
}

// Of 16-bit elements; out-of-bounds ones read as zeros. swizzle_bytes: 64 or 128, the bytes of the
// box's rows. evict_first: meant for loads whose data leave L2 first. Fetching 256 bytes at a time
// for those costs 2 to 5 % of the read bandwidth; fetching 128 for others costs up to 1 %
// (benchmarks/results/decode_tuning.txt, prefill_experiments.txt, ninth session).
template <int kDims>
CUtensorMap encode_tensor_map(const void* ptr, DType dtype, int swizzle_bytes, bool evict_first,
                              const MapDim (&dims)[kDims]) {
  cuuint64_t extents[kDims], strides[kDims];
  cuuint32_t box[kDims], steps[kDims];
  for (int i = 0; i < kDims; i++) {
    extents[i] = static_cast<cuuint64_t>(dims[i].extent);
    box[i] = static_cast<cuuint32_t>(dims[i].box);
    steps[i] = 1;
    // A dimension of one element may come with any stride; the driver wants a valid one.
    const bool single = dims[i].extent == 1;
    if (i > 0) strides[i - 1] = single ? 16 : static_cast<cuuint64_t>(dims[i].stride) * 2;
  }
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(
      &map,
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      kDims, const_cast<void*>(ptr), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
      evict_first ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail("moelora: cuTensorMapEncodeTiled failed with CUresult ", static_cast<int>(result), " for ",
         kDims, " dims, the first of ", dims[0].extent);
  }
  return map;
}

}  // namespace moelora

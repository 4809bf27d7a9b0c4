#pragma once

#include "pack_topk.h"
#include "packed_word.h"

namespace moelora {

// One thread per pair, both ways; no requirement on strides or alignment.
__global__ void pack_topk_kernel(const PackTopkParams params) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pair < params.num_pairs) {
    params.packed_ptr[pair] = packed_word(params.ids(pair), params.weights(pair));
  }
}

__global__ void unpack_topk_kernel(const UnpackTopkParams params) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (pair < params.num_pairs) {
    params.topk_ids_ptr[pair] = params.ids(pair);
    params.topk_weights_ptr[pair] = params.weights(pair);
  }
}

}  // namespace moelora

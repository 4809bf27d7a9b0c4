#include <torch/csrc/stable/ops.h>

#include "pack_topk.h"
#include "packed_word.h"

namespace moelora {
namespace {

constexpr int64_t kPairsPerTask = 16384;

}  // namespace

void pack_topk_cpu(const PackTopkParams& params) {
  torch::stable::parallel_for(0, params.num_pairs, kPairsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      params.packed_ptr[pair] = packed_word(params.ids(pair), params.weights(pair));
    }
  });
}

void unpack_topk_cpu(const UnpackTopkParams& params) {
  torch::stable::parallel_for(0, params.num_pairs, kPairsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      params.topk_ids_ptr[pair] = params.ids(pair);
      params.topk_weights_ptr[pair] = params.weights(pair);
    }
  });
}

}  // namespace moelora

#pragma once

#include "../common/views.h"

namespace moelora {

struct PackTopkParams {
  IdMatrix ids;
  WeightMatrix weights;
  int32_t* packed_ptr;  // [P] contiguous
  int64_t num_pairs;
};

struct UnpackTopkParams {
  IdMatrix ids;  // both views of the packed words: kind kPacked
  WeightMatrix weights;
  float* topk_weights_ptr;  // [P] contiguous
  int32_t* topk_ids_ptr;    // [P] contiguous
  int64_t num_pairs;
};

void pack_topk_cpu(const PackTopkParams& params);
void unpack_topk_cpu(const UnpackTopkParams& params);
void launch_pack_topk(const PackTopkParams& params, void* stream);
void launch_unpack_topk(const UnpackTopkParams& params, void* stream);

}  // namespace moelora

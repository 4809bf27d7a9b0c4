// Which adapter matrix a row uses: the one rule that lora_shrink and lora_expand share, on host and
// device.
#pragma once

#include "views.h"

namespace moelora {

struct MatrixIndex {
  int32_t slot;    // -1: no adapter for this row, its result is 0
  int32_t expert;  // local expert, 0 where one matrix serves all experts
  int32_t rank;    // of the slot, for the part at hand; 1 or more where slot >= 0

  MOELORA_HOST_DEVICE bool exists() const { return slot >= 0; }
};

// The matrix of token `t` where no expert is involved (shared outer A, per token).
template <class Params>
MOELORA_HOST_DEVICE MatrixIndex matrix_of_token(const Params& params, int64_t token) {
  MatrixIndex index{params.slots(token), 0, 0};
  if (index.slot < 0) return index;
  index.rank = params.slots.rank(index.slot, params.part, params.rank);
  if (index.rank == 0) index.slot = -1;
  return index;
}

// The matrix of pair t*K + k: none where the expert is not held here.
template <class Params>
MOELORA_HOST_DEVICE MatrixIndex matrix_of_pair(const Params& params, int64_t pair) {
  // Both reads first, so that neither waits for the other.
  const int32_t id = params.ids(pair);
  MatrixIndex index = matrix_of_token(params, pair / params.top_k);
  // Unsigned, so that one comparison refuses ids below the offset and every negative id.
  const uint32_t expert = static_cast<uint32_t>(id) - static_cast<uint32_t>(params.expert_offset);
  if (expert >= static_cast<uint32_t>(params.num_local_experts)) return {-1, 0, 0};
  index.expert = params.shared_outer ? 0 : static_cast<int32_t>(expert);
  return index;
}

}  // namespace moelora

// What the sort asks about pairs and tokens, on either device.
#pragma once

#include "moe_sort.h"

namespace moelora {

// Local expert of a pair, -1: another process's, or none at all. Ids below zero wrap to above any
// expert, so one comparison tests both sides of the range.
MOELORA_HOST_DEVICE int32_t local_expert(const MoeSortParams& params, int64_t pair) {
  const uint32_t local =
      static_cast<uint32_t>(params.ids(pair)) - static_cast<uint32_t>(params.expert_offset);
  return local < static_cast<uint32_t>(params.num_local_experts) ? static_cast<int32_t>(local) : -1;
}

// Slot of a token as a sort key: tokens without an adapter come last, as L.
MOELORA_HOST_DEVICE int32_t slot_key(const MoeSortParams& params, int64_t token) {
  const int32_t slot = params.slots(token);
  return slot < 0 ? params.slots.num_slots : slot;
}

// Passes the slots need: digits of kSortBits bits. Without adapter ids every token has the same
// slot, and the tokens are in order already.
inline int num_slot_digits(const MoeSortParams& params) {
  if (params.slots.adapter_ids_ptr == nullptr) return 0;
  int digits = 0;
  for (int32_t rest = params.slots.num_slots; rest > 0; rest >>= kSortBits) ++digits;
  return digits;
}

}  // namespace moelora

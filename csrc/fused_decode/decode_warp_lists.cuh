// The lists of a call with at most 32 pairs, by one warp in its registers: no block barriers, no
// scratch. At one token this is a tenth of the layer's time saved.
#pragma once

#include "decode_lists.cuh"

namespace moelora::fused_decode {

// Which lanes have a smaller value than this one, and which the same.
struct LaneOrder {
  uint32_t less, same;
};
// All lanes. Values are below `limit`, or ~0 in as many low bits as `limit` has: the largest.
__device__ __forceinline__ LaneOrder order_lanes(uint32_t value, int limit) {
  LaneOrder order = {0, ~0u};
#pragma unroll 1
  for (int bit = 31 - __clz(limit); bit >= 0; bit--) {
    const bool set = (value >> bit & 1) != 0;
    const uint32_t with_bit = __ballot_sync(~0u, set);
    if (set) order.less |= order.same & ~with_bit;
    order.same &= set ? with_bit : ~with_bit;
  }
  return order;
}

// Lane p < T * top_k has pair p. The rest of the block must not read the lists before a barrier.
// Calls known(totals, expert_of) as soon as the lists are known, before they are written: all lanes
// together, and so must expert_of(item), the expert of that item, be called.
template <int kMaxTokens, bool kDirect, class Known>
__device__ __forceinline__ void build_lists_of_warp(const KernelParams& k, const Lists& lists,
                                                    ListTotals& totals, int lane, Known&& known) {
  static_assert(kDirect || 2 * kMaxTokens >= kMaxWarpPairs, "a list is cut in two at most");
  constexpr uint32_t kAll = ~0u;
  const FusedDecodeParams& p = k.p;
  const int token = k.token_of(lane);

  // Every global read of the lane that needs no other, at once.
  const bool has_pair = lane < k.num_pairs();
  IdMatrix::Element id = {};
  float weight = 1.0f;
  TokenAdapter adapter = {kNoSlot, 0, 0};
  if (has_pair) {
    const int column = lane - token * p.top_k;
    id = p.ids.load(element_index(p.ids, token, column));
    if (kDirect && !p.weight_on_input) weight = matrix_element(p.weights, token, column);
    if (k.has_lora()) adapter = token_adapter(k, token);
  }
  const uint32_t expert = local_expert(p, p.ids.id_of(id));
  bool local = has_pair && expert < static_cast<uint32_t>(p.num_local_experts);
  const LaneOrder by_expert = order_lanes(local ? expert : kAll, p.num_local_experts);
  uint32_t rows[kDirect ? kMaxTokens : 1];  // lanes of each token
  if constexpr (kDirect) {
    // A direct tile has one column a token, so a repeated id counts once, with its weights added
    // up.
    uint32_t same = 0;
#pragma unroll
    for (int t = 0; t < kMaxTokens; t++) {
      rows[t] = __ballot_sync(kAll, token == t);
      if (token == t) same = rows[t] & by_expert.same;
    }
    if (__any_sync(kAll, local && (same & (same - 1)) != 0)) {
      float sum = 0.0f;
#pragma unroll 1
      for (int other = 0; other < 32; other++) {
        const float w = __shfl_sync(kAll, weight, other);
        if (same >> other & 1) sum += w;
      }
      weight = sum;
      local = local && lane == __ffs(same) - 1;
    }
  }

  // Entries by expert, slot (none last), pair; a list over kMaxTokens makes a second item.
  LaneOrder by_slot = {0, kAll};
  if (k.has_lora()) by_slot = order_lanes(adapter.slot, p.slots.num_slots);
  const uint32_t locals = __ballot_sync(kAll, local);
  const uint32_t before = by_expert.less & locals, peers = by_expert.same & locals;
  const int base = __popc(before), count = __popc(peers);
  const int rank = __popc(peers & (by_slot.less | (by_slot.same & ((1u << lane) - 1))));
  const int piece = rank >= kMaxTokens, start = base + piece * kMaxTokens, at = base + rank;
  const bool begins_item = local && at == start;
  const uint32_t items = __ballot_sync(kAll, begins_item);
  const int item = __popc(items & before) + piece;
  ListTotals sums = {};
  sums.items = __popc(items);
  // Segments in the order of places: bit n of `begins` says that one begins at place n.
  uint32_t group = 0, begins = 0;
  bool begins_segment = false;
  if (k.has_lora()) {
    const uint32_t second_pieces = __ballot_sync(kAll, piece);
    group = peers & by_slot.same & (piece ? second_pieces : ~second_pieces);
    begins_segment = local && adapter.slot != kNoSlot && lane == __ffs(group) - 1;
    begins = __reduce_or_sync(kAll, begins_segment ? 1u << at : 0u);
    sums.segments = __popc(begins);
    sums.gate_up_rank = __reduce_max_sync(kAll, begins_segment ? adapter.gate_up_rank : 0);
    sums.down_rank = __reduce_max_sync(kAll, begins_segment ? adapter.down_rank : 0);
  }
  known(sums, [&](int index) {
    const uint32_t lanes = __ballot_sync(kAll, begins_item && item == index);
    return static_cast<int>(__shfl_sync(kAll, expert, __ffs(lanes) - 1));
  });

  if (lane == 0) totals = sums;
  if (local) lists.entries[at] = adapter.slot << 16 | static_cast<uint32_t>(lane);
  if (begins_item) {
    lists.items[item] = pack_item(start, min(kMaxTokens, count - piece * kMaxTokens), expert);
  }
  if (k.has_lora()) {
    const int segment = __popc(begins & ((1u << at) - 1));
    if (begins_item) lists.first_segments[item] = static_cast<uint16_t>(segment);
    if (begins_segment) {
      lists.segments[segment] =
          make_segment(item, adapter.slot, at - start, __popc(group),
                       static_cast<uint32_t>(adapter.gate_up_rank | adapter.down_rank << 8));
    }
    if (lane == 0) lists.first_segments[sums.items] = static_cast<uint16_t>(sums.segments);
  }
  if constexpr (kDirect) {
    if (begins_item) {
      DirectItem& direct = lists.direct_items[item];
      direct.token_mask = 0;
      for (int t = 0; t < kMaxTokens; t++) {
        direct.weights[t] = 0.0f;
        if ((rows[t] & peers) != 0) direct.token_mask |= 1u << t;
      }
    }
    __syncwarp();
    if (local) lists.direct_items[item].weights[token] = weight;
  }
}

}  // namespace moelora::fused_decode

// The lists of a call with at most 32 pairs, by one warp in its registers: no block barriers, no
// scratch. At one token this is a tenth of the layer's time saved.
#pragma once

#include "decode_lists.cuh"

namespace moelora::fused_decode {

// Lane p < T * top_k has pair p. The rest of the block must not read the lists before a barrier.
template <int kMaxTokens, bool kDirect>
__device__ void build_lists_of_warp(const FusedDecodeParams& p, const Lists& lists,
                                    int gate_up_rank, int down_rank, ListTotals& totals, int lane) {
  static_assert(kDirect || 2 * kMaxTokens >= kMaxWarpPairs, "a list is cut in two at most");
  constexpr uint32_t kAll = ~0u, kNoExpert = ~0u;
  const bool has_lora = gate_up_rank + down_rank > 0;
  const int token = lane / p.top_k, num_pairs = static_cast<int>(p.num_tokens) * p.top_k;
  const bool has_pair = lane < num_pairs;

  // Every global read of the lane that needs no other, at once.
  uint32_t expert = kNoExpert, slot = kNoSlot;
  float weight = 1.0f;
  int gate_up = 0, down = 0;  // ranks
  if (has_pair) {
    const uint32_t local = local_expert(p, token, lane % p.top_k);
    if (kDirect && !p.weight_on_input) weight = matrix_element(p.weights, token, lane % p.top_k);
    const int used = has_lora ? p.slots(token) : -1;
    if (local < static_cast<uint32_t>(p.num_local_experts)) expert = local;
    if (used >= 0) {
      gate_up = p.slots.rank(used, LoraPart::kGateUp, gate_up_rank);
      down = p.slots.rank(used, LoraPart::kDown, down_rank);
      if (gate_up + down > 0) slot = static_cast<uint32_t>(used);
    }
  }
  if constexpr (kDirect) {
    // A direct tile has one column a token, so a repeated id counts once, with its weights added
    // up.
    uint32_t same = 0;
    const uint32_t name = expert << 6 | static_cast<uint32_t>(token);
    for (int other = 0; other < num_pairs; other++) {
      same |= static_cast<uint32_t>(__shfl_sync(kAll, name, other) == name) << other;
    }
    const bool repeats = expert != kNoExpert && (same & (same - 1)) != 0;
    if (__any_sync(kAll, repeats)) {
      float sum = 0.0f;
      for (int other = 0; other < num_pairs; other++) {
        const float w = __shfl_sync(kAll, weight, other);
        if (same >> other & 1) sum += w;
      }
      weight = sum;
      if (lane != __ffs(same) - 1) expert = kNoExpert;
    }
  }

  // Experts come in the order of their first pair. A pair's place: those of earlier experts, then
  // those of its expert with a smaller slot (none last), then earlier ones.
  // Loops of shuffles: with up to 32 groups, match_any takes longer.
  uint32_t peers = 0;
  for (int other = 0; other < num_pairs; other++) {
    peers |= static_cast<uint32_t>(__shfl_sync(kAll, expert, other) == expert) << other;
  }
  const bool local = expert != kNoExpert;
  const int first = (__ffs(peers) - 1) & 31, count = __popc(peers);
  const uint32_t key = local ? static_cast<uint32_t>(first) << 21 | slot << 5 | lane : ~0u;
  int base = 0, at = 0;
  for (int other = 0; other < num_pairs; other++) {
    const uint32_t its = __shfl_sync(kAll, key, other);
    base += its >> 21 < static_cast<uint32_t>(first);
    at += its < key;
  }
  const uint32_t earlier_experts = (1u << first) - 1;
  const uint32_t leaders = __ballot_sync(kAll, local && lane == first);
  const uint32_t cut = __ballot_sync(kAll, local && lane == first && count > kMaxTokens);
  const int piece = at - base >= kMaxTokens, start = base + piece * kMaxTokens;
  const int item = __popc(leaders & earlier_experts) + __popc(cut & earlier_experts) + piece;
  const bool begins_item = local && at == start;
  if (local) lists.entries[at] = slot << 16 | static_cast<uint32_t>(lane);
  if (begins_item) {
    lists.items[item] = pack_item(start, min(kMaxTokens, count - piece * kMaxTokens), expert);
  }

  // Segments in the order of places: bit n of `begins` says that one begins at place n.
  const uint32_t run = local && slot != kNoSlot ? static_cast<uint32_t>(item) << 16 | slot : ~0u;
  uint32_t group = 0;
  if (has_lora) {
    for (int other = 0; other < num_pairs; other++) {
      group |= static_cast<uint32_t>(__shfl_sync(kAll, run, other) == run) << other;
    }
  }
  const bool begins_segment = run != ~0u && lane == __ffs(group) - 1;
  const int num_items = __popc(leaders) + __popc(cut);
  if (has_lora) {
    const uint32_t begins = __reduce_or_sync(kAll, begins_segment ? 1u << at : 0u);
    if (begins_item) {
      lists.first_segments[item] = static_cast<uint16_t>(__popc(begins & ((1u << at) - 1)));
    }
    if (begins_segment) {
      Segment& segment = lists.segments[__popc(begins & ((1u << at) - 1))];
      segment.item = static_cast<uint16_t>(item);
      segment.slot = static_cast<uint16_t>(slot);
      segment.begin = static_cast<uint8_t>(at - start);
      segment.count = static_cast<uint8_t>(__popc(group));
      segment.gate_up_rank = static_cast<uint8_t>(gate_up);
      segment.down_rank = static_cast<uint8_t>(down);
    }
    if (!begins_segment) gate_up = down = 0;
    const int gate_up_most = __reduce_max_sync(kAll, gate_up);
    const int down_most = __reduce_max_sync(kAll, down);
    if (lane == 0) {
      lists.first_segments[num_items] = static_cast<uint16_t>(__popc(begins));
      totals.segments = __popc(begins);
      totals.gate_up_rank = gate_up_most, totals.down_rank = down_most;
    }
  }
  if (lane == 0) totals.items = num_items;
  if constexpr (kDirect) {
    uint32_t tokens = 0;
#pragma unroll
    for (int t = 0; t < kMaxTokens; t++) {
      if ((__ballot_sync(kAll, local && token == t) & peers) != 0) tokens |= 1u << t;
    }
    if (begins_item) {
      DirectItem& direct = lists.direct_items[item];
      for (int t = 0; t < kMaxTokens; t++) direct.weights[t] = 0.0f;
      direct.token_mask = tokens;
    }
    __syncwarp();
    if (local) lists.direct_items[item].weights[token] = weight;
  }
}

}  // namespace moelora::fused_decode

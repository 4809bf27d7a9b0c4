// The prologue: every block builds, in its own shared memory and from the ids alone, the lists of
// pairs by expert, the items and the adapter segments. All blocks come to the same lists, so tiles
// can be handed out by number.
#pragma once

#include "../common/ptx.cuh"
#include "decode_layout.h"

namespace moelora::fused_decode {

constexpr uint32_t kNoSlot = 0xffff;

// At most max_tokens pairs of one expert: entries start .. start + count.
struct Item {
  int start, count, expert;
};
__device__ __forceinline__ uint32_t pack_item(int start, int count, int expert) {
  return static_cast<uint32_t>(start) | static_cast<uint32_t>(count) << 11 |
         static_cast<uint32_t>(expert) << 17;
}
__device__ __forceinline__ Item unpack_item(uint32_t word) {
  return {static_cast<int>(word & 0x7ff), static_cast<int>(word >> 11 & 0x3f),
          static_cast<int>(word >> 17)};
}
// Entries are slot << 16 | pair: sorting them sorts by slot, none last, then by pair.
__device__ __forceinline__ int pair_of(uint32_t entry) { return static_cast<int>(entry & 0xffff); }
__device__ __forceinline__ uint32_t slot_of(uint32_t entry) { return entry >> 16; }

// Element (row, column) of an id or weight matrix. By its expanded index it would cost a 64-bit
// division.
template <class Matrix>
__device__ __forceinline__ auto matrix_element(Matrix matrix, int row, int column) {
  const int64_t at = row * matrix.row_stride + column * matrix.col_stride;
  matrix.num_cols = 1;
  matrix.row_stride = 1;
  return matrix(at);
}
// Local expert of an id, or a value that is not below num_local_experts: ids below the offset and
// negative ones wrap to large values.
__device__ __forceinline__ uint32_t local_expert(const FusedDecodeParams& p, int row, int column) {
  return static_cast<uint32_t>(matrix_element(p.ids, row, column)) -
         static_cast<uint32_t>(p.expert_offset);
}

// Rank rows that one shrink tile covers, and the tiles of a rank.
__device__ __forceinline__ int shrink_ranks(const FusedDecodeParams& p, bool gate_up) {
  return gate_up ? kShrinkRows / p.gate_up_a_components : kShrinkRows;
}
__device__ __forceinline__ int shrink_tiles(const FusedDecodeParams& p, int rank, bool gate_up) {
  return (rank + shrink_ranks(p, gate_up) - 1) / shrink_ranks(p, gate_up);
}

struct Lists {
  uint32_t* entries;         // [local pairs] by expert
  uint32_t* items;           // packed
  uint16_t* first_segments;  // [items + 1], where there are adapters
  Segment* segments;
  DirectItem* direct_items;  // [items], where down tiles are direct
};
struct Scratch {
  int *counts, *bases;    // [experts rounded up to 128]
  uint32_t* keys;         // [P] unsorted entries
  uint16_t* experts;      // [P] the expert of each key
  uint16_t* token_slots;  // [T]
  uint16_t* token_ranks;  // [T] gate_up and down rank of the token's slot, a byte each
};
__device__ __forceinline__ Scratch carve_scratch(uint8_t* base, int pairs, int experts) {
  Scratch s;
  const int padded = (experts + 127) / 128 * 128;
  s.counts = reinterpret_cast<int*>(base);
  s.bases = s.counts + padded;
  s.keys = reinterpret_cast<uint32_t*>(s.bases + padded);
  s.experts = reinterpret_cast<uint16_t*>(s.keys + pairs);
  s.token_slots = s.experts + pairs;
  s.token_ranks = s.token_slots + pairs;
  return s;
}

__device__ __forceinline__ int warp_inclusive_sum(int value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// One warp: first places of the experts' lists, and the items. Returns the number of items.
template <int kMaxTokens>
__device__ __forceinline__ int place_experts(const Scratch& s, uint32_t* items, int experts,
                                             int lane) {
  int pairs_before = 0, items_before = 0;
  for (int first = 0; first < experts; first += 128) {
    const int4 counts = reinterpret_cast<const int4*>(s.counts + first)[lane];
    const int count[4] = {counts.x, counts.y, counts.z, counts.w};
    int pairs = 0, pieces = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      pairs += count[j];
      pieces += (count[j] + kMaxTokens - 1) / kMaxTokens;
    }
    const int pairs_through = warp_inclusive_sum(pairs, lane);
    const int pieces_through = warp_inclusive_sum(pieces, lane);
    int base = pairs_before + pairs_through - pairs;
    int item = items_before + pieces_through - pieces;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int expert = first + lane * 4 + j;
      s.bases[expert] = base;
      for (int at = 0; at < count[j]; at += kMaxTokens) {
        items[item++] = pack_item(base + at, min(kMaxTokens, count[j] - at), expert);
      }
      base += count[j];
    }
    pairs_before += __shfl_sync(~0u, pairs_through, 31);
    items_before += __shfl_sync(~0u, pieces_through, 31);
  }
  return items_before;
}

// Calls visit(begin, end) for each run of equal slots of an item, runs without a slot left
// out.
template <class Visit>
__device__ __forceinline__ void for_each_run(const uint32_t* entries, const Item& item,
                                             Visit&& visit) {
  int begin = 0;
  uint32_t slot = slot_of(entries[item.start]);
  if (slot == slot_of(entries[item.start + item.count - 1])) begin = item.count - 1;
  int first = 0;
  for (int i = begin + 1; i <= item.count; i++) {
    const uint32_t next = i < item.count ? slot_of(entries[item.start + i]) : kNoSlot + 1;
    if (next == slot) continue;
    if (slot != kNoSlot) visit(first, i);
    slot = next;
    first = i;
  }
}

// Numbers that all threads of a block need of the lists, in shared memory, zeroed before.
struct ListTotals {
  int segments;
  int gate_up_rank, down_rank;  // the largest of the slots present
  int items;
};

// Segments of all items, whose entries are sorted. `mixed`: the tokens have more than one slot.
__device__ __forceinline__ void build_segments(const FusedDecodeParams& p, const Lists& lists,
                                               const Scratch& s, bool mixed, int num_items,
                                               ListTotals& totals, int tid) {
  const auto make_segment = [&](int item, const uint32_t* entries, int begin, int end) {
    const int ranks = s.token_ranks[pair_of(entries[begin]) / p.top_k];
    Segment segment;
    segment.item = static_cast<uint16_t>(item);
    segment.slot = static_cast<uint16_t>(slot_of(entries[begin]));
    segment.begin = static_cast<uint8_t>(begin);
    segment.count = static_cast<uint8_t>(end - begin);
    segment.gate_up_rank = static_cast<uint8_t>(ranks & 0xff);
    segment.down_rank = static_cast<uint8_t>(ranks >> 8);
    return segment;
  };
  if (!mixed) {
    // One segment an item, or none at all.
    if (s.token_slots[0] == kNoSlot) return;
    for (int i = tid; i < num_items; i += kThreads) {
      const Item item = unpack_item(lists.items[i]);
      lists.segments[i] = make_segment(i, lists.entries + item.start, 0, item.count);
      lists.first_segments[i] = static_cast<uint16_t>(i);
    }
    if (tid == 0) {
      lists.first_segments[num_items] = static_cast<uint16_t>(num_items);
      totals.segments = num_items;
      totals.gate_up_rank = s.token_ranks[0] & 0xff;
      totals.down_rank = s.token_ranks[0] >> 8;
    }
    return;
  }
  for (int i = tid; i < num_items; i += kThreads) {
    int runs = 0;
    for_each_run(lists.entries, unpack_item(lists.items[i]), [&](int, int) { runs++; });
    lists.first_segments[i] = static_cast<uint16_t>(runs);
  }
  __syncthreads();
  if (tid < 32) {
    int before = 0;
    for (int first = 0; first < num_items; first += 32) {
      const int i = first + tid;
      const int runs = i < num_items ? lists.first_segments[i] : 0;
      const int through = warp_inclusive_sum(runs, tid);
      if (i < num_items) lists.first_segments[i] = static_cast<uint16_t>(before + through - runs);
      before += __shfl_sync(~0u, through, 31);
    }
    if (tid == 0) {
      lists.first_segments[num_items] = static_cast<uint16_t>(before);
      totals.segments = before;
    }
  }
  __syncthreads();
  for (int i = tid; i < num_items; i += kThreads) {
    const Item item = unpack_item(lists.items[i]);
    int at = lists.first_segments[i];
    for_each_run(lists.entries, item, [&](int begin, int end) {
      const Segment segment = make_segment(i, lists.entries + item.start, begin, end);
      lists.segments[at++] = segment;
      atomicMax(&totals.gate_up_rank, int{segment.gate_up_rank});
      atomicMax(&totals.down_rank, int{segment.down_rank});
    });
  }
}

// All threads of the block. gate_up_rank and down_rank: R1 and R2, 0 for an absent part. A block
// barrier must follow before the lists and their totals are read.
template <int kMaxTokens>
__device__ void build_lists(const FusedDecodeParams& p, const Lists& lists, uint8_t* scratch,
                            int gate_up_rank, int down_rank, ListTotals& totals, int tid) {
  constexpr int kRounds = (kMaxPairs + kThreads - 1) / kThreads;
  const int num_pairs = static_cast<int>(p.num_tokens) * p.top_k;
  const int num_tokens = static_cast<int>(p.num_tokens);
  const bool has_lora = gate_up_rank + down_rank > 0;
  const Scratch s = carve_scratch(scratch, num_pairs, p.num_local_experts);

  // Count pairs by expert; the order inside a list is settled below, where it matters.
  int expert[kRounds], place[kRounds];
#pragma unroll
  for (int q = 0; q < kRounds; q++) {
    const int pair = tid + q * kThreads;
    expert[q] = -1;
    if (pair < num_pairs) {
      const int row = pair / p.top_k;
      const uint32_t local = local_expert(p, row, pair - row * p.top_k);
      if (local < static_cast<uint32_t>(p.num_local_experts)) expert[q] = static_cast<int>(local);
    }
  }
  if (has_lora) {
    // From the last warp on, beside the first warps' ids: two latencies at once.
    for (int t = kThreads - 1 - tid; t < num_tokens; t += kThreads) {
      const int slot = p.slots(t);
      int ranks = 0;
      if (slot >= 0) {
        ranks = p.slots.rank(slot, LoraPart::kGateUp, gate_up_rank) |
                p.slots.rank(slot, LoraPart::kDown, down_rank) << 8;
      }
      s.token_slots[t] = static_cast<uint16_t>(ranks == 0 ? kNoSlot : slot);
      s.token_ranks[t] = static_cast<uint16_t>(ranks);
    }
  }
#pragma unroll
  for (int q = 0; q < kRounds; q++) {
    if (expert[q] >= 0) place[q] = atomicAdd(s.counts + expert[q], 1);
  }
  __syncthreads();

  // All blocks must agree on which pairs the items of a cut list hold, and segments need their
  // slots together: such lists are sorted.
  bool mixes = false, cuts = false;
  if (has_lora) {
    for (int t = tid; t < num_tokens; t += kThreads) {
      mixes |= s.token_slots[t] != s.token_slots[0];
    }
  }
  for (int e = tid; e < p.num_local_experts; e += kThreads) cuts |= s.counts[e] > kMaxTokens;
  if (tid < 32) {
    const int items = place_experts<kMaxTokens>(s, lists.items, p.num_local_experts, tid);
    if (tid == 0) totals.items = items;
  }
  const bool mixed = __syncthreads_or(mixes);
  const bool sorts = __syncthreads_or(mixes || cuts);
  uint32_t* keys = sorts ? s.keys : lists.entries;
#pragma unroll
  for (int q = 0; q < kRounds; q++) {
    if (expert[q] < 0) continue;
    const int pair = tid + q * kThreads;
    const uint32_t slot = has_lora ? s.token_slots[pair / p.top_k] : kNoSlot;
    const int at = s.bases[expert[q]] + place[q];
    keys[at] = slot << 16 | static_cast<uint32_t>(pair);
    if (sorts) s.experts[at] = static_cast<uint16_t>(expert[q]);
  }
  __syncthreads();
  const int num_items = totals.items;
  if (sorts && num_items > 0) {
    const Item last = unpack_item(lists.items[num_items - 1]);
    for (int at = tid; at < last.start + last.count; at += kThreads) {
      const int e = s.experts[at], base = s.bases[e], count = s.counts[e];
      const uint32_t key = s.keys[at];
      int rank = at - base;
      if (mixed || count > kMaxTokens) {
        rank = 0;
        for (int i = 0; i < count; i++) rank += s.keys[base + i] < key;
      }
      lists.entries[base + rank] = key;
    }
    __syncthreads();
  }
  if (has_lora) build_segments(p, lists, s, mixed, num_items, totals, tid);
}

}  // namespace moelora::fused_decode

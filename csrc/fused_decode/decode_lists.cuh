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
static_assert(kMaxPairs <= 1 << 12 && kMaxExperts <= 1 << 14, "an item fits a word");
__device__ __forceinline__ uint32_t pack_item(int start, int count, int expert) {
  return static_cast<uint32_t>(start) | static_cast<uint32_t>(count) << 12 |
         static_cast<uint32_t>(expert) << 18;
}
__device__ __forceinline__ Item unpack_item(uint32_t word) {
  return {static_cast<int>(word & 0xfff), static_cast<int>(word >> 12 & 0x3f),
          static_cast<int>(word >> 18)};
}
// Entries are slot << 16 | pair: sorting them sorts by slot, none last, then by pair.
__device__ __forceinline__ int pair_of(uint32_t entry) { return static_cast<int>(entry & 0xffff); }
__device__ __forceinline__ uint32_t slot_of(uint32_t entry) { return entry >> 16; }

// Element (row, column) of an id or weight matrix. By its expanded index it would cost a 64-bit
// division.
template <class Matrix>
__device__ __forceinline__ int64_t element_index(const Matrix& matrix, int row, int column) {
  return row * matrix.row_stride + column * matrix.col_stride;
}
template <class Matrix>
__device__ __forceinline__ auto matrix_element(Matrix matrix, int row, int column) {
  const int64_t at = element_index(matrix, row, column);
  matrix.num_cols = 1;
  matrix.row_stride = 1;
  return matrix(at);
}
// Local expert of an id, or a value that is not below num_local_experts: ids below the offset and
// negative ones wrap to large values.
__device__ __forceinline__ uint32_t local_expert(const FusedDecodeParams& p, int id) {
  return static_cast<uint32_t>(id) - static_cast<uint32_t>(p.expert_offset);
}
__device__ __forceinline__ uint32_t local_expert(const FusedDecodeParams& p, int row, int column) {
  return local_expert(p, matrix_element(p.ids, row, column));
}

// Rank rows that one shrink tile covers, and the tiles of a rank.
__device__ __forceinline__ int shrink_ranks(const FusedDecodeParams& p, bool gate_up) {
  return gate_up && p.gate_up_a_components == 2 ? kShrinkRows / 2 : kShrinkRows;
}
__device__ __forceinline__ int shrink_tiles(const FusedDecodeParams& p, int rank, bool gate_up) {
  const int half_tiles = (rank + kShrinkRows / 2 - 1) / (kShrinkRows / 2);
  return shrink_ranks(p, gate_up) == kShrinkRows ? (half_tiles + 1) / 2 : half_tiles;
}

// What the kernel needs to know of a token's adapter.
struct TokenAdapter {
  uint32_t slot;  // kNoSlot: none, or one without ranks
  int gate_up_rank, down_rank;
};
__device__ __forceinline__ TokenAdapter token_adapter(const KernelParams& k, int token) {
  const int slot = k.p.slots(token);
  if (slot < 0) return {kNoSlot, 0, 0};
  const int gate_up = k.p.slots.rank(slot, LoraPart::kGateUp, k.gate_up_rank);
  const int down = k.p.slots.rank(slot, LoraPart::kDown, k.down_rank);
  return {gate_up + down > 0 ? static_cast<uint32_t>(slot) : kNoSlot, gate_up, down};
}

// Brings into L2 what the lists are made from, of the first pairs and tokens. It may still be on
// its way there from the kernels before; the trip to memory and the translation of the addresses
// are over all the same.
__device__ __forceinline__ void prefetch_list_inputs(const KernelParams& k, bool weights, int tid) {
  const FusedDecodeParams& p = k.p;
  const auto prefetch = [](const void* base, int64_t at, int bytes) {
    ptx::prefetch_l2(static_cast<const char*>(base) + at * bytes);
  };
  if (tid < k.num_pairs()) {
    const int token = k.token_of(tid), column = tid - token * p.top_k;
    prefetch(p.ids.ptr, element_index(p.ids, token, column), p.ids.element_bytes());
    if (weights && p.weights.element_bytes() > 0) {
      prefetch(p.weights.ptr, element_index(p.weights, token, column), p.weights.element_bytes());
    }
  }
  if (k.has_lora() && p.slots.adapter_ids_ptr != nullptr && tid < p.num_tokens) {
    prefetch(p.slots.adapter_ids_ptr, tid * p.slots.stride, p.slots.ids_are_int64 ? 8 : 4);
  }
}

struct Lists {
  uint32_t* entries;         // [local pairs] by expert
  uint32_t* items;           // packed
  uint16_t* first_segments;  // [items + 1], where there are adapters
  Segment* segments;
  DirectItem* direct_items;  // [items], where down tiles are direct
};
// `begins` and `counts` are zeroed before.
struct Scratch {
  uint32_t* begins;       // [kPlaceWords] a bit for each entry that begins a segment
  uint32_t* counts;       // [experts rounded up to 128]
  uint32_t* bases;        // [the same] pack_base() of each expert
  int* segments_before;   // [kPlaceWords] segments that begin before entry 32 i
  Segment* segments;      // [P] by the place of their first entry
  uint32_t* keys;         // [P] unsorted entries
  uint32_t* places;       // [P] pack_place(), or kNotLocal
  int64_t* ids;           // [P] 4-byte ones in the low half; over `segments`, which come later
  uint16_t* token_slots;  // [T]
  uint16_t* token_ranks;  // [T] gate_up and down rank of the token's slot, a byte each
};
__device__ __forceinline__ Scratch carve_scratch(uint8_t* base, int pairs, int experts) {
  Scratch s;
  const int padded = scratch_experts(experts);
  s.begins = reinterpret_cast<uint32_t*>(base);
  s.counts = s.begins + kPlaceWords;
  s.bases = s.counts + padded;
  s.segments_before = reinterpret_cast<int*>(s.bases + padded);
  s.segments = reinterpret_cast<Segment*>(s.segments_before + kPlaceWords);
  s.ids = reinterpret_cast<int64_t*>(s.segments);
  s.keys = reinterpret_cast<uint32_t*>(s.segments + pairs);
  s.places = s.keys + pairs;
  s.token_slots = reinterpret_cast<uint16_t*>(s.places + pairs);
  s.token_ranks = s.token_slots + pairs;
  return s;
}
// A pair's place in its expert's unsorted list.
constexpr uint32_t kNotLocal = ~0u;
__device__ __forceinline__ uint32_t pack_place(uint32_t place, uint32_t expert) {
  return place << 16 | expert;
}
// An expert's first entry and first item, or a number of entries and of items: sums of both at
// once.
__device__ __forceinline__ uint32_t pack_base(uint32_t entries, uint32_t items) {
  return items << 16 | entries;
}
__device__ __forceinline__ int base_entry(uint32_t base) { return static_cast<int>(base & 0xffff); }
__device__ __forceinline__ int base_item(uint32_t base) { return static_cast<int>(base >> 16); }

// All threads of the block; a block barrier must follow.
__device__ __forceinline__ void clear_scratch(uint8_t* scratch, int experts, int tid) {
#pragma unroll 1
  for (int i = tid; i < kPlaceWords + scratch_experts(experts); i += kThreads) {
    reinterpret_cast<uint32_t*>(scratch)[i] = 0;
  }
}

__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Numbers that all threads of a block need of the lists, in shared memory, zeroed before.
struct ListTotals {
  int segments;
  int gate_up_rank, down_rank;  // the largest of the slots present
  int entries, items;
  int is_cut;  // an expert has more than one item
};

// Items of a list of so many entries.
template <int kMaxTokens>
__device__ __forceinline__ uint32_t items_of(uint32_t entries) {
  return (entries + kMaxTokens - 1) / kMaxTokens;
}

// One warp: the experts' bases.
template <int kMaxTokens>
__device__ __forceinline__ void place_experts(const Scratch& s, int experts, ListTotals& totals,
                                              int lane) {
  const auto size = [](uint32_t count) { return pack_base(count, items_of<kMaxTokens>(count)); };
  uint32_t before = 0, most = 0;
#pragma unroll 1
  for (int first = 0; first < experts; first += 128) {
    const uint4 counts = reinterpret_cast<const uint4*>(s.counts + first)[lane];
    const uint4 sizes = {size(counts.x), size(counts.y), size(counts.z), size(counts.w)};
    const uint32_t sum = sizes.x + sizes.y + sizes.z + sizes.w;
    const uint32_t through = warp_inclusive_sum(sum, lane);
    uint4 bases;
    bases.x = before + through - sum;
    bases.y = bases.x + sizes.x;
    bases.z = bases.y + sizes.y;
    bases.w = bases.z + sizes.z;
    reinterpret_cast<uint4*>(s.bases + first)[lane] = bases;
    before += __shfl_sync(~0u, through, 31);
    most = max(most, max(max(counts.x, counts.y), max(counts.z, counts.w)));
  }
  const bool is_cut = __any_sync(~0u, most > kMaxTokens);
  if (lane == 0) {
    totals.entries = base_entry(before);
    totals.items = base_item(before);
    totals.is_cut = is_cut;
  }
}

__device__ __forceinline__ Segment make_segment(int item, uint32_t slot, int begin, int count,
                                                uint32_t ranks) {
  Segment segment;
  segment.item = static_cast<uint16_t>(item);
  segment.slot = static_cast<uint16_t>(slot);
  segment.begin = static_cast<uint8_t>(begin);
  segment.count = static_cast<uint8_t>(count);
  segment.gate_up_rank = static_cast<uint8_t>(ranks & 0xff);
  segment.down_rank = static_cast<uint8_t>(ranks >> 8);
  return segment;
}

// Where all tokens have one slot, of these ranks.
__device__ __forceinline__ void add_one_segment_an_item(ListTotals& totals, uint32_t ranks) {
  totals.segments = totals.items;
  totals.gate_up_rank = static_cast<int>(ranks & 0xff);
  totals.down_rank = static_cast<int>(ranks >> 8);
}

// Sorts every list, and where tokens have several slots (`mixed`) leaves the segments by place, and
// the bits of their places.
template <int kMaxTokens>
__device__ __forceinline__ void sort_lists(const KernelParams& k, const Lists& lists,
                                           const Scratch& s, bool mixed, ListTotals& totals,
                                           int tid) {
#pragma unroll 1
  for (int pair = tid; pair < k.num_pairs(); pair += kThreads) {
    const uint32_t place = s.places[pair];
    if (place == kNotLocal) continue;
    const int expert = place & 0xffff, count = static_cast<int>(s.counts[expert]);
    const uint32_t base = s.bases[expert];
    const uint32_t* keys = s.keys + base_entry(base);
    const uint32_t key = keys[place >> 16], slot = slot_of(key);
    int rank = 0, slot_start = 0, slot_end = 0;  // in the sorted list
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      const uint32_t other = keys[i];
      rank += other < key;
      slot_start += slot_of(other) < slot;
      slot_end += slot_of(other) <= slot;
    }
    const int at = base_entry(base) + rank, begin = rank % kMaxTokens;
    lists.entries[at] = key;
    if (!mixed || slot == kNoSlot || (rank != slot_start && begin != 0)) continue;
    const uint32_t ranks = s.token_ranks[k.token_of(pair)];
    s.segments[at] = make_segment(base_item(base) + rank / kMaxTokens, slot, begin,
                                  min(slot_end - rank, kMaxTokens - begin), ranks);
    atomicOr(s.begins + at / 32, 1u << at % 32);
    atomicMax(&totals.gate_up_rank, static_cast<int>(ranks & 0xff));
    atomicMax(&totals.down_rank, static_cast<int>(ranks >> 8));
  }
}

// Numbers the segments that sort_lists() has left, in the order of places.
__device__ __forceinline__ void number_segments(const Lists& lists, const Scratch& s,
                                                ListTotals& totals, int tid) {
  static_assert(kPlaceWords == 4 * 32, "four words a lane");
  if (tid < 32) {
    const uint4 begins = reinterpret_cast<const uint4*>(s.begins)[tid];
    const int first = __popc(begins.x), second = __popc(begins.y), third = __popc(begins.z);
    const int sum = first + second + third + __popc(begins.w);
    const int through = static_cast<int>(warp_inclusive_sum(sum, tid));
    const int before = through - sum;
    reinterpret_cast<int4*>(s.segments_before)[tid] = {
        before, before + first, before + first + second, before + first + second + third};
    if (tid == 31) {
      totals.segments = through;
      lists.first_segments[totals.items] = static_cast<uint16_t>(through);
    }
  }
  __syncthreads();
  const auto segments_before = [&](int place) {
    return s.segments_before[place / 32] + __popc(s.begins[place / 32] & ((1u << place % 32) - 1));
  };
#pragma unroll 1
  for (int at = tid; at < totals.entries; at += kThreads) {
    if (s.begins[at / 32] >> at % 32 & 1) lists.segments[segments_before(at)] = s.segments[at];
  }
#pragma unroll 1
  for (int i = tid; i < totals.items; i += kThreads) {
    lists.first_segments[i] =
        static_cast<uint16_t>(segments_before(unpack_item(lists.items[i]).start));
  }
}

// All threads of the block. A block barrier must follow before the lists and their totals are read.
// Its instructions come from far away each time, so that short code beats unrolled loops.
// Calls known(totals, expert_of), all lanes of the weight warp together, as soon as the tiles are
// known, while other warps write the lists; not where tokens have several slots, whose segments
// are known last. Of the totals it gets items, segments and ranks. expert_of(item), the expert of
// that item, wants all lanes too.
template <int kMaxTokens, class Known>
__device__ __forceinline__ void build_lists(const KernelParams& k, const Lists& lists,
                                            uint8_t* scratch, ListTotals& totals, int tid,
                                            Known&& known) {
  const FusedDecodeParams& p = k.p;
  const int num_tokens = static_cast<int>(p.num_tokens), num_pairs = k.num_pairs();
  const Scratch s = carve_scratch(scratch, num_pairs, p.num_local_experts);

  // All of a thread's ids are on their way at once, and while its tokens' adapters are read.
  const int id_bytes = p.ids.element_bytes();
#pragma unroll 1
  for (int pair = tid; pair < num_pairs; pair += kThreads) {
    const int token = k.token_of(pair);
    const int64_t at = element_index(p.ids, token, pair - token * p.top_k);
    const char* src = static_cast<const char*>(p.ids.ptr) + at * id_bytes;
    const uint32_t dst = ptx::shared_address(s.ids + pair);
    id_bytes == 8 ? ptx::cp_async_word<8>(dst, src) : ptx::cp_async_word<4>(dst, src);
  }
  if (k.has_lora()) {
    // From the last warp on: the first ones have the most ids.
#pragma unroll 1
    for (int t = kThreads - 1 - tid; t < num_tokens; t += kThreads) {
      const TokenAdapter adapter = token_adapter(k, t);
      s.token_slots[t] = static_cast<uint16_t>(adapter.slot);
      s.token_ranks[t] = static_cast<uint16_t>(adapter.gate_up_rank | adapter.down_rank << 8);
    }
  }
  ptx::cp_async_wait_all();
  // Count pairs by expert; the order inside a list is settled below, where it matters.
#pragma unroll 1
  for (int pair = tid; pair < num_pairs; pair += kThreads) {
    const int64_t bits = s.ids[pair];
    const uint32_t expert =
        local_expert(p, p.ids.id_of(IdMatrix::Element{bits, static_cast<int32_t>(bits)}));
    s.places[pair] = expert < static_cast<uint32_t>(p.num_local_experts)
                         ? pack_place(atomicAdd(s.counts + expert, 1u), expert)
                         : kNotLocal;
  }
  __syncthreads();

  bool mixes = false;
  if (tid < 32) {
    place_experts<kMaxTokens>(s, p.num_local_experts, totals, tid);
  } else if (k.has_lora()) {
#pragma unroll 1
    for (int t = tid - 32; t < num_tokens; t += kThreads - 32) {
      mixes |= s.token_slots[t] != s.token_slots[0];
    }
  }
  const bool mixed = __syncthreads_or(mixes);
  // All blocks must agree on which pairs the items of a cut list hold, and segments need their
  // slots together: such lists are sorted.
  const bool sorts = mixed || totals.is_cut;
  const bool one_slot = k.has_lora() && !mixed && s.token_slots[0] != kNoSlot;
  if (tid / 32 == kWeightWarp && !mixed) {
    ListTotals sums = {};
    sums.items = totals.items;
    if (one_slot) add_one_segment_an_item(sums, s.token_ranks[0]);
    known(sums, [&](int item) {
      int expert = 0;
#pragma unroll 1
      for (int e = tid % 32; e < p.num_local_experts; e += 32) {
        const int begin = base_item(s.bases[e]);
        const int end = begin + static_cast<int>(items_of<kMaxTokens>(s.counts[e]));
        if (begin <= item && item < end) expert = e;
      }
      return __reduce_max_sync(~0u, expert);
    });
  }
  uint32_t* keys = sorts ? s.keys : lists.entries;
#pragma unroll 1
  for (int pair = tid; pair < num_pairs; pair += kThreads) {
    const uint32_t word = s.places[pair];
    if (word == kNotLocal) continue;
    const int expert = word & 0xffff, place = word >> 16;
    const uint32_t base = s.bases[expert];
    const uint32_t slot = k.has_lora() ? s.token_slots[k.token_of(pair)] : kNoSlot;
    const int at = base_entry(base) + place;
    keys[at] = slot << 16 | static_cast<uint32_t>(pair);
    if (place % kMaxTokens != 0) continue;
    const int item = base_item(base) + place / kMaxTokens;
    const int count = min(static_cast<int>(s.counts[expert]) - place, kMaxTokens);
    lists.items[item] = pack_item(at, count, expert);
    if (one_slot) {
      lists.segments[item] = make_segment(item, slot, 0, count, s.token_ranks[0]);
      lists.first_segments[item] = static_cast<uint16_t>(item);
    }
  }
  if (one_slot && tid == 0) {
    lists.first_segments[totals.items] = static_cast<uint16_t>(totals.items);
    add_one_segment_an_item(totals, s.token_ranks[0]);
  }
  if (!sorts) return;
  __syncthreads();
  sort_lists<kMaxTokens>(k, lists, s, mixed, totals, tid);
  if (!mixed) return;
  __syncthreads();
  number_segments(lists, s, totals, tid);
}

}  // namespace moelora::fused_decode

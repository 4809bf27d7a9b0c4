// Work as numbered tiles. The order of the numbers is the order of dependencies, and a block takes
// its next tile from one global counter: whoever holds the smallest unfinished number waits for
// nobody, so the layer finishes with any number of resident blocks.
#pragma once

#include "decode_lists.cuh"

namespace moelora::fused_decode {

enum class TileKind : int {
  kGateUpShrink,  // 32 rows of A x for one segment (direct: a part of the columns)
  kGateUp,        // rows of W13 x (+ B A x), activation, z for one item
  kDownShrink,    // 32 rows of A z for one segment
  kDown,          // rows of W2 z (+ B A z) for one item
  kDirectDown,  // instead of kDown: weighted rows of a piece (a range of items), one column a token
  kEnd,
};
__device__ __forceinline__ bool is_shrink(TileKind kind) {
  return kind == TileKind::kGateUpShrink || kind == TileKind::kDownShrink;
}
__device__ __forceinline__ bool is_gate_up(TileKind kind) {
  return kind == TileKind::kGateUpShrink || kind == TileKind::kGateUp;
}

struct Tile {
  TileKind kind;
  int index;  // item; segment of a shrink; piece of a direct tile
  int block;  // of rows; of a gate_up shrink: rank block * kShrinkParts + part
};

__device__ __forceinline__ int ceil_div_int(int value, int by) { return (value + by - 1) / by; }

template <bool kDirect>
struct Plan {
  int items, segments;
  int gate_up_blocks, down_blocks;                // row blocks an item, or a piece
  int gate_up_shrink_blocks, down_shrink_blocks;  // rank blocks of the segment with the most
  int pieces, items_per_piece;                    // of direct tiles

  template <class C>
  __device__ __forceinline__ static Plan make(const KernelParams& k, const ListTotals& totals) {
    Plan plan = {};
    plan.items = totals.items;
    plan.segments = totals.segments;
    plan.gate_up_blocks = ceil_div_int(static_cast<int>(k.p.intermediate_size), C::kGateUpRows / 2);
    plan.down_blocks = ceil_div_int(static_cast<int>(k.p.hidden_size), C::kDownRows);
    plan.gate_up_shrink_blocks = shrink_tiles(k.p, totals.gate_up_rank, true) * C::kShrinkParts;
    if constexpr (kDirect) {
      plan.items_per_piece = max(k.items_per_piece, ceil_div_int(plan.items, kMaxPieces));
      plan.pieces = max(ceil_div_int(plan.items, plan.items_per_piece), 1);
      // Row blocks that nearly fill the GPU by themselves are not worth cutting in two: the sum of
      // the pieces costs a round trip.
      if (plan.pieces == 2 && plan.down_blocks * 4 >= static_cast<int>(gridDim.x) * 3) {
        plan.pieces = 1;
        plan.items_per_piece = plan.items;
      }
    } else {
      plan.down_shrink_blocks = shrink_tiles(k.p, totals.down_rank, false);
    }
    return plan;
  }

  __device__ __forceinline__ Tile tile(int ticket) const {
    // Is it one of the next `count` tiles?
    const auto is_of = [&](int count) {
      if (ticket < count) return true;
      ticket -= count;
      return false;
    };
    TileKind kind;
    int by;  // segments, or row blocks of an item or piece
    if (is_of(gate_up_shrink_blocks * segments)) {
      kind = TileKind::kGateUpShrink, by = segments;
    } else if (is_of(items * gate_up_blocks)) {
      kind = TileKind::kGateUp, by = gate_up_blocks;
    } else if (is_of(down_shrink_blocks * segments)) {
      kind = TileKind::kDownShrink, by = segments;
    } else if (is_of((kDirect ? pieces : items) * down_blocks)) {
      kind = kDirect ? TileKind::kDirectDown : TileKind::kDown, by = down_blocks;
    } else {
      return {TileKind::kEnd, 0, 0};
    }
    const int quotient =
        static_cast<int>(static_cast<uint32_t>(ticket) / static_cast<uint32_t>(by));
    const int rest = ticket - quotient * by;
    if (is_shrink(kind)) return {kind, rest, quotient};
    return {kind, quotient, rest};
  }
};

// A position in the ring of stages.
struct RingCursor {
  int stage;
  uint32_t phase;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Three barriers by stage: weights (one arrival of the weight lane, and the bytes), tokens (32 of
// the token warp) and empty (one of each warp of the group that read it).
struct Ring {
  static constexpr int kStageBarrierBytes = 24;

  uint32_t barriers, weights, tokens;  // shared addresses
  int stages;

  __device__ __forceinline__ void init() const {
#pragma unroll 1
    for (int s = 0; s < stages; s++) {
      const RingCursor at = {s, 0};
      ptx::mbarrier_init(weights_full(at), 1);
      ptx::mbarrier_init(tokens_full(at), 32);
      ptx::mbarrier_init(empty(at), kGroupWarps);
    }
  }
  __device__ __forceinline__ uint32_t weights_full(const RingCursor& at) const {
    return barriers + at.stage * kStageBarrierBytes;
  }
  __device__ __forceinline__ uint32_t tokens_full(const RingCursor& at) const {
    return weights_full(at) + 8;
  }
  __device__ __forceinline__ uint32_t empty(const RingCursor& at) const {
    return weights_full(at) + 16;
  }
  __device__ __forceinline__ void wait_empty(const RingCursor& at) const {
    ptx::mbarrier_wait(empty(at), at.phase ^ 1);
  }
  // A parity tells only neighbouring phases apart, and a group may come to a stage that still holds
  // the other group's previous round: wait for that round's release first, then for the data.
  __device__ __forceinline__ void wait_full(const RingCursor& at) const {
    wait_empty(at);
    ptx::mbarrier_wait(weights_full(at), at.phase);
    ptx::mbarrier_wait(tokens_full(at), at.phase);
  }
  // The caller's warp has read the stage. Without the fence the arrival can overtake its ldmatrix
  // reads, and the next round's copy overwrites them.
  __device__ __forceinline__ void release(const RingCursor& at, int lane) const {
    __threadfence_block();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty(at));
  }
};

// Tiles on their way from the weight lane to the token warp and the consumer groups: tile number n
// of this block goes to group n % kConsumerGroups.
struct TileQueue {
  uint32_t barriers;  // shared address, full and empty by entry
  int4* entries;

  __device__ __forceinline__ void push(int n, const Tile& tile, const RingCursor& at) const {
    const uint32_t full = barriers + n % kQueueEntries * 16;
    ptx::mbarrier_wait(full + 8, (n / kQueueEntries & 1) ^ 1);
    entries[n % kQueueEntries] = make_int4(static_cast<int>(tile.kind), tile.index, tile.block,
                                           at.stage << 1 | static_cast<int>(at.phase));
    ptx::mbarrier_arrive(full);
  }
  __device__ __forceinline__ Tile wait(int n, RingCursor& at) const {
    ptx::mbarrier_wait(barriers + n % kQueueEntries * 16, n / kQueueEntries & 1);
    const int4 entry = entries[n % kQueueEntries];
    at = {entry.w >> 1, static_cast<uint32_t>(entry.w & 1)};
    return {static_cast<TileKind>(entry.x), entry.y, entry.z};
  }
  // Once by the token warp and once by the group, each by one thread after all have read it.
  __device__ __forceinline__ void release(int n) const {
    ptx::mbarrier_arrive(barriers + n % kQueueEntries * 16 + 8);
  }
};

struct TensorMaps {
  CUtensorMap w13, w2, gate_up_a, gate_up_b, down_a, down_b;
};

struct RankChunk {
  Segment segment;
  int first_rank, ranks;
};

// The element at which a row of an adapter matrix begins.
__device__ __forceinline__ int64_t row_begin(const LoraStack& stack, int slot, int expert,
                                             int row) {
  return slot * stack.slot_stride + (stack.shared_outer ? 0 : expert) * stack.expert_stride +
         row * stack.row_stride;
}

// What the warps of a block share.
template <class C>
struct Block {
  Ring ring;
  TileQueue queue;
  Lists lists;
  Plan<C::kDirect> plan;

  __device__ __forceinline__ Item item(int index) const { return unpack_item(lists.items[index]); }
  __device__ __forceinline__ int first_segment(int item) const {
    return plan.segments > 0 ? lists.first_segments[item] : 0;
  }
  __device__ __forceinline__ int end_segment(int item) const {
    return plan.segments > 0 ? lists.first_segments[item + 1] : 0;
  }
  __device__ __forceinline__ int first_item(const Tile& piece) const {
    return piece.index * plan.items_per_piece;
  }
  __device__ __forceinline__ int end_item(const Tile& piece) const {
    return min(first_item(piece) + plan.items_per_piece, plan.items);
  }
  // A piece's expand comes in chunks of at most 32 ranks of one of the segments of its items.
  __device__ __forceinline__ int num_rank_chunks(const Tile& piece) const {
    const int end = first_segment(end_item(piece));
    int chunks = 0;
#pragma unroll 1
    for (int i = first_segment(first_item(piece)); i < end; i++) {
      chunks += ceil_div_int(lists.segments[i].down_rank, kExpandColumns);
    }
    return chunks;
  }
  // One of them; `ranks` is 0 beyond the last.
  __device__ __forceinline__ RankChunk rank_chunk(const Tile& piece, int index) const {
    const int end = first_segment(end_item(piece));
#pragma unroll 1
    for (int i = first_segment(first_item(piece)); i < end; i++) {
      const Segment segment = lists.segments[i];
      const int first = index * kExpandColumns;
      if (first < segment.down_rank) {
        return {segment, first, min(segment.down_rank - first, kExpandColumns)};
      }
      index -= ceil_div_int(segment.down_rank, kExpandColumns);
    }
    return {};
  }
};

__device__ __forceinline__ int rank_of(const Segment& segment, bool gate_up) {
  return gate_up ? segment.gate_up_rank : segment.down_rank;
}
// Ranks of a vector in memory: zeros from the slot's rank on.
__device__ __forceinline__ int padded_rank(int rank) { return (rank + 15) / 16 * 16; }
// Calls body with the number of 8-token blocks as a compile-time constant.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <class C, class Body>
__device__ __forceinline__ void dispatch_token_blocks(int blocks, Body&& body) {
  constexpr int kMost = C::kTokenBlocks;
  static_assert(kMost <= 2 || kMost == 4 || kMost == 6, "up to 8, 16, 32 or 48 tokens a tile");
  if constexpr (kMost == 1) {
    body(Constant<1>{});
  } else if constexpr (kMost == 2) {
    blocks == 1 ? body(Constant<1>{}) : body(Constant<2>{});
  } else if (blocks <= 2) {
    blocks == 1 ? body(Constant<1>{}) : body(Constant<2>{});
  } else if (kMost == 4 || blocks <= 4) {
    blocks == 3 ? body(Constant<3>{}) : body(Constant<4>{});
  } else if constexpr (kMost == 6) {
    blocks == 5 ? body(Constant<5>{}) : body(Constant<6>{});
  }
}

// What of A a shrink tile multiplies: its block of ranks, and its columns, of whole stages.
template <class C>
__device__ __forceinline__ int shrink_parts(const Tile& tile) {
  return tile.kind == TileKind::kGateUpShrink ? C::kShrinkParts : 1;
}
template <class C>
__device__ __forceinline__ int rank_block(const Tile& tile) {
  return tile.block / shrink_parts<C>(tile);
}
struct ColumnRange {
  int begin, end;
};
template <class C>
__device__ __forceinline__ ColumnRange shrink_range(const FusedDecodeParams& p, const Tile& tile,
                                                    int stage_columns) {
  const int columns =
      static_cast<int>(tile.kind == TileKind::kGateUpShrink ? p.hidden_size : p.intermediate_size);
  const int parts = shrink_parts<C>(tile);
  const int step = ceil_div_int(ceil_div_int(columns, stage_columns), parts) * stage_columns;
  const int begin = tile.block % parts * step;
  return {begin, min(begin + step, columns)};
}

}  // namespace moelora::fused_decode

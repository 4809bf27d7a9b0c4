// Where everything lies: the kernel's tile constants, its shared memory and its workspace. Host and
// device read the same numbers.
#pragma once

#include <type_traits>

#include "fused_decode.h"
#include "fused_decode_config.h"

namespace moelora::fused_decode {

constexpr int kConsumerGroups =
    2;  // they take alternate tiles: one's epilogue hides in the other's
constexpr int kGroupWarps = 4;
constexpr int kConsumerWarps = kConsumerGroups * kGroupWarps;
constexpr int kWeightWarp = kConsumerWarps;     // one lane streams weights (TMA)
constexpr int kTokenWarp = kConsumerWarps + 1;  // gathers token rows (cp.async)
constexpr int kThreads = (kConsumerWarps + 2) * 32;

constexpr int kMaxPairs = 4096;
constexpr int kMaxRank = 128;
constexpr int kMaxSlots = 65535;  // slot 0xffff means none
constexpr int kMaxStages = 24;
constexpr int kMinStages = 3;
constexpr int kQueueEntries = 8;

constexpr int kShrinkRows = 32;                            // rows of A a shrink tile
constexpr int kExpandColumns = 32;                         // ranks an expand stage
constexpr int kExpandPitch = 2 * 2 * kExpandColumns + 16;  // bytes: gate's ranks, up's ranks, pad

MOELORA_HOST_DEVICE constexpr int64_t round_up(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}
MOELORA_HOST_DEVICE constexpr int64_t ceil_div(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

// Bytes between token rows in a stage: 16 more than the columns, so that ldmatrix meets no bank
// twice.
MOELORA_HOST_DEVICE constexpr int token_pitch(int columns) { return columns * 2 + 16; }

constexpr int kMaxDirectTokens = 4;

template <int kConfigIndex>
struct Tiles {
  static constexpr FusedDecodeConfig kConfig = kFusedDecodeConfigs[kConfigIndex];
  static constexpr int kGateUpRows = kConfig.gate_up_rows, kDownRows = kConfig.down_rows;
  static constexpr int kGateUpColumns = kConfig.gate_up_columns;
  static constexpr int kDownColumns = kConfig.down_columns;
  static constexpr int kMaxTokens = kConfig.max_tokens;
  static constexpr int kTokenBlocks = (kMaxTokens + 7) / 8;  // of the 8 columns of an mma
  using TokenMask = std::conditional_t<(kMaxTokens > 32), uint64_t, uint32_t>;
  static constexpr bool kDirect = kConfig.direct;
  // An expand stage of a direct tile holds several chunks of 32 ranks, of one segment each.
  static constexpr int kDirectChunks = kDownColumns / kExpandColumns;
  static constexpr int max2(int a, int b) { return a > b ? a : b; }
  static constexpr int kWeightBytes =
      2 * max2(kGateUpRows * kGateUpColumns, kDownRows* kDownColumns);
  // Room for wide shrink stages in any case: 128 columns x 16 tokens.
  static constexpr int kTokenBytes =
      max2(kMaxTokens * token_pitch(max2(kGateUpColumns, kDownColumns)),
           kDirect ? 0 : 16 * token_pitch(128));

  // Token rows of a stage for a tile of `blocks` x 8 tokens.
  MOELORA_HOST_DEVICE static constexpr int stage_tokens(int blocks) {
    return blocks * 8 < kMaxTokens ? blocks * 8 : kMaxTokens;
  }
  // Columns of a shrink stage for a tile of `blocks` x 8 tokens: as wide as fits, because a shrink
  // stage carries few rows.
  MOELORA_HOST_DEVICE static constexpr int shrink_columns(int blocks) {
    for (int columns = 256; columns > 64; columns /= 2) {
      if (stage_tokens(blocks) * token_pitch(columns) <= kTokenBytes &&
          kShrinkRows * columns * 2 <= kWeightBytes) {
        return columns;
      }
    }
    return 64;
  }

  // fp32 sums of one group: [warps that split K][tokens][rows + 4].
  static constexpr int sum_floats(int rows) {
    return (rows % (16 * kGroupWarps) == 0 ? 1 : kGroupWarps) * kMaxTokens * (rows + 4);
  }
  static constexpr int kSumFloats =
      max2(max2(sum_floats(kGateUpRows), sum_floats(kDownRows)), sum_floats(kShrinkRows));
  // Direct: then the z of the tile, for the down shrink, and the gate_up rank vectors.
  static constexpr int kSumBytes =
      4 * (kSumFloats + (kDirect ? kMaxTokens * (kGateUpRows / 2 + 2 * kMaxRank) : 0));
  // Direct: blocks that share the columns of one gate_up shrink. Few tokens have few segments, and
  // every gate_up tile waits for them; but a block with such a part is late with its other tiles.
  static constexpr int kShrinkParts = kDirect ? 2 : 1;

  static_assert(kGateUpColumns % 64 == 0 && kDownColumns % 64 == 0, "64 columns a swizzled block");
  static_assert(kWeightBytes % 1024 == 0 && kTokenBytes % 16 == 0, "TMA and ldmatrix alignment");
  static_assert(kMaxTokens * kExpandPitch <= kTokenBytes, "rank vectors fit a stage");
  static_assert(kShrinkRows * 64 * 2 <= kWeightBytes, "a shrink stage fits");
  static_assert(kConfig.bytes_in_flight >= kWeightBytes &&
                    kConfig.bytes_in_flight_with_lora >= kWeightBytes,
                "a stage may always be asked for");
  static_assert(!kDirect || kDownRows == 16, "one fragment of rows a direct tile");
  static_assert(!kDirect || kMaxTokens == kMaxDirectTokens, "a column a token");
};

// Experts that one direct down tile adds up: about 96 KB of weights, so that tiles are neither the
// tail nor all overhead; more where there would be over kMaxPieces pieces.
constexpr int kMaxPieces = 32;
constexpr int items_per_piece(int64_t intermediate_size, int down_rows) {
  const int64_t items = 98304 / (2 * down_rows * intermediate_size);
  return items < 1 ? 1 : static_cast<int>(items);
}

// Items: pieces of at most max_tokens pairs of one expert. The most there can be.
constexpr int64_t max_items(int64_t pairs, int64_t experts, int64_t max_tokens) {
  const int64_t full = pairs < experts ? pairs : experts;
  return full + (pairs - full) / max_tokens;
}

// Consecutive pairs of one item that share an adapter slot.
struct Segment {
  uint16_t item, slot;
  uint8_t begin, count;  // pairs, counted from the item's first
  uint8_t gate_up_rank, down_rank;
};

// What the prologue of all but direct configurations needs beside the lists, over the ring: see
// Scratch in decode_lists.cuh.
constexpr int kPlaceWords = kMaxPairs / 32;
MOELORA_HOST_DEVICE constexpr int scratch_experts(int experts) {
  return (experts + 127) / 128 * 128;
}
constexpr int scratch_bytes(int pairs, int experts) {
  return 8 * kPlaceWords + 8 * scratch_experts(experts) +
         (static_cast<int>(sizeof(Segment)) + 12) * pairs;
}

// What a direct down tile needs of an item: by token, the router weight (a repeated id's weights
// added up) and whether the token chose this expert.
struct DirectItem {
  float weights[kMaxDirectTokens];
  uint32_t token_mask;
};

// Byte offsets in dynamic shared memory. The prologue's scratch lies over the end of the ring, so
// that the first stages may be asked for while there is scratch.
struct SharedLayout {
  int32_t stages;
  int32_t weights, tokens, sums, entries, items, first_segments, segments, direct_items;
  int32_t scratch;  // in front of `weights` where it does not fit: lists_fit() refuses such calls
  int32_t bytes;
};

constexpr int kBarrierBytes = 1024;  // stage and queue barriers, the queue, scalars
// What a block can have, less the KB that every block takes, even one that uses none, for a block
// of the weighted sum and one of the next call's first kernel to wait beside this one.
constexpr int kMaxSharedBytes = 232448 - 2 * 1024;

template <class C>
constexpr SharedLayout shared_layout(int pairs, int experts, int items, bool has_lora) {
  SharedLayout layout = {};
  // Lists from the end of memory, largest alignment first; the ring takes what is left.
  const int segment_bytes = has_lora ? 8 * pairs : 0;
  const int direct_bytes = C::kDirect ? static_cast<int>(sizeof(DirectItem)) * items : 0;
  const int first_segment_bytes = has_lora ? 2 * (items + 1) : 0;
  const int list_bytes = segment_bytes + direct_bytes + 4 * pairs + 4 * items + first_segment_bytes;
  const int stages =
      (kMaxSharedBytes - kBarrierBytes - kConsumerGroups * C::kSumBytes - list_bytes) /
      (C::kWeightBytes + C::kTokenBytes);
  layout.stages = stages < kMaxStages ? stages : kMaxStages;
  layout.weights = kBarrierBytes;
  layout.tokens = layout.weights + layout.stages * C::kWeightBytes;
  layout.sums = layout.tokens + layout.stages * C::kTokenBytes;
  layout.scratch = layout.sums - (C::kDirect ? 0 : (scratch_bytes(pairs, experts) + 15) / 16 * 16);
  layout.segments = layout.sums + kConsumerGroups * C::kSumBytes;
  layout.direct_items = layout.segments + segment_bytes;
  layout.entries = layout.direct_items + direct_bytes;
  layout.items = layout.entries + 4 * pairs;
  layout.first_segments = layout.items + 4 * items;
  layout.bytes = layout.first_segments + first_segment_bytes;
  return layout;
}

// Workspace: counters (zeroed by each call), then z [P, I], then y [P, H] or, for direct tiles,
// fp32 sums [pieces, T, H], then rank vectors [P, 2, R1 rounded up to 16] (gate, up; scaled) and
// [P, R2 rounded up to 16]. Direct tiles have, in place of the first, the fp32 sums [P, parts, 2,
// R1 rounded up] by part of the columns, and those of the second last: [P, gate_up tiles, R2
// rounded up]; there all these, `exchange_bytes` from gate_up_v on, begin as kUnwritten
// (decode_exchange.cuh).
struct Workspace {
  int64_t counters, z, y, gate_up_v, down_v, down_parts, bytes;  // byte offsets
  int64_t exchange_bytes;
  int32_t num_counters, max_items, max_segments;
};

// What a launch adds to the caller's parameters.
struct KernelParams {
  FusedDecodeParams p;
  SharedLayout shared;
  uint32_t *counters, *z_ready, *gate_up_v_ready, *down_v_ready, *row_blocks_done;
  // Where tiles are direct, y is fp32 sums by piece and gate_up_v fp32 sums by part.
  void *z, *y, *gate_up_v, *down_v;
  float* down_parts;                  // direct: the sums that down_v is made of
  int gate_up_rank, down_rank;        // R1 and R2, 0 where the adapters have no such part
  int gate_up_v_ranks, down_v_ranks;  // rounded up to 16: columns of a rank vector
  int items_per_piece;                // of direct tiles, at least
  int w13_expert_blocks;              // of the folded tensor map, 0: 64 columns a copy
  bool w2_folded;
  int gate_up_b_slot_step;  // matrices between slots in the tensor map of gate_up B
  uint32_t token_scale;     // token_scale_of(top_k)

  MOELORA_HOST_DEVICE bool has_lora() const { return gate_up_rank + down_rank > 0; }
  MOELORA_HOST_DEVICE int num_pairs() const { return static_cast<int>(p.num_tokens) * p.top_k; }
  // pair / top_k, without the division's thirty instructions.
  MOELORA_HOST_DEVICE int token_of(int pair) const {
    return static_cast<int>(static_cast<uint32_t>(pair) * token_scale >> 20);
  }
};
// pair * token_scale >> 20 is pair / top_k where pair * top_k < 2^20.
constexpr uint32_t token_scale_of(int top_k) {
  return (1u << 20) / static_cast<uint32_t>(top_k) + 1;
}
static_assert(kMaxPairs * kMaxTopK <= 1 << 20, "token_of() is exact");

// Counters: next ticket; then by item: gate_up tiles done; by segment: gate_up shrink tiles done;
// by segment: down shrink tiles done (neither where tiles are direct); by row block of direct
// tiles: pieces done.
constexpr int kTicketCounter = 0, kItemCounters = 1;

inline bool has_gate_up_lora(const FusedDecodeParams& p) {
  return p.slots.num_slots > 0 && p.gate_up_a.ptr != nullptr && p.gate_up_b.ptr != nullptr;
}
inline bool has_down_lora(const FusedDecodeParams& p) {
  return p.slots.num_slots > 0 && p.down_a.ptr != nullptr && p.down_b.ptr != nullptr;
}

// The tile configuration that the call's shapes pick.
inline int config_index(const FusedDecodeParams& p) {
  const int64_t pairs = p.num_tokens * p.top_k;
  const int64_t expert_weights = 3 * p.hidden_size * p.intermediate_size;
  return fused_decode_config_index(p.num_tokens, pairs, ceil_div(pairs, p.num_experts),
                                   pairs * p.num_local_experts * expert_weights / p.num_experts);
}

inline Workspace workspace_layout(const FusedDecodeParams& p, int config_index) {
  const int64_t pairs = p.num_tokens * p.top_k;
  const FusedDecodeConfig& config = kFusedDecodeConfigs[config_index];
  const bool lora = has_gate_up_lora(p) || has_down_lora(p);
  Workspace w = {};
  w.max_items = static_cast<int32_t>(max_items(pairs, p.num_local_experts, config.max_tokens));
  w.max_segments = lora && !config.direct ? static_cast<int32_t>(pairs) : 0;
  w.num_counters = kItemCounters + w.max_items + 2 * w.max_segments;
  if (config.direct) {
    w.num_counters += static_cast<int32_t>(ceil_div(p.hidden_size, config.down_rows));
  }
  w.z = round_up(4 * int64_t{w.num_counters}, 256);
  w.y = w.z + round_up(2 * pairs * p.intermediate_size, 256);
  int64_t pieces = ceil_div(w.max_items, items_per_piece(p.intermediate_size, config.down_rows));
  if (pieces > kMaxPieces) pieces = kMaxPieces;
  w.gate_up_v =
      w.y + round_up((config.direct ? 4 * pieces * p.num_tokens : 2 * pairs) * p.hidden_size, 256);
  w.down_v = w.gate_up_v;
  const int64_t gate_up_vectors = 2 * pairs * round_up(p.gate_up_rank, 16);
  const int64_t down_vectors = pairs * round_up(p.down_rank, 16);
  if (has_gate_up_lora(p)) {
    w.down_v += round_up(
        gate_up_vectors * (config.direct ? 4 * Tiles<kDirectConfig>::kShrinkParts : 2), 256);
  }
  w.down_parts = w.down_v + (has_down_lora(p) ? round_up(2 * down_vectors, 256) : 0);
  w.bytes = w.down_parts;
  if (config.direct && has_down_lora(p)) {
    w.bytes += 4 * down_vectors * ceil_div(p.intermediate_size, config.gate_up_rows / 2);
  }
  w.exchange_bytes = config.direct ? w.bytes - w.gate_up_v : 0;
  return w;
}

}  // namespace moelora::fused_decode

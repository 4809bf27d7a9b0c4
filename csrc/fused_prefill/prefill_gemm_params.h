// What one launch of a prefill GEMM reads, and the layout of its shared memory.
#pragma once

#include <cuda.h>

#include "prefill_layout.h"

namespace moelora::fused_prefill {

constexpr int kBlockColumns = 64;  // of K a stage: rows of 128 bytes
constexpr int kRowBytes = 128;
constexpr int kConsumerGroups = 2;
constexpr int kGroupThreads = 128;
constexpr int kQueueEntries = 4;  // items known to a block at once
// Items of gate_up that a consumer warpgroup stores before it tells the other SMs: each time takes
// a fence, a microsecond while memory is busy. Down wants the first tiles when the last ones are
// under way, so that a few are soon enough; a block can have as few as seven items.
constexpr int kStoredItems = 4;
constexpr int kQueueBytes = kQueueEntries * (32 + 16);
// Room for tickets on their way to the other block of a cluster. Its ring holds the first block
// back, which is never further ahead than a ring of items of one stage each and three fetched ones.
constexpr int kMailEntries = 8;
constexpr int kMailBytes = kMailEntries * (8 + 4);
constexpr int kGemmThreads = (kConsumerGroups + 1) * kGroupThreads;

// Rows of an operand or an output in boxes of 64 rows and, for what is left of a tile, of 16.
struct RowMaps64And16 {
  CUtensorMap rows64, rows16;
};

struct PrefillGemmMaps {
  CUtensorMap weights;
  RowMaps64And16 tokens;  // of z; unused where x is gathered
  RowMaps64And16 out;
};

struct PrefillGemmParams {
  const TokenTile* tiles;
  const int32_t* num_tiles;
  int64_t max_tiles;
  int32_t* next_item;  // counter, 0 at the start
  // Whether the tile lists are the work of the kernel right before this one, so that nothing can be
  // done until it ends. Else it is a shrink, of which only the rank vectors are waited for, or
  // gate_up, whose tiles are waited for one by one.
  bool tiles_come_last;
  // [tiles] counters, 0 at the start: every consumer warpgroup of gate_up adds one for each item
  // whose part of z is stored. A tile of down starts at `z_parts`.
  uint32_t* z_ready;
  uint32_t z_parts;
  int32_t weight_blocks;  // blocks of the configuration's weight_rows
  int32_t k_blocks;       // blocks of kBlockColumns
  // Weights leave L2 first; only where the configuration's experts have one tile, so that they are
  // read once.
  bool evict_weights_first;

  // gate_up: tile row r is row row_token[first_row + r] of x.
  const void* x_ptr;
  uint32_t x_row_bytes;
  int32_t x_columns;
  const int32_t* row_token;

  // Adapter expand: B [L, E_loc or 1, out, R] and the rank vectors v [rows, 2 R or R], which hold
  // `scaling` already; v's rows go by token or by permuted row.
  const LoraUnit* units;  // [tiles, units_capacity]
  int32_t units_capacity;
  const void* b_ptr;
  int64_t b_slot_bytes, b_expert_bytes, b_row_bytes;
  const void* v_ptr;
  uint32_t v_row_bytes;
  bool v_by_token;
  int32_t rank;  // R

  // Epilogue.
  const void* bias_ptr;  // [E_loc, out] or null
  int32_t out_columns;   // I for gate_up, H for down
  GateUpLayout layout;
  ActivationKind activation;
  float activation_alpha, activation_limit;
  const float* row_weight;  // by permuted row, scales W x and the adapter before the bias; or null
};

template <int kConfigIndex>
struct GemmTile {
  static constexpr FusedPrefillConfig kConfig = kFusedPrefillConfigs[kConfigIndex];
  static constexpr int kWeightRows = kConfig.weight_rows;
  static constexpr int kRowBlocks = kWeightRows / (64 * kConsumerGroups);  // of 64, a warpgroup
  static constexpr int kMaxTokens = kConfig.max_tokens;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kCluster = kConfig.cluster;
  static constexpr int kMaxSteps = kMaxTokens / kRowStep;

  // A stage: weight rows, then the tile's token rows.
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kLoadedRows = kWeightRows / kCluster;  // by each block of a cluster
  static constexpr int kStageBytes = kWeightBytes + kMaxTokens * kRowBytes;

  // Output staging of a warpgroup. gate_up: a whole tile of 32 columns; down: buffers of 64 tokens
  // x 64 columns, used in turn.
  static constexpr int kStagingBytes = kMaxTokens * 64;
  static constexpr int kDownBufferBytes = 64 * 128;
  static constexpr int kDownBuffers = kStagingBytes / kDownBufferBytes >= 2 ? 2 : 1;

  // Byte offsets in dynamic shared memory, which must start at a multiple of 1024.
  static constexpr int kStagingAt = kStages * kStageBytes;
  static constexpr int kTokenIndexAt = kStagingAt + kConsumerGroups * kStagingBytes;
  static constexpr int kQueueAt = kTokenIndexAt + 2 * kMaxTokens * 4;
  static constexpr int kStoredTilesAt = kQueueAt + kQueueBytes;
  static constexpr int kFullAt = kStoredTilesAt + 4 * kStoredItems * kConsumerGroups;
  static constexpr int kEmptyAt = kFullAt + 8 * kStages;
  static constexpr int kMailAt = kEmptyAt + 8 * kStages;
  static constexpr int kSharedBytes = kMailAt + (kCluster > 1 ? kMailBytes : 0);

  static_assert(kCluster == 1 || (kCluster == 2 && kStages + 3 <= kMailEntries),
                "what the multicast is written for, and room for the tickets on their way");
  static_assert(kMaxTokens % kRowStep == 0 && kMaxTokens <= 256, "the N of one wgmma");
  static_assert(kStageBytes % 1024 == 0 && kStagingBytes % 1024 == 0, "swizzle alignment");
  static_assert(kStagingBytes >= kDownBufferBytes, "a down buffer fits");
  static_assert(kQueueAt % 16 == 0 && kSharedBytes <= 232448, "fits an SM");
};

}  // namespace moelora::fused_prefill

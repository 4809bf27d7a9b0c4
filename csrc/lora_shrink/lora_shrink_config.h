// Which kernel a lora_shrink runs, from its shapes alone, so that every schedule of the same call
// gives the same bits.
#pragma once

#include <cstdint>

namespace moelora {

struct LoraShrinkConfig {
  bool grouped;               // else one block for a few rank rows of one v row
  int tile_rows, tile_ranks;  // of the grouped kernel: rows of v and rank rows a block computes
};

// Up to here an indexed kernel, which needs no sort, beats grouped tiles: with 128 experts most
// tiles would hold one or two rows, and A is read about once either way.
constexpr int64_t kShrinkIndexedMaxRows = 256;

// num_rows: rows of v. num_matrices: expert matrices of a slot. rank_rows: rows of one matrix.
// sorted: the rows can be walked expert by expert (or need no order: v per token).
inline LoraShrinkConfig lora_shrink_config(int64_t num_rows, int64_t num_matrices,
                                           int64_t rank_rows, bool sorted) {
  if (!sorted || num_rows <= kShrinkIndexedMaxRows) return {false, 0, 0};
  constexpr int64_t kManyBlocks = 132;
  // A block reads its matrix once: 64 rows a block quarter those reads, but only where an expert
  // fills them, and where enough blocks remain.
  const bool tall = num_rows >= 48 * num_matrices && num_rows >= 64 * kManyBlocks / 2;
  const int tile_rows = tall ? 64 : 16;
  // Splitting the rank rows reads x again, so only where blocks are scarce.
  const int64_t widest = tall ? 64 : 32;
  int64_t tile_ranks = 16;
  while (tile_ranks < widest && tile_ranks < rank_rows &&
         (num_rows / tile_rows) * ((rank_rows + 2 * tile_ranks - 1) / (2 * tile_ranks)) >=
             kManyBlocks) {
    tile_ranks *= 2;
  }
  return {true, tile_rows, static_cast<int>(tile_ranks)};
}

}  // namespace moelora

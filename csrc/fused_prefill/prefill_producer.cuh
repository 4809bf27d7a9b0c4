// The producer warpgroup of a prefill GEMM: fills the ring, an item after the other, and each
// item's K blocks first, its adapter stages last.
#pragma once

#include "prefill_gemm_params.h"
#include "prefill_ptx.cuh"

namespace moelora::fused_prefill {

// Position in the ring. A producer starts with parity 1 (a fresh barrier counts as past it), a
// consumer with 0.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity;

  __device__ __forceinline__ explicit RingPosition(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    stage += count;
    parity ^= (stage / kStages) & 1;
    stage %= kStages;
  }
};

// Items in order: all weight blocks of a token tile before the next tile, so that a tile's rows and
// an expert's weights are in L2 while several blocks want them.
__device__ __forceinline__ TokenTile load_tile(const PrefillGemmParams& p, int item,
                                               int num_items) {
  if (item >= num_items) return TokenTile{0, 0, 0, 0};
  const int4 v = sm90::load_pinned_16(p.tiles + item / p.weight_blocks);
  return TokenTile{v.x, v.y, v.z, v.w};
}

constexpr int kProducerBarrier = 1;  // named barriers; consumers use 2 and 3

template <class Tile, bool kGateUp>
class Producer {
 public:
  __device__ __forceinline__ Producer(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                                      uint32_t shared_base, int32_t* token_index, int thread)
      : maps_(maps),
        p_(params),
        base_(shared_base),
        token_index_(token_index),
        thread_(thread),
        row_(thread >> 3),
        chunk_(thread & 7) {}

  // Which tile comes next is fetched two items ahead, its rows' tokens one item ahead: neither's
  // latency is ever waited for.
  __device__ __forceinline__ void run(int num_items) {
    const int step = gridDim.x;
    int item = blockIdx.x;
    TokenTile next = load_tile(p_, item, num_items);
    TokenTile after_next = load_tile(p_, item + step, num_items);
    int32_t tokens[kTokensPerThread];
    fetch_tokens(next, tokens);
    for (uint32_t turn = 0; item < num_items; item += step, turn ^= 1) {
      const TokenTile tile = next;
      const int block = item % p_.weight_blocks;
      int32_t* index = token_index_ + turn * Tile::kMaxTokens;
      if constexpr (kGateUp) {
#pragma unroll
        for (int i = 0; i < kTokensPerThread; ++i) {
          const int r = thread_ + i * kGroupThreads;
          if (r < Tile::kMaxTokens) index[r] = tokens[i];
        }
      }
      next = after_next;
      after_next = load_tile(p_, item + 2 * step, num_items);
      fetch_tokens(next, tokens);
      const int tile_idx = item / p_.weight_blocks;
      const LoraUnit first_unit = fetch_unit(tile, tile_idx, chunk_ >> 1);
      if constexpr (kGateUp) {
        ptx::named_barrier(kProducerBarrier, kGroupThreads);
        gather_blocks(tile, block, index);
      } else {
        if (thread_ == 0) load_blocks(tile, block);
        if (thread_ != 0) at_.skip(p_.k_blocks);
      }
      if (tile.units > 0) {
        if constexpr (!kGateUp) {
          // Thread 0 has waited for every earlier stage: a parity seen by the others is the right
          // one.
          __syncwarp();
          ptx::named_barrier(kProducerBarrier, kGroupThreads);
        }
        expand_stages(tile, tile_idx, block, index, first_unit);
      }
    }
  }

 private:
  static constexpr int kTokensPerThread =
      kGateUp ? (Tile::kMaxTokens + kGroupThreads - 1) / kGroupThreads : 1;

  __device__ __forceinline__ uint32_t full() const { return base_ + Tile::kFullAt + 8 * at_.stage; }
  __device__ __forceinline__ uint32_t weights() const {
    return base_ + at_.stage * Tile::kStageBytes;
  }
  // Where this thread's 16 bytes of row `row_` lie in a swizzled block of 128-byte rows; 16 rows on
  // is 2048 bytes on.
  __device__ __forceinline__ uint32_t place() const {
    return row_ * kRowBytes + ((chunk_ ^ (row_ & 7)) << 4);
  }
  __device__ __forceinline__ void wait_empty() const {
    ptx::mbarrier_wait(base_ + Tile::kEmptyAt + 8 * at_.stage, at_.parity);
  }

  __device__ __forceinline__ void fetch_tokens(const TokenTile& tile,
                                               int32_t (&tokens)[kTokensPerThread]) const {
    if constexpr (kGateUp) {
#pragma unroll
      for (int i = 0; i < kTokensPerThread; ++i) {
        const int r = thread_ + i * kGroupThreads;
        tokens[i] = r < tile.rows ? sm90::load_pinned_4(p_.row_token + tile.first_row + r) : 0;
      }
    }
  }

  __device__ __forceinline__ LoraUnit fetch_unit(const TokenTile& tile, int tile_idx,
                                                 int unit_idx) const {
    if (unit_idx >= tile.units) return LoraUnit{0, 0, 0, 0, 0, 0};
    const int4 v =
        sm90::load_pinned_16(p_.units + int64_t{tile_idx} * p_.units_capacity + unit_idx);
    return reinterpret_cast<const LoraUnit&>(v);
  }

  __device__ __forceinline__ void load_weights(const TokenTile& tile, int block,
                                               int k_block) const {
    if constexpr (kGateUp) {
      sm90::tma_load_5d(weights(), &maps_.weights, full(), k_block * kBlockColumns, 0, 0,
                        block * (kWeightRows / 16), tile.expert);
    } else {
      sm90::tma_load_3d(weights(), &maps_.weights, full(), k_block * kBlockColumns,
                        block * kWeightRows, tile.expert);
    }
  }

  // gate_up: weights by TMA, rows of x by cp.async of all 128 threads, eight a row.
  __device__ __forceinline__ void gather_blocks(const TokenTile& tile, int block,
                                                const int32_t* index) {
    uint32_t token[Tile::kMaxSteps];
#pragma unroll
    for (int i = 0; i < Tile::kMaxSteps; ++i) token[i] = index[row_ + i * kRowStep];
    const int steps = tile.rows / kRowStep;
    const char* x = static_cast<const char*>(p_.x_ptr) + chunk_ * 16;
    const int whole_blocks = p_.x_columns / kBlockColumns;
    for (int k_block = 0; k_block < p_.k_blocks; ++k_block) {
      wait_empty();
      if (thread_ == 0) {
        ptx::mbarrier_arrive_expect_tx(full(), Tile::kWeightBytes);
        load_weights(tile, block, k_block);
      }
      const uint32_t dst = weights() + Tile::kWeightBytes + place();
      if (k_block < whole_blocks) {
#pragma unroll
        for (int i = 0; i < Tile::kMaxSteps; ++i) {
          if (i < steps) {
            sm90::cp_async_line_16(dst + i * kRowStep * kRowBytes,
                                   x + uint64_t{token[i]} * p_.x_row_bytes);
          }
        }
      } else {
        // The last columns of x, where they do not fill a block: zeros beyond them.
        const int bytes = k_block * kBlockColumns + chunk_ * 8 < p_.x_columns ? 16 : 0;
        for (int i = 0; i < steps; ++i) {
          const uint32_t row = index[row_ + i * kRowStep];
          ptx::cp_async_16(dst + i * kRowStep * kRowBytes, x + uint64_t{row} * p_.x_row_bytes,
                           bytes);
        }
      }
      ptx::cp_async_arrive(full());
      x += kRowBytes;
      at_.advance();
    }
  }

  // down: weights and rows of z by TMA, all by thread 0, whose arrivals stand for the others'.
  __device__ __forceinline__ void load_blocks(const TokenTile& tile, int block) {
    for (int k_block = 0; k_block < p_.k_blocks; ++k_block) {
      wait_empty();
      sm90::mbarrier_arrive_many(full(), kGroupThreads);
      ptx::mbarrier_arrive_expect_tx(full(), Tile::kWeightBytes + tile.rows * kRowBytes);
      load_weights(tile, block, k_block);
      uint32_t dst = weights() + Tile::kWeightBytes;
      int row = 0;
      for (; row + 64 <= tile.rows; row += 64, dst += 64 * kRowBytes) {
        sm90::tma_load_2d(dst, &maps_.tokens.rows64, full(), k_block * kBlockColumns,
                          tile.first_row + row);
      }
      for (; row < tile.rows; row += 16, dst += 16 * kRowBytes) {
        sm90::tma_load_2d(dst, &maps_.tokens.rows16, full(), k_block * kBlockColumns,
                          tile.first_row + row);
      }
      at_.advance();
    }
  }

  // Adapter stages: four units of 16 ranks each, rows of B where the weights lie, rank vectors
  // where the tokens lie. Whatever is not the slot's own (ranks beyond its rank, rows of other
  // slots, the other component's rows) is written as zeros and never read: it may hold NaN.
  __device__ __forceinline__ void expand_stages(const TokenTile& tile, int tile_idx, int block,
                                                const int32_t* index, LoraUnit unit) {
    const int half = chunk_ & 1;  // of a unit: 8 ranks a thread
    for (int first = 0; first < tile.units; first += 4) {
      const LoraUnit next_unit = fetch_unit(tile, tile_idx, first + 4 + (chunk_ >> 1));
      const int left = unit.ranks - 8 * half;
      const int ranks = left < 0 ? 0 : (left > 8 ? 8 : left);
      const int first_rank = unit.first_rank + 8 * half;
      wait_empty();
      copy_b(tile, block, unit, first_rank, ranks);
      copy_v(tile, unit, first_rank, ranks, index);
      if (thread_ == 0) ptx::mbarrier_arrive(full());
      ptx::cp_async_arrive(full());
      at_.advance();
      unit = next_unit;
    }
  }

  // Copies of 0 bytes read nothing, so that their source may lie anywhere.
  __device__ __forceinline__ void copy_b(const TokenTile& tile, int block, const LoraUnit& unit,
                                         int first_rank, int ranks) const {
    const uint32_t dst = weights() + place();
    int column = block * kWeightRows + row_;  // output column of this thread's first row
    int column_step = 16;                     // and from one of its rows to the next
    int64_t b_row = column;
    if constexpr (kGateUp) {
      // Weight rows lie as 8 of the first half, 8 of the second half; B has all gate rows first.
      const bool second = (row_ & 8) != 0;
      const bool up = second != (p_.layout == GateUpLayout::kUpGate);
      if (unit.component != kBothComponents && unit.component != int{up}) ranks = 0;
      column = block * (kWeightRows / 2) + (row_ & 7);
      column_step = 8;
      b_row = column + (up ? p_.out_columns : 0);
    }
    const char* src = static_cast<const char*>(p_.b_ptr) + unit.slot * p_.b_slot_bytes +
                      tile.expert * p_.b_expert_bytes + b_row * p_.b_row_bytes + first_rank * 2;
    const int64_t src_step = column_step * p_.b_row_bytes;
#pragma unroll
    for (int i = 0; i < kWeightRows / 16; ++i) {
      ptx::cp_async_16(dst + i * 16 * kRowBytes, src, column < p_.out_columns ? 2 * ranks : 0);
      column += column_step;
      src += src_step;
    }
  }

  __device__ __forceinline__ void copy_v(const TokenTile& tile, const LoraUnit& unit,
                                         int first_rank, int ranks, const int32_t* index) const {
    uint32_t dst = weights() + Tile::kWeightBytes + place();
    const int v_column = (unit.component == kUpComponent ? p_.rank : 0) + first_rank;
    const char* v = static_cast<const char*>(p_.v_ptr) + v_column * 2;
    for (int row = row_; row < tile.rows; row += kRowStep, dst += kRowStep * kRowBytes) {
      const uint32_t v_row = p_.v_by_token ? index[row] : tile.first_row + row;
      const bool own = row >= unit.begin && row < unit.end;
      ptx::cp_async_16(dst, v + uint64_t{v_row} * p_.v_row_bytes, own ? 2 * ranks : 0);
    }
  }

  const PrefillGemmMaps& maps_;
  const PrefillGemmParams& p_;
  const uint32_t base_;
  int32_t* const token_index_;
  const int thread_, row_, chunk_;
  RingPosition<Tile::kStages> at_{1};
};

}  // namespace moelora::fused_prefill

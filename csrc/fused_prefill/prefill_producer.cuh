// The producer warpgroup of a prefill GEMM: fills the ring, an item after the other, and each
// item's K blocks first, its adapter stages last.
#pragma once

#include "prefill_items.cuh"

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

constexpr int kProducerBarrier = 1;  // named barriers; consumers use 2 and 3

template <class Tile, bool kGateUp>
class Producer {
 public:
  __device__ __forceinline__ Producer(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                                      uint32_t shared_base, const ItemQueue& queue,
                                      int32_t* token_index, int thread)
      : maps_(maps),
        p_(params),
        base_(shared_base),
        queue_(queue),
        token_index_(token_index),
        thread_(thread),
        row_(thread >> 3),
        chunk_(thread & 7) {}

  // While an item runs, one thread fetches the item after the next, and all fetch the tokens of the
  // next one's rows: neither's latency is ever waited for.
  __device__ __forceinline__ void run() {
    ItemFetcher<Tile::kCluster> fetcher(p_, base_ + Tile::kMailAt);
    if (thread_ == kFetcher) {
      fetcher.start();
      publish(0, fetcher);
    }
    sync();
    int32_t tokens[kTokensPerThread];
    fetch_tokens(queue_.peek(0).tile, tokens);
    if (thread_ == kFetcher) publish(1, fetcher);
    for (uint32_t n = 0;; ++n) {
      const GemmItem item = queue_.peek(n);
      if (item.tile.rows == 0) break;
      int32_t* index = token_index_ + n % 2 * Tile::kMaxTokens;
      store_tokens(tokens, index);
      sync();
      fetch_tokens(queue_.peek(n + 1).tile, tokens);
      const LoraUnit first_unit = fetch_unit(item, chunk_ >> 1);
      if (thread_ == kFetcher) publish(n + 2, fetcher);
      // A copy of the loop for each, because a choice at every load costs half a percent.
      if (Tile::kConfig.one_tile && p_.evict_weights_first) {
        fill_blocks<Tile::kConfig.one_tile>(item, index);
      } else {
        fill_blocks<false>(item, index);
      }
      if (item.adapter_stages > 0) {
        ptx::wait_for_previous_kernel();  // the shrink, whose rank vectors come now
        // down: thread 0 has waited for every earlier stage once it is here, and so the parity that
        // the others wait for is the right one.
        if constexpr (!kGateUp) sync();
        expand_stages(item, index, first_unit);
      }
    }
  }

 private:
  // Not the thread that loads a tile of down, because it waits for what that one is about to read.
  static constexpr int kFetcher = 32;
  static constexpr int kTokensPerThread =
      kGateUp ? (Tile::kMaxTokens + kGroupThreads - 1) / kGroupThreads : 1;

  __device__ __forceinline__ void sync() const {
    __syncwarp();
    ptx::named_barrier(kProducerBarrier, kGroupThreads);
  }
  __device__ __forceinline__ void publish(uint32_t n, ItemFetcher<Tile::kCluster>& fetcher) const {
    const GemmItem item = fetcher.item();
    if (!kGateUp && item.tile.rows > 0) {
      sm90::wait_for_count(p_.z_ready + item.tile_idx, p_.z_parts);
    }
    queue_.publish(n, item);
    fetcher.advance();
  }
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

  __device__ __forceinline__ void store_tokens(const int32_t (&tokens)[kTokensPerThread],
                                               int32_t* index) const {
    if constexpr (kGateUp) {
#pragma unroll
      for (int i = 0; i < kTokensPerThread; ++i) {
        const int r = thread_ + i * kGroupThreads;
        if (r < Tile::kMaxTokens) index[r] = tokens[i];
      }
    }
  }

  __device__ __forceinline__ LoraUnit fetch_unit(const GemmItem& item, int unit_idx) const {
    if (unit_idx >= item.tile.units) return LoraUnit{0, 0, 0, 0, 0, 0};
    const int64_t first = int64_t{item.tile_idx} * p_.units_capacity;
    const int4 v = sm90::load_pinned_16(p_.units + first + unit_idx);
    return reinterpret_cast<const LoraUnit&>(v);
  }

  // The item's K blocks.
  template <bool kEvictFirst>
  __device__ __forceinline__ void fill_blocks(const GemmItem& item, const int32_t* index) {
    if constexpr (kGateUp) {
      gather_blocks<kEvictFirst>(item, index);
    } else if (thread_ == 0) {
      load_blocks<kEvictFirst>(item);
    } else {
      at_.skip(p_.k_blocks);
    }
  }

  // The block's share of the rows, for all of its cluster; the others' come from the others.
  template <bool kEvictFirst>
  __device__ __forceinline__ void load_weights(const GemmItem& item, int k_block) const {
    const int share = item.tile_idx % Tile::kCluster;
    const uint32_t dst = weights() + share * (Tile::kWeightBytes / Tile::kCluster);
    const int column = k_block * kBlockColumns;
    const int row = item.block * Tile::kWeightRows + share * Tile::kLoadedRows;
    const int expert = item.tile.expert;
    static_assert(!kEvictFirst || Tile::kCluster == 1);
    if constexpr (Tile::kCluster > 1) {
      if constexpr (kGateUp) {
        sm90::tma_load_pair_5d(dst, &maps_.weights, full(), column, 0, 0, row / 16, expert);
      } else {
        sm90::tma_load_pair_3d(dst, &maps_.weights, full(), column, row, expert);
      }
    } else if constexpr (kEvictFirst) {
      if constexpr (kGateUp) {
        ptx::tma_load_5d(dst, &maps_.weights, full(), column, 0, 0, row / 16, expert, evict_first_);
      } else {
        sm90::tma_load_3d(dst, &maps_.weights, full(), column, row, expert, evict_first_);
      }
    } else {
      if constexpr (kGateUp) {
        sm90::tma_load_5d(dst, &maps_.weights, full(), column, 0, 0, row / 16, expert);
      } else {
        sm90::tma_load_3d(dst, &maps_.weights, full(), column, row, expert);
      }
    }
  }

  // gate_up: weights by TMA, rows of x by cp.async of all 128 threads, eight a row.
  template <bool kEvictFirst>
  __device__ __forceinline__ void gather_blocks(const GemmItem& item, const int32_t* index) {
    uint32_t token[Tile::kMaxSteps];
#pragma unroll
    for (int i = 0; i < Tile::kMaxSteps; ++i) token[i] = index[row_ + i * kRowStep];
    const int steps = item.tile.rows / kRowStep;
    const char* x = static_cast<const char*>(p_.x_ptr) + chunk_ * 16;
    const int whole_blocks = p_.x_columns / kBlockColumns;
    for (int k_block = 0; k_block < p_.k_blocks; ++k_block) {
      wait_empty();
      if (thread_ == 0) {
        ptx::mbarrier_arrive_expect_tx(full(), Tile::kWeightBytes);
        load_weights<kEvictFirst>(item, k_block);
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
  template <bool kEvictFirst>
  __device__ __forceinline__ void load_blocks(const GemmItem& item) {
    const TokenTile& tile = item.tile;
    ptx::fence_proxy_async_global();  // z was waited for by loads, and is read by TMA
    for (int k_block = 0; k_block < p_.k_blocks; ++k_block) {
      wait_empty();
      sm90::mbarrier_arrive_many(full(), kGroupThreads);
      ptx::mbarrier_arrive_expect_tx(full(), Tile::kWeightBytes + tile.rows * kRowBytes);
      load_weights<kEvictFirst>(item, k_block);
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
  // where the tokens lie. Beyond the tile's own units, in step with the cluster's other tile,
  // stages of zeros that no consumer multiplies. Whatever is not the slot's own (ranks beyond its
  // rank, rows of other slots, the other component's rows) is written as zeros and never read: it
  // may hold NaN.
  __device__ __forceinline__ void expand_stages(const GemmItem& item, const int32_t* index,
                                                LoraUnit unit) {
    const int half = chunk_ & 1;  // of a unit: 8 ranks a thread
    for (int first = 0; first < 4 * item.adapter_stages; first += 4) {
      const LoraUnit next_unit = fetch_unit(item, first + 4 + (chunk_ >> 1));
      const int left = unit.ranks - 8 * half;
      const int ranks = left < 0 ? 0 : (left > 8 ? 8 : left);
      const int first_rank = unit.first_rank + 8 * half;
      wait_empty();
      copy_b(item, unit, first_rank, ranks);
      copy_v(item.tile, unit, first_rank, ranks, index);
      if (thread_ == 0) ptx::mbarrier_arrive(full());
      ptx::cp_async_arrive(full());
      at_.advance();
      unit = next_unit;
    }
  }

  // Copies of 0 bytes read nothing, so that their source may lie anywhere.
  __device__ __forceinline__ void copy_b(const GemmItem& item, const LoraUnit& unit, int first_rank,
                                         int ranks) const {
    const uint32_t dst = weights() + place();
    int column = item.block * Tile::kWeightRows + row_;  // output column of this thread's first row
    int column_step = 16;                                // and from one of its rows to the next
    int64_t b_row = column;
    if constexpr (kGateUp) {
      // Weight rows lie as 8 of the first half, 8 of the second half; B has all gate rows first.
      const bool second = (row_ & 8) != 0;
      const bool up = second != (p_.layout == GateUpLayout::kUpGate);
      if (unit.component != kBothComponents && unit.component != int{up}) ranks = 0;
      column = item.block * (Tile::kWeightRows / 2) + (row_ & 7);
      column_step = 8;
      b_row = column + (up ? p_.out_columns : 0);
    }
    const char* src = static_cast<const char*>(p_.b_ptr) + unit.slot * p_.b_slot_bytes +
                      item.tile.expert * p_.b_expert_bytes + b_row * p_.b_row_bytes +
                      first_rank * 2;
    const int64_t src_step = column_step * p_.b_row_bytes;
#pragma unroll
    for (int i = 0; i < Tile::kWeightRows / 16; ++i) {
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
  const ItemQueue& queue_;
  int32_t* const token_index_;
  const int thread_, row_, chunk_;
  const uint64_t evict_first_ = ptx::evict_first_policy();
  RingPosition<Tile::kStages> at_{1};
};

}  // namespace moelora::fused_prefill

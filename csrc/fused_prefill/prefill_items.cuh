// Which item a block does next: a ticket from one counter, handed to every warp through a short
// queue in shared memory.
#pragma once

#include "prefill_gemm_params.h"
#include "prefill_ptx.cuh"

namespace moelora::fused_prefill {

// Weight block `block` times one token tile; tile.rows is 0 after the last item.
struct alignas(16) GemmItem {
  TokenTile tile;
  int32_t tile_idx, block;
  int32_t unused[2];
};

class ItemQueue {
 public:
  static constexpr int kEntries = kQueueEntries;
  static_assert(kEntries * (sizeof(GemmItem) + 16) == kQueueBytes, "entries, two barriers each");

  // `at`: shared memory of kQueueBytes, 16-byte aligned.
  __device__ __forceinline__ explicit ItemQueue(uint8_t* at)
      : entries_(reinterpret_cast<GemmItem*>(at)),
        barriers_(ptx::shared_address(entries_ + kEntries)) {}

  // One thread, before a block barrier. `reader_warps`: those that call read().
  __device__ __forceinline__ void init(int reader_warps) const {
    for (int i = 0; i < kEntries; ++i) {
      ptx::mbarrier_init(full(i), 1);
      ptx::mbarrier_init(empty(i), reader_warps);
    }
  }
  // The n-th item of this block; one thread, in order.
  __device__ __forceinline__ void publish(uint32_t n, const GemmItem& item) const {
    const uint32_t i = n % kEntries;
    ptx::mbarrier_wait(empty(i), (n / kEntries & 1) ^ 1);
    entries_[i] = item;
    ptx::mbarrier_arrive(full(i));
  }
  // A whole warp waits for the n-th item.
  __device__ __forceinline__ GemmItem read(uint32_t n, int lane) const {
    const uint32_t i = n % kEntries;
    ptx::mbarrier_wait(full(i), n / kEntries & 1);
    const GemmItem item = entries_[i];
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty(i));
    return item;
  }
  // For threads that a barrier has told that the item is there. It stays until the item four on is
  // published.
  __device__ __forceinline__ const GemmItem& peek(uint32_t n) const {
    return entries_[n % kEntries];
  }

 private:
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return barriers_ + 16 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return barriers_ + 16 * i + 8; }

  GemmItem* const entries_;
  const uint32_t barriers_;
};

// Fetches items for one thread: each step of the chain (ticket, tile record) is asked for one item
// ahead of the next, so that no latency is waited for. Items in order: all weight blocks of a token
// tile before the next tile, so that a tile's rows and an expert's weights are in L2 while several
// blocks want them. A block's first item is its own index (the grid is not larger than the items
// there can be); the counter starts at 0.
class ItemFetcher {
 public:
  __device__ __forceinline__ explicit ItemFetcher(const PrefillGemmParams& params) : p_(params) {}

  __device__ __forceinline__ void start() {
    item_ = static_cast<int32_t>(blockIdx.x);
    fetch_tile();
    const int32_t num_tiles = sm90::load_pinned_4(p_.num_tiles);
    ticket_ = sm90::take_pinned(p_.next_item);
    num_items_ = num_tiles * p_.weight_blocks;
  }

  __device__ __forceinline__ GemmItem item() const {
    return {{tile_.x, tile_.y, item_ < num_items_ ? tile_.z : 0, tile_.w}, tile_idx_, block_, {}};
  }
  // Asks for the next item, after item() has been used: what is loaded takes its place.
  __device__ __forceinline__ void advance() {
    item_ = static_cast<int32_t>(gridDim.x) + ticket_;
    ticket_ = sm90::take_pinned(p_.next_item);
    fetch_tile();
  }

 private:
  // Beyond the last item: that one's tile, or of none at all the first record's place.
  __device__ __forceinline__ void fetch_tile() {
    const int32_t at = max(min(item_, num_items_ - 1), 0);
    tile_idx_ = at / p_.weight_blocks;
    block_ = at - tile_idx_ * p_.weight_blocks;
    tile_ = sm90::load_pinned_16(p_.tiles + tile_idx_);
  }

  const PrefillGemmParams& p_;
  int32_t num_items_ = INT32_MAX;  // until it is known
  int32_t item_ = 0, ticket_ = 0;
  int4 tile_ = {};
  int32_t tile_idx_ = 0, block_ = 0;
};

}  // namespace moelora::fused_prefill

// Which item a block does next: a ticket from one counter, handed to every warp through a short
// queue in shared memory.
#pragma once

#include "prefill_gemm_params.h"
#include "prefill_ptx.cuh"

namespace moelora::fused_prefill {

// 128 weight rows (block `block`) times one token tile; tile.rows is 0 after the last item.
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
  // For threads that a barrier has told that the item is there. It stays for two more items.
  __device__ __forceinline__ const GemmItem& peek(uint32_t n) const {
    return entries_[n % kEntries];
  }

 private:
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return barriers_ + 16 * i; }
  __device__ __forceinline__ uint32_t empty(uint32_t i) const { return barriers_ + 16 * i + 8; }

  GemmItem* const entries_;
  const uint32_t barriers_;
};

// Fetches items for one thread, each step of the chain (ticket, tile record) one item ahead of the
// next, so that no latency is waited for. Items in order: all weight blocks of a token tile before
// the next tile, so that a tile's rows and an expert's weights are in L2 while several blocks want
// them. A block's first item is its own index; the counter starts at 0.
class ItemFetcher {
 public:
  __device__ __forceinline__ explicit ItemFetcher(const PrefillGemmParams& params) : p_(params) {}

  __device__ __forceinline__ void start() {
    num_items_ = sm90::load_pinned_4(p_.num_tiles) * p_.weight_blocks;
    item_ = blockIdx.x;
    next_item_ = take_ticket();
    fetch_tile();
  }
  // The item whose tile record the last call has fetched; fetches the one after it.
  __device__ __forceinline__ GemmItem next() {
    const GemmItem item = {tile_, tile_idx_, block_, {0, 0}};
    item_ = next_item_;
    next_item_ = take_ticket();
    fetch_tile();
    return item;
  }

 private:
  __device__ __forceinline__ int32_t take_ticket() const {
    return static_cast<int32_t>(gridDim.x) + atomicAdd(p_.next_item, 1);
  }
  __device__ __forceinline__ void fetch_tile() {
    tile_ = {0, 0, 0, 0};
    if (item_ >= num_items_) return;
    tile_idx_ = item_ / p_.weight_blocks;
    block_ = item_ - tile_idx_ * p_.weight_blocks;
    const int4 v = sm90::load_pinned_16(p_.tiles + tile_idx_);
    tile_ = {v.x, v.y, v.z, v.w};
  }

  const PrefillGemmParams& p_;
  int32_t num_items_ = 0, item_ = 0, next_item_ = 0;
  TokenTile tile_ = {};
  int32_t tile_idx_ = 0, block_ = 0;
};

}  // namespace moelora::fused_prefill

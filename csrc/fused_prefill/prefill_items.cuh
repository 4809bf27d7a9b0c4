// Which item a block does next: a ticket from one counter, handed to every warp through a short
// queue in shared memory, and to the cluster's other block by mail.
#pragma once

#include "prefill_gemm_params.h"
#include "prefill_ptx.cuh"

namespace moelora::fused_prefill {

// Weight block `block` times one token tile; tile.rows is 0 after the last item.
struct alignas(16) GemmItem {
  TokenTile tile;
  int32_t tile_idx, block;
  int32_t adapter_stages;  // of the tile with the most in the cluster, whose rings go in step
  int32_t unused;
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

// Hands tickets from the first block of a cluster of two to the second: words, and a barrier for
// each that tells of its arrival, in the second block's shared memory.
class TicketMail {
 public:
  // `at`: shared address of kMailBytes, 8-byte aligned, the same in both blocks.
  __device__ __forceinline__ explicit TicketMail(uint32_t at)
      : barriers_(at), words_(at + 8 * kMailEntries) {}

  // One thread of each block, before a cluster barrier.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kMailEntries; ++i) ptx::mbarrier_init(barriers_ + 8 * i, 1);
  }
  // The n-th ticket; one thread of the first block, and one of the second, in order.
  __device__ __forceinline__ void send(uint32_t n, int32_t ticket) const {
    const uint32_t i = n % kMailEntries;
    sm90::store_async_4(sm90::address_of_rank(words_ + 4 * i, 1), ticket,
                        sm90::address_of_rank(barriers_ + 8 * i, 1));
  }
  __device__ __forceinline__ int32_t receive(uint32_t n) const {
    const uint32_t i = n % kMailEntries;
    ptx::mbarrier_arrive_expect_tx(barriers_ + 8 * i, 4);
    ptx::mbarrier_wait(barriers_ + 8 * i, n / kMailEntries & 1);
    return sm90::load_shared_4(words_ + 4 * i);
  }

 private:
  const uint32_t barriers_, words_;
};

// Fetches items for one thread: each step of the chain (ticket, tile record) is asked for one item
// ahead of the next, so that no latency is waited for (the second block of a cluster waits for what
// the first one sends as it gets there). Items in order: all weight blocks of a token tile, or of a
// cluster's tiles, before the next, so that a tile's rows and an expert's weights are in L2 while
// several blocks want them. A cluster's first item is its own index (there are not more clusters
// than items there can be); the counter starts at 0. Each block of a cluster does the tile of its
// rank.
template <int kCluster>
class ItemFetcher {
 public:
  __device__ __forceinline__ ItemFetcher(const PrefillGemmParams& params, uint32_t mail_at)
      : p_(params), mail_(mail_at), rank_(kCluster > 1 ? sm90::cluster_rank() : 0) {}

  __device__ __forceinline__ void start() {
    item_ = static_cast<int32_t>(blockIdx.x) / kCluster;
    fetch_tile();
    const int32_t num_tiles = sm90::load_pinned_4(p_.num_tiles);
    take_ticket();
    num_items_ = num_tiles / kCluster * p_.weight_blocks;
  }

  __device__ __forceinline__ GemmItem item() const {
    const int32_t most_units = kCluster > 1 ? max(tile_.w, other_units_) : tile_.w;
    return {{tile_.x, tile_.y, item_ < num_items_ ? tile_.z : 0, tile_.w},
            tile_idx_,
            block_,
            (most_units + 3) / 4,
            0};
  }
  // Asks for the next item, after item() has been used: what is loaded takes its place.
  __device__ __forceinline__ void advance() {
    if constexpr (kCluster > 1) {
      if (rank_ == 0) {
        mail_.send(num_advanced_, ticket_);
      } else {
        ticket_ = mail_.receive(num_advanced_);
      }
      ++num_advanced_;
    }
    item_ = static_cast<int32_t>(gridDim.x) / kCluster + ticket_;
    take_ticket();
    fetch_tile();
  }

 private:
  __device__ __forceinline__ void take_ticket() {
    if (rank_ == 0) ticket_ = sm90::take_pinned(p_.next_item);
  }
  // Beyond the last item: that one's tile, or of none at all the first record's place.
  __device__ __forceinline__ void fetch_tile() {
    const int32_t at = max(min(item_, num_items_ - 1), 0);
    const int32_t tile_group = at / p_.weight_blocks;
    block_ = at - tile_group * p_.weight_blocks;
    tile_idx_ = tile_group * kCluster + rank_;
    tile_ = sm90::load_pinned_16(p_.tiles + tile_idx_);
    if (kCluster > 1) other_units_ = sm90::load_pinned_4(&p_.tiles[tile_idx_ ^ 1].units);
  }

  const PrefillGemmParams& p_;
  const TicketMail mail_;
  const int32_t rank_;
  int32_t num_items_ = INT32_MAX;  // until it is known
  int32_t item_ = 0, ticket_ = 0;
  uint32_t num_advanced_ = 0;
  int4 tile_ = {};
  int32_t other_units_ = 0;
  int32_t tile_idx_ = 0, block_ = 0;
};

}  // namespace moelora::fused_prefill

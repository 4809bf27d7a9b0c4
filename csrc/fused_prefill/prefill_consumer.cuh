// A consumer warpgroup of a prefill GEMM: half of the weight rows times every token of the tile.
#pragma once

#include "prefill_epilogue.cuh"
#include "prefill_producer.cuh"

namespace moelora::fused_prefill {

template <class T, class Tile, bool kGateUp>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                                      uint32_t shared_base, const ItemQueue& queue,
                                      int32_t* stored_tiles, int group, int thread)
      : maps_(maps), p_(params), base_(shared_base), queue_(queue) {
    group_.staging = shared_base + Tile::kStagingAt + group * Tile::kStagingBytes;
    group_.group = group;
    group_.stored_tiles = stored_tiles + group * kStoredItems;
    group_.warp = thread >> 5;
    group_.lane = thread & 31;
    group_.elected = thread == 0;
  }

  __device__ __forceinline__ void run() {
    for (uint32_t n = 0;; ++n) {
      const GemmItem item = queue_.read(n, group_.lane);
      if (item.tile.rows == 0) break;
      // The width is the instruction's: one copy of the loop for each.
      switch (__shfl_sync(~0u, item.tile.rows / kRowStep, 0)) {
        case 1:
          run_item<1>(item);
          break;
        case 2:
          run_item<2>(item);
          break;
        case 3:
          run_item<3>(item);
          break;
        case 4:
          run_item<4>(item);
          break;
        case 5:
          run_item<5>(item);
          break;
        case 6:
          run_item<6>(item);
          break;
        case 7:
          run_item<7>(item);
          break;
        case 8:
          run_item<8>(item);
          break;
        case 9:
          run_item<9>(item);
          break;
        case 10:
          run_item<10>(item);
          break;
        case 11:
          run_item<11>(item);
          break;
        case 12:
          run_item<12>(item);
          break;
        case 13:
          run_item<13>(item);
          break;
        case 14:
          run_item<14>(item);
          break;
        case 15:
          run_item<15>(item);
          break;
        case 16:
          run_item<16>(item);
          break;
      }
      if (kGateUp && group_.elected) group_.stored_tiles[group_.num_stored++] = item.tile_idx;
    }
    if (group_.elected) kGateUp ? group_.publish_stored(p_.z_ready) : sm90::bulk_wait_all();
  }

 private:
  // One for each 64 of the warpgroup's weight rows.
  template <int N>
  using Accumulators = sm90::WgmmaAccumulators<N>[Tile::kRowBlocks];
  static constexpr uint64_t kRowBlockStep = (64 * kRowBytes) >> 4;  // in a descriptor

  template <int N>
  __device__ __forceinline__ static void pin(Accumulators<N>& acc) {
#pragma unroll
    for (auto& a : acc) a.pin();
  }

  template <int kSteps>
  __device__ __forceinline__ void run_item(const GemmItem& item) {
    if constexpr (kSteps <= Tile::kMaxSteps) {
      constexpr int N = kSteps * kRowStep;
      sm90::WgmmaAccumulators<N> acc[Tile::kRowBlocks];
#pragma unroll
      for (auto& a : acc) a.clear();
      multiply_blocks<N>(acc);
      for (int i = 0; i < item.adapter_stages; ++i) multiply_units<N>(acc, item.tile.units - 4 * i);
      const int row_block = (item.block * kConsumerGroups + group_.group) * Tile::kRowBlocks;
#pragma unroll
      for (int m = 0; m < Tile::kRowBlocks; ++m) {
        if constexpr (kGateUp) {
          finish_gate_up<T, N>(acc[m], maps_, p_, item.tile, (row_block + m) * 32, group_);
        } else {
          finish_down<T, Tile, N>(acc[m], maps_, p_, item.tile, (row_block + m) * 64, group_);
        }
      }
    }
  }

  __device__ __forceinline__ void wait_full() const {
    ptx::mbarrier_wait(base_ + Tile::kFullAt + 8 * at_.stage, at_.parity);
  }
  __device__ __forceinline__ uint32_t empty() const {
    return base_ + Tile::kEmptyAt + 8 * at_.stage;
  }
  // This warp is done with a stage: tells this block, and then the cluster's other one, whose
  // weights may take its place too. In this order, so that the other block cannot come round to the
  // stage again before this block knows.
  __device__ __forceinline__ void release(uint32_t empty_barrier) const {
    if (group_.lane != 0) return;
    ptx::mbarrier_arrive(empty_barrier);
    if constexpr (Tile::kCluster > 1) {
      const uint32_t other = sm90::cluster_rank() ^ 1;
      sm90::mbarrier_arrive_remote(sm90::address_of_rank(empty_barrier, other));
    }
  }
  __device__ __forceinline__ uint64_t weights() const {
    return sm90::wgmma_descriptor(base_ + at_.stage * Tile::kStageBytes +
                                  group_.group * (Tile::kWeightBytes / kConsumerGroups));
  }
  __device__ __forceinline__ uint64_t tokens() const {
    return sm90::wgmma_descriptor(base_ + at_.stage * Tile::kStageBytes + Tile::kWeightBytes);
  }

  template <int N, int kCount>
  __device__ __forceinline__ void issue_steps(Accumulators<N>& acc) const {
    const uint64_t a = weights(), b = tokens();
    pin<N>(acc);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int m = 0; m < Tile::kRowBlocks; ++m) {
        sm90::Wgmma<T, N>::run(acc[m].d, a + m * kRowBlockStep + k * sm90::kWgmmaKStep,
                               b + k * sm90::kWgmmaKStep);
      }
    }
    sm90::wgmma_commit();
  }

  // Every K block of W x. A stage is handed back once the next one's products are under way.
  template <int N>
  __device__ __forceinline__ void multiply_blocks(Accumulators<N>& acc) {
    uint32_t previous = 0;
#pragma unroll 1
    for (int k_block = 0; k_block < p_.k_blocks; ++k_block) {
      wait_full();
      // Rows of x came by cp.async, which is not the proxy that wgmma reads by.
      if constexpr (kGateUp) ptx::fence_proxy_async_shared();
      issue_steps<N, 4>(acc);
      sm90::wgmma_wait<1>();
      if (k_block > 0) release(previous);
      previous = empty();
      at_.advance();
    }
    sm90::wgmma_wait<0>();
    pin<N>(acc);
    release(previous);
  }

  // One adapter stage: up to four units of 16 ranks, or none that are the tile's own.
  template <int N>
  __device__ __forceinline__ void multiply_units(Accumulators<N>& acc, int units) {
    wait_full();
    ptx::fence_proxy_async_shared();
    if (units > 2) {
      issue_steps<N, 4>(acc);
      sm90::wgmma_wait<0>();
    } else if (units == 2) {
      issue_steps<N, 2>(acc);
      sm90::wgmma_wait<0>();
    } else if (units == 1) {
      issue_steps<N, 1>(acc);
      sm90::wgmma_wait<0>();
    } else {
      __syncwarp();  // all have seen the stage before lane 0 hands it back
    }
    pin<N>(acc);
    release(empty());
    at_.advance();
  }

  const PrefillGemmMaps& maps_;
  const PrefillGemmParams& p_;
  const uint32_t base_;
  const ItemQueue& queue_;
  ConsumerGroup group_;
  RingPosition<Tile::kStages> at_{0};
};

}  // namespace moelora::fused_prefill

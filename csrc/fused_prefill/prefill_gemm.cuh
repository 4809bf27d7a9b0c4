// The grouped GEMM of a prefill layer, for gate_up (with gather and activation) and for down.
#pragma once

#include "prefill_consumer.cuh"
#include "prefill_producer.cuh"

namespace moelora::fused_prefill {

// All threads of the block, or of the cluster.
template <int kCluster>
__device__ __forceinline__ void cluster_barrier() {
  if constexpr (kCluster > 1) {
    __syncwarp();  // the cluster's barrier wants whole warps
    sm90::cluster_sync();
  } else {
    __syncthreads();
  }
}

// Persistent: any grid of whole clusters, up to the items that the tile list has room for, is
// right, one block an SM is meant. Blocks take items by ticket; an item is a block of weight rows
// times one token tile, and weights are the M operand, so that tokens are padded to 16 only.
//   gate_up: z[row, :] = act(W13[e] x[row_token[row]] + b + B v[row]) for every row of the tile
//   down:    y[row, :] = W2[e] z[row] + b + B v[row]
// down starts while gate_up's last items run, on SMs that have none left: its tiles wait for their
// own rows of z, by counters. All blocks of gate_up run by then, so that every counter gets there.
// The two blocks of a cluster, where there are clusters, do one tile each with the same weights:
// each loads half of them for both, and a stage is filled anew when both are done with it. One
// warpgroup fills the ring, two multiply. Needs: dynamic shared memory of Tile::kSharedBytes,
// x, B and v rows on 16-byte boundaries, and the tile list of prefill_tiles_kernel.
template <class T, int kConfigIndex, bool kGateUp>
__global__ void __launch_bounds__(kGemmThreads, 1)
    prefill_gemm_kernel(const __grid_constant__ PrefillGemmMaps maps,
                        const __grid_constant__ PrefillGemmParams params) {
  using Tile = GemmTile<kConfigIndex>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  if ((base & 1023) != 0) __trap();  // the swizzles count from 1024-byte lines
  const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;

  const ItemQueue queue(shared + Tile::kQueueAt);
  if (threadIdx.x == 0) {
    queue.init(kConsumerGroups * kGroupThreads / 32);
    for (int s = 0; s < Tile::kStages; ++s) {
      // Full: each producer thread's cp.async, and one arrival that announces the TMA bytes.
      ptx::mbarrier_init(base + Tile::kFullAt + 8 * s, kGroupThreads + 1);
      ptx::mbarrier_init(base + Tile::kEmptyAt + 8 * s,
                         Tile::kCluster * kConsumerGroups * kGroupThreads / 32);
    }
    if (Tile::kCluster > 1) TicketMail(base + Tile::kMailAt).init();
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.weights);
    ptx::prefetch_tensor_map(&maps.out.rows64);
    ptx::prefetch_tensor_map(&maps.out.rows16);
  }
  cluster_barrier<Tile::kCluster>();
  if (params.tiles_come_last) ptx::wait_for_previous_kernel();
  // Not before: whoever starts now reads the tile lists.
  ptx::launch_dependents();

  // 384 threads start with 168 registers each; 2 * 128 * 200 + 128 * 104 is the same sum.
  if (group == kConsumerGroups) {
    sm90::give_registers_back<104>();
    Producer<Tile, kGateUp>(maps, params, base, queue,
                            reinterpret_cast<int32_t*>(shared + Tile::kTokenIndexAt), thread)
        .run();
  } else {
    sm90::take_registers<200>();
    Consumer<T, Tile, kGateUp>(maps, params, base, queue,
                               reinterpret_cast<int32_t*>(shared + Tile::kStoredTilesAt), group,
                               thread)
        .run();
  }
  // Until then the other block writes here, and arrives at barriers.
  if (Tile::kCluster > 1) cluster_barrier<Tile::kCluster>();
  // So that who waits for this kernel has waited for the ones before it too.
  ptx::wait_for_previous_kernel();
}

}  // namespace moelora::fused_prefill

// PTX that only the prefill kernels use: tensor copies without a cache policy (to ask for the usual
// one, evict_normal, costs 8 % and more here), register hand-over between warpgroups, transposed
// fragment stores.
#pragma once

#include "../common/ptx.cuh"

namespace moelora::sm90 {

__device__ __forceinline__ void tma_load_2d(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
// The same, as data that leaves L2 by `policy`.
__device__ __forceinline__ void tma_load_3d(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1, int c2, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d(uint32_t dst, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// A box to both blocks of a cluster of two: to the same place in each, with each one's barrier.
__device__ __forceinline__ void tma_load_pair_3d(uint32_t dst, const CUtensorMap* map,
                                                 uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(uint16_t{3})
      : "memory");
}
__device__ __forceinline__ void tma_load_pair_5d(uint32_t dst, const CUtensorMap* map,
                                                 uint32_t barrier, int c0, int c1, int c2, int c3,
                                                 int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(uint16_t{3})
      : "memory");
}
// One box out of shared memory, clipped to the tensor; part of the thread's next bulk group.
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, uint32_t src, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(src), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most `kPending` of this thread's bulk groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until all of this thread's bulk groups are done.
__device__ __forceinline__ void bulk_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// `count` arrivals at once.
__device__ __forceinline__ void mbarrier_arrive_many(uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// 16 bytes past L1, their 128-byte line into L2.
__device__ __forceinline__ void cp_async_line_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src)
               : "memory");
}
// Waits until a counter that other blocks add to has come to `count`.
__device__ __forceinline__ void wait_for_count(const uint32_t* counter, uint32_t count) {
  while (ptx::load_acquire(counter) < count) __nanosleep(64);
}
// Loads from L2 that stay where they are written: they are made one item before their use, and the
// compiler must not sink them to it.
__device__ __forceinline__ int4 load_pinned_16(const void* src) {
  int4 v;
  asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(src)
               : "memory");
  return v;
}
__device__ __forceinline__ int32_t load_pinned_4(const int32_t* src) {
  int32_t v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(src) : "memory");
  return v;
}

// Adds one and returns the count before, likewise pinned. (Not an add: of that the compiler makes
// one add a warp, with a shuffle that waits for it at once.)
__device__ __forceinline__ int32_t take_pinned(int32_t* counter) {
  int32_t before;
  asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// Eight-by-eight fragments stored transposed: row i of a matrix in memory is column i of the
// fragment. Lanes 8 m .. 8 m + 7 give the row addresses of matrix m.
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(r0), "r"(r1)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// This block's place in its cluster, and the cluster's blocks.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// A barrier of all threads of the cluster, over memory too.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// What this block's shared address `address` is in the block of rank `rank`.
__device__ __forceinline__ uint32_t address_of_rank(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
__device__ __forceinline__ float2 load_remote_8(uint32_t remote) {
  float2 value;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(remote)
               : "memory");
  return value;
}
__device__ __forceinline__ int32_t load_shared_4(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared::cta.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
// Stores a word in another block, and tells that block's barrier of its four bytes.
__device__ __forceinline__ void store_async_4(uint32_t remote, int32_t value,
                                              uint32_t remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(remote),
      "r"(value), "r"(remote_barrier)
      : "memory");
}
// Of the block's scope, not the cluster's, which would put a fence of all memory before it: what it
// tells of is reads that are complete (wgmma's, waited for), and no data is handed over.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t remote_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}

// Registers of this warpgroup's threads from here on.
template <int kRegisters>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace moelora::sm90

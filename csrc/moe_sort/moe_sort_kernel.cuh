// A stable counting sort in one or two passes: tokens by slot (in digits of kSortMaxBins values, so
// nearly always one), then their pairs by expert. Few items are sorted by one block; many are cut
// in chunks, one block each: a first kernel counts the items of every (chunk, bin), a second one
// adds up the counts before its chunk and places its items. Atomics only ever count, so no result
// depends on their order.
#pragma once

#include "../common/ptx.cuh"
#include "moe_sort_items.h"

namespace moelora {

constexpr int kSortThreads = 1024;
constexpr int kOneBlockRounds = 2;
constexpr int kOneBlockItems = kOneBlockRounds * kSortThreads;
constexpr uint32_t kAllLanes = 0xffffffffu;

// ---- what is sorted ----
// A pass has items 0..num_items-1, each with a bin (-1: left out), and room for the items of bin b
// from row offsets[b] on. `store` gets an item's row, `finish` what lies between the items.

// Tokens by one digit of their slot; order_out [T] is order_in [T] (null: as numbered) so sorted.
struct SlotPass {
  MoeSortParams params;
  const int32_t* order_in;
  int32_t* order_out;
  int32_t shift;  // bits below the digit

  MOELORA_HOST_DEVICE int64_t num_items() const { return params.num_pairs / params.ids.num_cols; }
  MOELORA_HOST_DEVICE int32_t num_bins() const {
    const int32_t largest = params.slots.num_slots >> shift;
    return largest < kSortMaxBins ? largest + 1 : kSortMaxBins;
  }
  __device__ int32_t token(int64_t i) const {
    return order_in != nullptr ? order_in[i] : static_cast<int32_t>(i);
  }
  __device__ int32_t bin(int64_t i) const {
    return (slot_key(params, token(i)) >> shift) % kSortMaxBins;
  }
  __device__ int32_t rows(int32_t count) const { return count; }
  __device__ void store(int64_t i, int32_t row) const { order_out[row] = token(i); }
  __device__ void finish(const int32_t*, const int32_t*) const {}
};

// Pairs by local expert, token by token as in order [T] (null: as numbered); every expert's rows
// are padded to tile_rows. Writes all outputs of moe_sort.
struct PairPass {
  MoeSortParams params;
  const int32_t* order;

  MOELORA_HOST_DEVICE int64_t num_items() const { return params.num_pairs; }
  MOELORA_HOST_DEVICE int32_t num_bins() const { return params.num_local_experts; }
  __device__ int32_t pair(int64_t i) const {
    if (order == nullptr) return static_cast<int32_t>(i);
    const uint32_t at = static_cast<uint32_t>(i), top_k = params.ids.num_cols;
    return order[at / top_k] * top_k + at % top_k;
  }
  __device__ int32_t bin(int64_t i) const { return local_expert(params, pair(i)); }
  __device__ int32_t rows(int32_t count) const {
    const uint32_t tile = params.tile_rows;
    return (static_cast<uint32_t>(count) + tile - 1) / tile * tile;
  }
  __device__ void store(int64_t i, int32_t row) const {
    const int32_t p = pair(i);
    params.expanded_to_permuted_ptr[p] = row;
    if (row >= 0) params.permuted_to_expanded_ptr[row] = p;
  }

  // Shared between all blocks: offsets [E_loc + 1] and counts [E_loc] are the same in each.
  __device__ void finish(const int32_t* offsets, const int32_t* counts) const {
    const int32_t num_experts = params.num_local_experts, total = offsets[num_experts];
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t num_threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
    if (blockIdx.x == 0) {
      for (int e = threadIdx.x; e <= num_experts; e += blockDim.x) {
        params.expert_offsets_ptr[e] = offsets[e];
      }
      if (threadIdx.x == 0) *params.num_padded_rows_ptr = total;
    }
    // Padding: a warp per expert, then all threads for the rows that no expert has.
    for (int64_t e = thread / 32; e < num_experts; e += num_threads / 32) {
      const int64_t begin = static_cast<int64_t>(offsets[e]) + counts[e];
      for (int64_t row = begin + thread % 32; row < offsets[e + 1]; row += 32) {
        params.permuted_to_expanded_ptr[row] = -1;
      }
    }
    for (int64_t row = total + thread; row < params.max_rows; row += num_threads) {
      params.permuted_to_expanded_ptr[row] = -1;
    }
    const int64_t num_tiles = params.max_rows / params.tile_rows;
    for (int64_t tile = thread; tile < num_tiles; tile += num_threads) {
      const int64_t row = tile * params.tile_rows;
      int32_t expert = -1, limit = 0;
      if (row < total) {
        // The first expert that ends after this row.
        int32_t low = 0, high = num_experts - 1;
        while (low < high) {
          const int32_t middle = (low + high) / 2;
          if (offsets[middle + 1] > row) {
            high = middle;
          } else {
            low = middle + 1;
          }
        }
        expert = low;
        limit = offsets[low] + counts[low];
      }
      params.tile_expert_ptr[tile] = expert;
      params.tile_row_limit_ptr[tile] = limit;
    }
  }
};

// ---- inside a block ----

// Views of a block's dynamic shared memory; a block has at least num_bins threads.
struct SortShared {
  int32_t* offsets;       // [num_bins + 1] first row of each bin
  int32_t* counts;        // [num_bins] items of each bin
  int32_t* next;          // [num_bins] next free row of each bin
  int32_t* warp_totals;   // [32]
  uint16_t* warp_counts;  // [num_warps, num_bins]

  __device__ SortShared(int32_t* memory, int num_bins)
      : offsets(memory),
        counts(offsets + num_bins + 1),
        next(counts + num_bins),
        warp_totals(next + num_bins),
        warp_counts(reinterpret_cast<uint16_t*>(warp_totals + 32)) {}

  static MOELORA_HOST_DEVICE int64_t words(int num_bins, int num_threads) {
    return 3 * num_bins + 1 + 32 + (num_threads / 32 * num_bins + 1) / 2;
  }
};

// Sum over the threads before this one.
__device__ __forceinline__ int32_t exclusive_scan(int32_t value, int32_t* warp_totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  const int32_t before = __reduce_add_sync(kAllLanes, lane < warp ? warp_totals[lane] : 0);
  return before + sum - value;
}

// Ranks one tile of items, of which warp w holds the kRounds * 32 from w * kRounds * 32 on, round
// by round. rank: items of the same bin before it in the tile. Returns the tile's items in bin
// threadIdx.x. `shared.warp_counts` must be free on entry and is in use until the next barrier.
template <int kRounds>
__device__ __forceinline__ int32_t rank_items(const int32_t (&bin)[kRounds], int32_t num_bins,
                                              const SortShared& shared, int32_t (&rank)[kRounds]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  uint32_t* const words = reinterpret_cast<uint32_t*>(shared.warp_counts);
  for (int i = threadIdx.x; i < (num_warps * num_bins + 1) / 2; i += blockDim.x) words[i] = 0;
  __syncthreads();
  uint16_t* const mine = shared.warp_counts + warp * num_bins;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const uint32_t peers = __match_any_sync(kAllLanes, bin[r]);
    const int before = __popc(peers & ((1u << lane) - 1));
    rank[r] = bin[r] < 0 ? 0 : mine[bin[r]] + before;
    __syncwarp();
    if (bin[r] >= 0 && before == 0) mine[bin[r]] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  // Each bin's counts become what the warps before have of it.
  int32_t total = 0;
  if (threadIdx.x < num_bins) {
    for (int w = 0; w < num_warps; ++w) {
      uint16_t& count = shared.warp_counts[w * num_bins + threadIdx.x];
      const int32_t own = count;
      count = static_cast<uint16_t>(total);
      total += own;
    }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (bin[r] >= 0) rank[r] += mine[bin[r]];
  }
  return total;
}

// Fills offsets and counts from each thread's count of bin threadIdx.x; returns that bin's offset.
// A barrier must follow before they are read.
template <class Pass>
__device__ __forceinline__ int32_t place_bins(const Pass& pass, int32_t count,
                                              const SortShared& shared) {
  const int32_t num_bins = pass.num_bins();
  const bool has_bin = threadIdx.x < num_bins;
  const int32_t rows = has_bin ? pass.rows(count) : 0;
  const int32_t offset = exclusive_scan(rows, shared.warp_totals);
  if (has_bin) {
    shared.offsets[threadIdx.x] = offset;
    shared.counts[threadIdx.x] = count;
    if (threadIdx.x == num_bins - 1) shared.offsets[num_bins] = offset + rows;
  }
  return offset;
}

// A whole pass of at most kOneBlockRounds * blockDim.x items by one block. Ends with a barrier.
template <class Pass>
__device__ __forceinline__ void sort_in_block(const Pass& pass, int32_t* memory) {
  const int32_t num_bins = pass.num_bins();
  const SortShared shared(memory, num_bins);
  const int64_t num_items = pass.num_items();
  const int first = threadIdx.x / 32 * (kOneBlockRounds * 32) + threadIdx.x % 32;
  int32_t bin[kOneBlockRounds], rank[kOneBlockRounds];
#pragma unroll
  for (int r = 0; r < kOneBlockRounds; ++r) {
    bin[r] = first + r * 32 < num_items ? pass.bin(first + r * 32) : -1;
  }
  place_bins(pass, rank_items(bin, num_bins, shared, rank), shared);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kOneBlockRounds; ++r) {
    const int i = first + r * 32;
    if (i < num_items) pass.store(i, bin[r] < 0 ? -1 : shared.offsets[bin[r]] + rank[r]);
  }
  pass.finish(shared.offsets, shared.counts);
  __syncthreads();
}

// ---- kernels ----

// moe_sort in one launch of one block; P at most kOneBlockItems. Dynamic shared memory:
// SortShared::words of the larger pass, then two orders of T tokens where slots count.
__global__ void __launch_bounds__(kSortThreads, 1)
    moe_sort_small_kernel(const MoeSortParams params, int num_digits, int64_t sort_words) {
  extern __shared__ int32_t shared_memory[];
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  const int64_t num_tokens = params.num_pairs / params.ids.num_cols;
  const int32_t* order = nullptr;
  for (int digit = 0; digit < num_digits; ++digit) {
    int32_t* const sorted = shared_memory + sort_words + digit % 2 * num_tokens;
    sort_in_block(SlotPass{params, order, sorted, digit * kSortBits}, shared_memory);
    order = sorted;
  }
  sort_in_block(PairPass{params, order}, shared_memory);
}

// A slot pass of at most kOneBlockItems tokens in a launch of its own, by one block of
// kSortThreads.
__global__ void __launch_bounds__(kSortThreads, 1) slot_sort_kernel(const SlotPass pass) {
  extern __shared__ int32_t shared_memory[];
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  sort_in_block(pass, shared_memory);
}

// Block c counts its chunk's items: table[c, b] for every bin b.
template <class Pass>
__global__ void __launch_bounds__(kSortThreads, 1)
    sort_count_kernel(const Pass pass, int64_t items_per_chunk, int32_t* table) {
  __shared__ int32_t counts[kSortMaxBins];
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  const int32_t num_bins = pass.num_bins();
  for (int b = threadIdx.x; b < num_bins; b += blockDim.x) counts[b] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * items_per_chunk;
  const int64_t end = min(begin + items_per_chunk, pass.num_items());
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const int32_t bin = pass.bin(i);
    if (bin >= 0) atomicAdd(&counts[bin], 1);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < num_bins; b += blockDim.x) {
    table[static_cast<int64_t>(blockIdx.x) * num_bins + b] = counts[b];
  }
}

// Block c places its chunk's items, tile by tile of one item a thread. Dynamic shared memory:
// SortShared::words.
template <class Pass>
__global__ void __launch_bounds__(kSortThreads, 1)
    sort_place_kernel(const Pass pass, int64_t items_per_chunk, const int32_t* table) {
  extern __shared__ int32_t shared_memory[];
  ptx::wait_for_previous_kernel();
  ptx::launch_dependents();
  const int32_t num_bins = pass.num_bins(), thread = threadIdx.x;
  const SortShared shared(shared_memory, num_bins);

  // Items of each bin in all chunks and in those before this one: groups of num_bins threads share
  // the chunks between them.
  if (thread < num_bins) shared.counts[thread] = shared.next[thread] = 0;
  __syncthreads();
  const int num_groups = blockDim.x / num_bins, group = thread / num_bins;
  if (group < num_groups) {
    const int bin = thread % num_bins;
    int32_t all = 0, before = 0;
#pragma unroll 4
    for (unsigned chunk = group; chunk < gridDim.x; chunk += num_groups) {
      const int32_t count = table[chunk * num_bins + bin];
      all += count;
      if (chunk < blockIdx.x) before += count;
    }
    atomicAdd(&shared.counts[bin], all);
    atomicAdd(&shared.next[bin], before);
  }
  __syncthreads();
  const int32_t offset = place_bins(pass, thread < num_bins ? shared.counts[thread] : 0, shared);
  if (thread < num_bins) shared.next[thread] += offset;
  __syncthreads();

  const int64_t begin = blockIdx.x * items_per_chunk;
  const int64_t end = min(begin + items_per_chunk, pass.num_items());
  for (int64_t tile = begin; tile < end; tile += blockDim.x) {
    const int64_t i = tile + thread;
    const int32_t bin[1] = {i < end ? pass.bin(i) : -1};
    int32_t rank[1];
    const int32_t count = rank_items(bin, num_bins, shared, rank);
    if (i < end) pass.store(i, bin[0] < 0 ? -1 : shared.next[bin[0]] + rank[0]);
    __syncthreads();
    // The next tile's rank_items has barriers before anyone reads this.
    if (thread < num_bins) shared.next[thread] += count;
  }
  pass.finish(shared.offsets, shared.counts);
}

}  // namespace moelora

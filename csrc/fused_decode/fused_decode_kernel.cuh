// The fused decode kernel (its consumers, the block that puts the roles together), and the weighted
// sum over a token's pairs.
#pragma once

#include "decode_direct_lora.cuh"
#include "decode_producers.cuh"
#include "decode_warp_lists.cuh"

namespace moelora::fused_decode {

// One consumer group: takes every second tile of the block, multiplies, stores, and tells the other
// blocks through counters, or words that are their own flags.
template <class C, class T>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const KernelParams& k, const Block<C>& block, float* sums,
                                      int group, int thread)
      : k(k),
        block(block),
        sums(sums),
        group(group),
        thread(thread),
        warp(thread / 32),
        lane(thread % 32) {}

  __device__ __forceinline__ void run() {
    for (int n = group;; n += kConsumerGroups) {
      const Tile tile = block.queue.wait(n, at);
      if (tile.kind == TileKind::kEnd) return;
      const bool gate_up = is_gate_up(tile.kind);
      if (tile.kind == TileKind::kDirectDown) {
        if constexpr (C::kDirect) {
          multiply_direct(tile);
          finish_reading(n);
          store_direct<C, T>(k, block, sums, tile, group, thread);
          group_barrier();
        }
      } else if (is_shrink(tile.kind)) {
        multiply_shrink(tile);
        finish_reading(n);
        finish_shrink(tile);
      } else if (gate_up) {
        DirectLora<C, T> lora;
        if constexpr (C::kDirect) lora.prefetch(k, block, tile, thread);
        multiply(tile.index, true);
        finish_reading(n);
        finish_gate_up(tile, lora);
      } else {
        multiply(tile.index, false);
        finish_reading(n);
        const Item item = block.item(tile.index);
        store_y<C, T>(k, sums, tile.block, item, block.lists.entries + item.start, thread);
        group_barrier();
      }
    }
  }

 private:
  const KernelParams& k;
  const Block<C>& block;
  float* const sums;
  const int group, thread, warp, lane;
  RingCursor at;

  __device__ __forceinline__ void group_barrier() const {
    ptx::named_barrier(1 + group, kGroupThreads);
  }
  // All sums are in shared memory, and nobody needs the queue's entry any more.
  __device__ __forceinline__ void finish_reading(int n) const {
    group_barrier();
    if (thread == 0) block.queue.release(n);
  }
  // The group's stores come before the counter for whoever acquires it; and its sums are read.
  __device__ __forceinline__ void publish(uint32_t* counter) const {
    group_barrier();
    if (thread == 0) ptx::add_release(counter);
  }

  __device__ __forceinline__ void finish_shrink(const Tile& tile) const {
    const bool gate_up = is_gate_up(tile.kind);
    const Segment segment = block.lists.segments[tile.index];
    const uint32_t* entries = block.lists.entries + block.item(segment.item).start;
    if constexpr (C::kDirect) {
      send_gate_up_part<C>(k, sums, tile, segment, entries, thread);
      group_barrier();
    } else {
      store_rank_vectors<C, T>(k, sums, gate_up, tile.block, segment, entries, thread);
      publish((gate_up ? k.gate_up_v_ready : k.down_v_ready) + tile.index);
    }
  }
  __device__ __forceinline__ void finish_gate_up(const Tile& tile, DirectLora<C, T>& lora) {
    const Item item = block.item(tile.index);
    const uint32_t* entries = block.lists.entries + item.start;
    if constexpr (!C::kDirect) {
      store_z<C, T>(k, sums, tile.block, item, entries, thread);
      publish(k.z_ready + tile.index);
    } else {
      const int first = block.first_segment(tile.index), end = block.end_segment(tile.index);
      if (first < end && k.gate_up_rank > 0) {
        lora.load_gate_up_vectors(sums, thread);
        group_barrier();
        lora.add_gate_up(sums, thread);
        group_barrier();
      }
      store_z<C, T>(k, sums, tile.block, item, entries, thread);
      const bool has_down = first < end && k.down_rank > 0;
      if (has_down) {
        group_barrier();
        lora.send_down_parts(sums, thread);
      }
      publish(k.z_ready + tile.index);
      if (!has_down || tile.block < block.plan.gate_up_blocks - 1) return;
      // The parts are of tiles with smaller numbers, so nobody waits for them in vain.
      for (int i = first; i < end; i++) {
        const Segment segment = block.lists.segments[i];
        if (segment.down_rank > 0) send_down_vectors<C, T>(k, block, segment, thread);
      }
    }
  }

  template <class Add>
  __device__ __forceinline__ void with_stage(Add&& add) {
    block.ring.wait_full(at);
    add(block.ring.weights + at.stage * C::kWeightBytes,
        block.ring.tokens + at.stage * C::kTokenBytes);
    block.ring.release(at, lane);
    at.advance(block.ring.stages);
  }
  // Every stage of W x or A x.
  template <int kColumns, class Sums>
  __device__ __forceinline__ void add_stages(Sums& tile_sums, int columns) {
    for (int c = 0; c < columns; c += kColumns) {
      with_stage([&](uint32_t weights, uint32_t tokens) { tile_sums.add_stage(weights, tokens); });
    }
  }
  // B v of every segment of an item; the rows of a stage are the item's pairs.
  template <bool kGateUp, class Sums>
  __device__ __forceinline__ void add_expands(Sums& tile_sums, int item_index) {
    const bool up_first = k.p.layout == GateUpLayout::kUpGate;
    const int end = block.end_segment(item_index);
    for (int i = block.first_segment(item_index); i < end; i++) {
      const Segment segment = block.lists.segments[i];
      using Mask = typename C::TokenMask;
      const Mask mask = ~Mask{0} >> (8 * sizeof(Mask) - segment.count) << segment.begin;
      for (int ranks = rank_of(segment, kGateUp); ranks > 0; ranks -= kExpandColumns) {
        with_stage([&](uint32_t weights, uint32_t tokens) {
          tile_sums.template add_expand<kGateUp>(weights, tokens, ranks, mask, up_first);
        });
      }
    }
  }

  __device__ __forceinline__ void multiply_shrink(const Tile& tile) {
    dispatch_token_blocks<C>((block.lists.segments[tile.index].count + 7) / 8, [&](auto blocks) {
      constexpr int kBlocks = decltype(blocks)::value;
      constexpr int kColumns = C::shrink_columns(kBlocks);
      TileSums<C, T, kShrinkRows, kColumns, kBlocks> tile_sums(warp, lane);
      const ColumnRange range = shrink_range<C>(k.p, tile, kColumns);
      add_stages<kColumns>(tile_sums, range.end - range.begin);
      tile_sums.store(sums);
    });
  }
  __device__ __forceinline__ void multiply(int item_index, bool gate_up) {
    dispatch_token_blocks<C>((block.item(item_index).count + 7) / 8, [&](auto blocks) {
      constexpr int kBlocks = decltype(blocks)::value;
      if (gate_up) {
        TileSums<C, T, C::kGateUpRows, C::kGateUpColumns, kBlocks> tile_sums(warp, lane);
        add_stages<C::kGateUpColumns>(tile_sums, int(k.p.hidden_size));
        if constexpr (!C::kDirect) add_expands<true>(tile_sums, item_index);
        tile_sums.store(sums);
      } else if constexpr (!C::kDirect) {
        TileSums<C, T, C::kDownRows, C::kDownColumns, kBlocks> tile_sums(warp, lane);
        add_stages<C::kDownColumns>(tile_sums, int(k.p.intermediate_size));
        add_expands<false>(tile_sums, item_index);
        tile_sums.store(sums);
      }
    });
  }
  // All items of a piece; the rows of a stage are tokens.
  __device__ __forceinline__ void multiply_direct(const Tile& tile) {
    using Sums = TileSums<C, T, C::kDownRows, C::kDownColumns, 1>;
    DirectDownLora<C, T> lora(k, block, tile, thread);
    Sums totals(warp, lane);
    for (int i = block.first_item(tile); i < block.end_item(tile); i++) {
      const DirectItem& direct = block.lists.direct_items[i];
      Sums tile_sums(warp, lane);
      add_stages<C::kDownColumns>(tile_sums, int(k.p.intermediate_size));
      add_weighted(totals.sums[0][0], tile_sums.sums[0][0], direct.weights, direct.token_mask,
                   lane);
    }
    totals.store(sums);
    lora.add([&](auto&& body) { with_stage(body); });
    lora.add_to(sums + warp * C::kMaxTokens * (C::kDownRows + 4));
  }
};

// One persistent block: builds the lists, then works through tickets until none is left.
// Any grid size is right; one block an SM is meant. At the start counters must be zero, and the
// words of the exchange unwritten.
template <int kConfigIndex, class T>
__global__ void __launch_bounds__(kThreads, 1)
    fused_decode_kernel(const __grid_constant__ TensorMaps maps,
                        const __grid_constant__ KernelParams k) {
  using C = Tiles<kConfigIndex>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  // Barriers: stages, queue, then the queue's entries and the scalars.
  constexpr int kQueueAt = (kMaxStages * Ring::kStageBarrierBytes + 15) / 16 * 16,
                kEntriesAt = kQueueAt + kQueueEntries * 16,
                kScalarsAt = kEntriesAt + kQueueEntries * 16;
  static_assert(kScalarsAt + sizeof(ListTotals) <= kBarrierBytes, "the barrier page holds it all");
  ListTotals& totals = *reinterpret_cast<ListTotals*>(shared + kScalarsAt);
  const uint32_t base = ptx::shared_address(shared);
  if ((base & 1023) != 0) __trap();  // the swizzle counts from 1024-byte lines

  Block<C> block;
  block.ring = {base, base + k.shared.weights, base + k.shared.tokens, k.shared.stages};
  block.queue = {base + kQueueAt, reinterpret_cast<int4*>(shared + kEntriesAt)};
  block.lists = {reinterpret_cast<uint32_t*>(shared + k.shared.entries),
                 reinterpret_cast<uint32_t*>(shared + k.shared.items),
                 reinterpret_cast<uint16_t*>(shared + k.shared.first_segments),
                 reinterpret_cast<Segment*>(shared + k.shared.segments),
                 reinterpret_cast<DirectItem*>(shared + k.shared.direct_items)};

  prefetch_list_inputs(k, C::kDirect, tid);
  if (tid == 0) {
    block.ring.init();
    for (int q = 0; q < kQueueEntries; q++) {
      ptx::mbarrier_init(base + kQueueAt + q * 16, 1);
      ptx::mbarrier_init(base + kQueueAt + q * 16 + 8, 2);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.w13);
    ptx::prefetch_tensor_map(&maps.w2);
    if (k.gate_up_rank > 0) {
      ptx::prefetch_tensor_map(&maps.gate_up_a);
      if (!C::kDirect) ptx::prefetch_tensor_map(&maps.gate_up_b);
    }
    if (k.down_rank > 0 && !C::kDirect) {
      ptx::prefetch_tensor_map(&maps.down_a);
      ptx::prefetch_tensor_map(&maps.down_b);
    }
  }
  uint8_t* scratch = shared + k.shared.scratch;
  const bool one_warp_lists = C::kDirect || k.num_pairs() <= kMaxWarpPairs;
  if (tid == 0) totals = {};
  if (!one_warp_lists) clear_scratch(scratch, k.p.num_local_experts, tid);
  __syncthreads();
  ptx::wait_for_previous_kernel();
  // Not before the wait: weighted_sum_kernel reads this call's ids and weights as soon as it
  // starts.
  ptx::launch_dependents();

  // The first ticket's latency hides behind the lists, or behind the ids that they are made from.
  int ticket = 0;
  if (warp == kWeightWarp && lane == 0) {
    // Adds one. atomicAdd() would become one for the warp and a shuffle, which waits for it here.
    ticket = static_cast<int>(atomicInc(k.counters + kTicketCounter, INT32_MAX));
  }
  WeightStream<C> weight_stream(k, maps, block);
  // The others lie under the lists' scratch.
  const int free_stages =
      one_warp_lists ? k.shared.stages : (k.shared.scratch - k.shared.weights) / C::kWeightBytes;
  // The weight warp, as soon as the tiles are known.
  const auto start = [&](const ListTotals& known, auto&& expert_of) {
    block.plan = Plan<C::kDirect>::template make<C>(k, known);
    const Tile tile = block.plan.tile(__shfl_sync(~0u, ticket, 0));
    if (tile.kind != TileKind::kGateUp) return;
    const int expert = expert_of(tile.index);
    if (lane == 0) weight_stream.start(tile, expert, free_stages);
  };
  if (one_warp_lists) {
    if (warp == kWeightWarp) {
      build_lists_of_warp<C::kMaxTokens, C::kDirect>(k, block.lists, totals, lane, start);
    }
  } else if constexpr (!C::kDirect) {
    build_lists<C::kMaxTokens>(k, block.lists, scratch, totals, tid, start);
    ptx::fence_proxy_async_shared();  // the ring's next writes are TMA's
  }
  __syncthreads();
  if (warp != kWeightWarp || !one_warp_lists) {
    block.plan = Plan<C::kDirect>::template make<C>(k, totals);
  }

  if (warp == kWeightWarp) {
    if (lane == 0) weight_stream.run(ticket);
  } else if (warp == kTokenWarp) {
    TokenStream<C, T>(k, block, lane).run();
  } else {
    const int group = warp / kGroupWarps;
    float* sums = reinterpret_cast<float*>(shared + k.shared.sums + group * C::kSumBytes);
    Consumer<C, T>(k, block, sums, group, tid - group * kGroupThreads).run();
  }
}

constexpr int kSumThreads = 256;

// out[t] = routed_scaling_factor * sum of w y over the token's local pairs, in order; 8 columns a
// thread. Every warp holds the token's weights, a pair a lane, so that blocks wait for the kernel
// above beside it: it leaves them no shared memory.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    weighted_sum_kernel(const __grid_constant__ KernelParams k) {
  static_assert(kMaxTopK <= 32, "a lane for each pair");
  ptx::launch_dependents();
  const FusedDecodeParams& p = k.p;
  const int column = (blockIdx.x * kSumThreads + threadIdx.x) * 8;
  const int token = blockIdx.y, lane = threadIdx.x % 32;
  // Complete already: the kernel before was past its own wait when it let this one start.
  bool is_local = false;
  float weight = 1.0f;
  if (lane < p.top_k) {
    is_local = local_expert(p, token, lane) < static_cast<uint32_t>(p.num_local_experts);
    if (!p.weight_on_input) weight = matrix_element(p.weights, token, lane);
  }
  const uint32_t locals = __ballot_sync(~0u, is_local);
  ptx::wait_for_previous_kernel();
  const int hidden = static_cast<int>(p.hidden_size);
  const bool inside = column < hidden;
  const T* y = static_cast<const T*>(k.y) + int64_t{token} * p.top_k * hidden + column;
  float sum[8] = {};
  constexpr int kBatch = 8;  // loads in flight
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kBatch) {
    uint4 rows[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int j = first + i;
      rows[i] = inside && (locals >> j & 1) != 0 ? ptx::load_cg_16(y + int64_t{j} * hidden)
                                                 : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      if ((locals >> (first + i) & 1) == 0) continue;
      const float w = __shfl_sync(~0u, weight, first + i);
      float values[8];
      unpack8<T>(rows[i], values);
#pragma unroll
      for (int c = 0; c < 8; c++) sum[c] += w * values[c];
    }
  }
  if (!inside) return;
  const float scale = p.routed_scaling_factor;
  uint4 out;
  out.x = ptx::pack2<T>(scale * sum[0], scale * sum[1]);
  out.y = ptx::pack2<T>(scale * sum[2], scale * sum[3]);
  out.z = ptx::pack2<T>(scale * sum[4], scale * sum[5]);
  out.w = ptx::pack2<T>(scale * sum[6], scale * sum[7]);
  *reinterpret_cast<uint4*>(static_cast<T*>(p.out_ptr) + int64_t{token} * p.out_stride + column) =
      out;
}

}  // namespace moelora::fused_decode

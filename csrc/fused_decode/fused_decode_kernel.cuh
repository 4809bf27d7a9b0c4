// The fused decode kernel, and the weighted sum over a token's pairs.
#pragma once

#include "decode_epilogue.cuh"
#include "decode_producers.cuh"

namespace moelora::fused_decode {

// One consumer group: takes every second tile of the block, multiplies, stores, and tells the other
// blocks through the counters.
template <class C, class T>
__device__ void consume(const KernelParams& k, const Block& block, float* sums, int group,
                        int thread) {
  const int warp = thread / 32, lane = thread % 32;
  const Ring& ring = block.ring;
  const auto group_barrier = [&] { ptx::named_barrier(1 + group, kGroupThreads); };
  RingCursor at;
  for (int n = group;; n += kConsumerGroups) {
    const Tile tile = block.queue.wait(n, at);
    if (tile.kind == TileKind::kEnd) break;
    const bool gate_up = is_gate_up(tile.kind), shrink = is_shrink(tile.kind);
    Segment segment = {};
    if (shrink) segment = block.lists.segments[tile.index];
    const int item_index = shrink ? segment.item : tile.index;
    const Item item = block.item(item_index);
    const uint32_t* entries = block.lists.entries + item.start;
    const int columns = static_cast<int>(gate_up ? k.p.hidden_size : k.p.intermediate_size);

    // Every stage of W x, or A x.
    const auto add_stages = [&](auto& tile_sums, int stage_columns) {
      for (int c = 0; c < columns; c += stage_columns) {
        ring.wait_full(at);
        tile_sums.add_stage(ring.weights + at.stage * C::kWeightBytes,
                            ring.tokens + at.stage * C::kTokenBytes);
        ring.release(at, lane);
        at.advance(ring.stages);
      }
    };
    const auto add_expands = [&](auto& tile_sums, auto is_gate_up_tile) {
      const int last = block.end_segment(item_index);
      for (int i = block.first_segment(item_index); i < last; i++) {
        const Segment s = block.lists.segments[i];
        const uint32_t mask = ~0u >> (32 - s.count) << s.begin;
        for (int ranks = rank_of(s, gate_up); ranks > 0; ranks -= kExpandColumns) {
          ring.wait_full(at);
          tile_sums.template add_expand<decltype(is_gate_up_tile)::value>(
              ring.weights + at.stage * C::kWeightBytes, ring.tokens + at.stage * C::kTokenBytes,
              ranks, mask, k.p.layout == GateUpLayout::kUpGate);
          ring.release(at, lane);
          at.advance(ring.stages);
        }
      }
    };
    dispatch_token_blocks<C>(((shrink ? segment.count : item.count) + 7) / 8, [&](auto blocks) {
      constexpr int kBlocks = decltype(blocks)::value;
      if (shrink) {
        constexpr int kColumns = C::shrink_columns(kBlocks);
        TileSums<C, T, kShrinkRows, kColumns, kBlocks> tile_sums(warp, lane);
        add_stages(tile_sums, kColumns);
        tile_sums.store(sums);
      } else if (gate_up) {
        TileSums<C, T, C::kGateUpRows, C::kGateUpColumns, kBlocks> tile_sums(warp, lane);
        add_stages(tile_sums, C::kGateUpColumns);
        add_expands(tile_sums, Constant<1>{});
        tile_sums.store(sums);
      } else {
        TileSums<C, T, C::kDownRows, C::kDownColumns, kBlocks> tile_sums(warp, lane);
        add_stages(tile_sums, C::kDownColumns);
        add_expands(tile_sums, Constant<0>{});
        tile_sums.store(sums);
      }
    });
    group_barrier();
    if (thread == 0) block.queue.release(n);

    if (shrink) {
      store_rank_vectors<C, T>(k, sums, gate_up, tile.block, segment, entries, thread);
    } else if (gate_up) {
      store_z<C, T>(k, sums, tile.block, item, entries, thread);
    } else {
      store_y<C, T>(k, sums, tile.block, item, entries, thread);
    }
    // The group's stores come before the counter for whoever acquires it; and its sums are read.
    group_barrier();
    if (thread == 0 && tile.kind != TileKind::kDown) {
      __threadfence();
      if (shrink) {
        atomicAdd((gate_up ? k.gate_up_v_ready : k.down_v_ready) + tile.index, 1u);
      } else {
        atomicAdd(k.z_ready + item_index, 1u);
        atomicAdd(k.counters + kAllZCounter, 1u);
      }
    }
  }
}

// One persistent block: builds the lists, then works through tickets until none is left.
// Any grid size is right; one block an SM is meant. Counters must be zero at the start.
template <int kConfigIndex, class T>
__global__ void __launch_bounds__(kThreads, 1)
    fused_decode_kernel(const __grid_constant__ TensorMaps maps,
                        const __grid_constant__ KernelParams k) {
  using C = Tiles<kConfigIndex>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  // Barriers: stages, queue, then the queue's entries and the scalars.
  constexpr int kQueueAt = kMaxStages * 16, kEntriesAt = kQueueAt + kQueueEntries * 16,
                kScalarsAt = kEntriesAt + kQueueEntries * 16;
  static_assert(kScalarsAt + 4 * 4 <= kBarrierBytes, "the barrier page holds it all");
  int* scalars = reinterpret_cast<int*>(shared + kScalarsAt);
  const uint32_t base = ptx::shared_address(shared);
  if ((base & 1023) != 0) __trap();  // the swizzle counts from 1024-byte lines

  Block block;
  block.ring = {base, base + k.shared.weights, base + k.shared.tokens, k.shared.stages};
  block.queue = {base + kQueueAt, reinterpret_cast<int4*>(shared + kEntriesAt)};
  block.lists = {reinterpret_cast<uint32_t*>(shared + k.shared.entries),
                 reinterpret_cast<uint32_t*>(shared + k.shared.items),
                 reinterpret_cast<uint16_t*>(shared + k.shared.first_segments),
                 reinterpret_cast<Segment*>(shared + k.shared.segments)};

  if (tid == 0) {
    for (int s = 0; s < k.shared.stages; s++) {
      ptx::mbarrier_init(base + s * 16, 33);
      ptx::mbarrier_init(base + s * 16 + 8, kGroupWarps);
    }
    for (int q = 0; q < kQueueEntries; q++) {
      ptx::mbarrier_init(base + kQueueAt + q * 16, 1);
      ptx::mbarrier_init(base + kQueueAt + q * 16 + 8, 2);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&maps.w13);
    ptx::prefetch_tensor_map(&maps.w2);
  }
  // The lists' scratch lies over the ring, which is still idle.
  uint8_t* scratch = shared + k.shared.weights;
  if (tid < 4) scalars[tid] = 0;
  int* counts = carve_scratch(scratch, 0, k.p.num_local_experts).counts;
  for (int i = tid; i < ceil_div_int(k.p.num_local_experts, 128) * 128; i += kThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();

  // The first ticket's latency hides behind the lists.
  int ticket = 0;
  if (warp == kWeightWarp && lane == 0) {
    ticket = static_cast<int>(atomicAdd(k.counters + kTicketCounter, 1u));
  }
  build_lists<C::kMaxTokens>(k.p, block.lists, scratch, k.gate_up_rank, k.down_rank, scalars, tid);
  ptx::fence_proxy_async_shared();  // the ring's next writes are TMA's
  __syncthreads();
  const int hidden = static_cast<int>(k.p.hidden_size);
  const int inter = static_cast<int>(k.p.intermediate_size);
  block.plan = {scalars[3],
                scalars[0],
                ceil_div_int(inter, C::kGateUpRows / 2),
                ceil_div_int(hidden, C::kDownRows),
                ceil_div_int(scalars[1], shrink_ranks(k, true)),
                ceil_div_int(scalars[2], shrink_ranks(k, false))};

  if (warp == kWeightWarp) {
    if (lane == 0) stream_weights<C>(k, maps, block, ticket);
  } else if (warp == kTokenWarp) {
    stream_tokens<C, T>(k, block, lane);
  } else {
    const int group = warp / kGroupWarps;
    float* sums = reinterpret_cast<float*>(shared + k.shared.sums + group * C::kSumBytes);
    consume<C, T>(k, block, sums, group, tid - group * kGroupThreads);
  }
}

// out[t] = routed_scaling_factor * sum of w y over the token's local pairs, in order; 8 columns a
// thread.
template <class T>
__global__ void __launch_bounds__(256) weighted_sum_kernel(const __grid_constant__ KernelParams k) {
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  const FusedDecodeParams& p = k.p;
  const int column = (blockIdx.x * 256 + threadIdx.x) * 8;
  if (column >= p.hidden_size) return;
  const int token = blockIdx.y;
  float sum[8] = {};
#pragma unroll 8
  for (int j = 0; j < p.top_k; j++) {
    const int pair = token * p.top_k + j;
    const uint32_t expert =
        static_cast<uint32_t>(p.ids(pair)) - static_cast<uint32_t>(p.expert_offset);
    if (expert >= static_cast<uint32_t>(p.num_local_experts)) continue;
    const float w = p.weight_on_input ? 1.0f : p.weights(pair);
    const uint4 y =
        ptx::load_cg_16(static_cast<const T*>(k.y) + int64_t{pair} * p.hidden_size + column);
    const uint32_t words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 v = ptx::unpack2<T>(words[i]);
      sum[2 * i] += w * v.x;
      sum[2 * i + 1] += w * v.y;
    }
  }
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

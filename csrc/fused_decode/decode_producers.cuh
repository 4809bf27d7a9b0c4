// The two warps that fill the ring: one lane streams weights, one warp gathers token rows. Both
// walk the same tiles and the same stages; a stage is full when both have delivered.
#pragma once

#include "decode_schedule.cuh"

namespace moelora::fused_decode {

// Stages that carry a segment's B and rank vectors.
__device__ __forceinline__ int expand_stages(int rank) {
  return ceil_div_int(rank, kExpandColumns);
}

// One lane. Takes tickets, announces tiles, streams weights and adapter matrices. It waits for free
// stages only, never for another block's results.
template <class C>
__device__ void stream_weights(const KernelParams& k, const TensorMaps& maps, const Block& block,
                               int ticket) {
  const FusedDecodeParams& p = k.p;
  const Ring& ring = block.ring;
  const int hidden = static_cast<int>(p.hidden_size);
  const int inter = static_cast<int>(p.intermediate_size);
  const uint64_t policy = ptx::evict_first_policy();
  RingCursor at = {0, 0};
  int n = 0;  // tiles announced
  for (;;) {
    const Tile tile = block.plan.tile(ticket);
    if (tile.kind == TileKind::kEnd) break;
    int next = -1;
    const auto take_ticket = [&] {
      next = static_cast<int>(atomicAdd(k.counters + kTicketCounter, 1u));
    };
    const bool gate_up = is_gate_up(tile.kind);
    const int columns = gate_up ? hidden : inter;

    if (is_shrink(tile.kind)) {
      const Segment segment = block.lists.segments[tile.index];
      const int first_rank = tile.block * shrink_ranks(k, gate_up);
      if (first_rank >= rank_of(segment, gate_up)) {  // beyond this slot's rank
        take_ticket();
        ticket = next;
        continue;
      }
      block.queue.push(n++, tile, at);
      const Item item = block.item(segment.item);
      const CUtensorMap* map = gate_up ? &maps.gate_up_a : &maps.down_a;
      const bool shared_outer = gate_up ? p.gate_up_a.shared_outer : p.down_a.shared_outer;
      const int expert = shared_outer ? 0 : item.expert;
      const int stage_columns = C::shrink_columns((segment.count + 7) / 8);
      const int stages = ceil_div_int(columns, stage_columns);
      for (int c = 0; c < stages; c++) {
        if (c == max(stages - 3, 0)) take_ticket();
        const uint32_t full = ring.full(at), dst = ring.weights + at.stage * C::kWeightBytes;
        ring.wait_empty(at);
        ptx::mbarrier_arrive_expect_tx(full, kShrinkRows * stage_columns * 2);
        for (int b = 0; b < stage_columns / 64; b++) {
          ptx::tma_load_5d(dst + b * kShrinkRows * 128, map, full, c * stage_columns + b * 64,
                           first_rank, 0, expert, segment.slot, policy);
        }
        at.advance(ring.stages);
      }
      ticket = next;
      continue;
    }

    block.queue.push(n++, tile, at);
    const Item item = block.item(tile.index);
    const int row_block = tile.block * (C::kGateUpRows / 16);  // of 8 gate and 8 up rows
    const int row = tile.block * C::kDownRows;
    const int stages = ceil_div_int(columns, gate_up ? C::kGateUpColumns : C::kDownColumns);
    for (int c = 0; c < stages; c++) {
      // Early enough to hide the counter's latency, late enough to keep the order.
      if (c == max(stages - 3, 0)) take_ticket();
      const uint32_t full = ring.full(at), dst = ring.weights + at.stage * C::kWeightBytes;
      ring.wait_empty(at);
      ptx::mbarrier_arrive_expect_tx(full, C::kWeightBytes);
      if (gate_up) {
#pragma unroll
        for (int b = 0; b < C::kGateUpColumns / 64; b++) {
          ptx::tma_load_5d(dst + b * C::kGateUpRows * 128, &maps.w13, full,
                           c * C::kGateUpColumns + b * 64, 0, 0, row_block, item.expert, policy);
        }
      } else {
#pragma unroll
        for (int b = 0; b < C::kDownColumns / 64; b++) {
          ptx::tma_load_3d(dst + b * C::kDownRows * 128, &maps.w2, full,
                           c * C::kDownColumns + b * 64, row, item.expert, policy);
        }
      }
      at.advance(ring.stages);
    }
    const int last = block.end_segment(tile.index);
    for (int i = block.first_segment(tile.index); i < last; i++) {
      const Segment segment = block.lists.segments[i];
      for (int j = 0; j < expand_stages(rank_of(segment, gate_up)); j++) {
        const uint32_t full = ring.full(at), dst = ring.weights + at.stage * C::kWeightBytes;
        ring.wait_empty(at);
        if (gate_up) {
          ptx::mbarrier_arrive_expect_tx(full, C::kGateUpRows * kExpandColumns * 2);
          ptx::tma_load_5d(dst, &maps.gate_up_b, full, j * kExpandColumns, 0, 0, row_block,
                           segment.slot * k.gate_up_b_slot_step + item.expert, policy);
        } else {
          ptx::mbarrier_arrive_expect_tx(full, C::kDownRows * kExpandColumns * 2);
          ptx::tma_load_4d(dst, &maps.down_b, full, j * kExpandColumns, row,
                           p.down_b.shared_outer ? 0 : item.expert, segment.slot, policy);
        }
        at.advance(ring.stages);
      }
    }
    ticket = next;
  }
  // One end mark for every group.
  for (int g = 0; g < kConsumerGroups; g++) {
    block.queue.push(n++, {TileKind::kEnd, 0, 0}, at);
  }
}

// One warp: `count` rows of a matrix of `total_columns`, kColumns of them a stage, zeros beyond the
// last column. element_of(n): where row n starts. Rows from `count` on keep what the stage held.
template <class C, int kColumns, int kMaxRows, class T, class ElementOf>
__device__ __forceinline__ void gather_rows(const Ring& ring, RingCursor& at, const T* matrix,
                                            int total_columns, int count, int lane,
                                            ElementOf&& element_of) {
  constexpr int kPitch = token_pitch(kColumns);
  constexpr int kChunks = kColumns / 8;  // of 16 bytes
  constexpr int kLanesPerRow = kChunks < 32 ? kChunks : 32;
  constexpr int kChunksPerLane = kChunks / kLanesPerRow;
  constexpr int kRowsPerPass = 32 / kLanesPerRow;
  constexpr int kPasses = kMaxRows / kRowsPerPass;
  const int first_row = lane / kLanesPerRow, first_column = lane % kLanesPerRow * 8;
  uint32_t element[kPasses];
#pragma unroll
  for (int q = 0; q < kPasses; q++) {
    element[q] = element_of(min(first_row + q * kRowsPerPass, count - 1)) + first_column;
  }
  for (int c = 0; c < total_columns; c += kColumns) {
    const uint32_t dst =
        ring.tokens + at.stage * C::kTokenBytes + first_row * kPitch + first_column * 2;
    ring.wait_empty(at);
#pragma unroll
    for (int q = 0; q < kPasses; q++) {
      if (first_row + q * kRowsPerPass >= count) break;
#pragma unroll
      for (int d = 0; d < kChunksPerLane; d++) {
        const int column = c + first_column + d * 256;
        const bool inside = column < total_columns;
        ptx::cp_async_16(dst + q * kRowsPerPass * kPitch + d * 512,
                         matrix + (inside ? element[q] + c + d * 256 : 0), inside ? 16 : 0);
      }
    }
    ptx::cp_async_arrive(ring.full(at));
    at.advance(ring.stages);
  }
}

// One warp: the rank vectors of one segment into its rows of the expand stages: gate's ranks, then
// (gate_up) up's. Ranks beyond the slot's, up to the next multiple of 16, are zeros in memory.
template <class C, class T>
__device__ __forceinline__ void gather_rank_vectors(const Ring& ring, RingCursor& at, const T* v,
                                                    int v_ranks, int components, int rank,
                                                    const Segment& segment,
                                                    const uint32_t* item_entries, int lane) {
  const int row = lane / 8, component = lane % 8 / 4, chunk = lane % 4;
  for (int first = 0; first < rank; first += kExpandColumns) {
    const int width = min((rank - first + 15) / 16 * 16, kExpandColumns);
    const uint32_t dst =
        ring.tokens + at.stage * C::kTokenBytes + component * (kExpandColumns * 2) + chunk * 16;
    ring.wait_empty(at);
    if (component < components && chunk * 8 < width) {
      for (int n = segment.begin + row; n < segment.begin + segment.count; n += 4) {
        const int pair = pair_of(item_entries[n]);
        ptx::cp_async_16(dst + n * kExpandPitch,
                         v + (pair * components + component) * v_ranks + first + chunk * 8, 16);
      }
    }
    ptx::cp_async_arrive(ring.full(at));
    at.advance(ring.stages);
  }
}

__device__ __forceinline__ void wait_for_count(const uint32_t* counter, int count) {
  while (ptx::load_acquire(counter) < static_cast<uint32_t>(count)) {
  }
}

// One warp. Waits for what a tile reads of other tiles: z of its item, rank vectors of its
// segments.
template <class C, class T>
__device__ void stream_tokens(const KernelParams& k, const Block& block, int lane) {
  const FusedDecodeParams& p = k.p;
  const Ring& ring = block.ring;
  const int hidden = static_cast<int>(p.hidden_size);
  const int inter = static_cast<int>(p.intermediate_size);
  const T* x = static_cast<const T*>(p.hidden_states_ptr);
  const T* z = static_cast<const T*>(k.z);
  const uint32_t x_stride = static_cast<uint32_t>(p.hidden_states_stride);
  bool all_z = false;
  RingCursor at = {0, 0}, tile_start;
  for (int n = 0;; n++) {
    const Tile tile = block.queue.wait(n, tile_start);
    __syncwarp();
    if (lane == 0) block.queue.release(n);
    if (tile.kind == TileKind::kEnd) break;

    const bool gate_up = is_gate_up(tile.kind), shrink = is_shrink(tile.kind);
    Segment segment = {};
    if (shrink) segment = block.lists.segments[tile.index];
    const int item_index = shrink ? segment.item : tile.index;
    const Item item = block.item(item_index);
    const uint32_t* entries = block.lists.entries + item.start;
    const T* rows = gate_up ? x : z;
    const int columns = gate_up ? hidden : inter;
    const auto element_of_entry = [&](int i) {
      const uint32_t pair = pair_of(entries[i]);
      return gate_up ? pair / static_cast<uint32_t>(p.top_k) * x_stride : pair * inter;
    };

    if (!gate_up && !all_z) {
      // One look at the total spares the look at each item once the first phase is over.
      const uint32_t total = block.plan.items * block.plan.gate_up_blocks;
      all_z = ptx::load_acquire(k.counters + kAllZCounter) >= total;
      if (!all_z) wait_for_count(k.z_ready + item_index, block.plan.gate_up_blocks);
      all_z = __all_sync(~0u, all_z);
    }
    if (shrink) {
      const auto element_of = [&](int i) { return element_of_entry(segment.begin + i); };
      const auto gather = [&](auto blocks) {
        constexpr int kBlocks = decltype(blocks)::value;
        gather_rows<C, C::shrink_columns(kBlocks), kBlocks * 8>(ring, at, rows, columns,
                                                                segment.count, lane, element_of);
      };
      dispatch_token_blocks<C>((segment.count + 7) / 8, gather);
      continue;
    }
    if (gate_up) {
      gather_rows<C, C::kGateUpColumns, C::kMaxTokens>(ring, at, rows, columns, item.count, lane,
                                                       element_of_entry);
    } else {
      gather_rows<C, C::kDownColumns, C::kMaxTokens>(ring, at, rows, columns, item.count, lane,
                                                     element_of_entry);
    }
    const int last = block.end_segment(tile.index);
    for (int i = block.first_segment(tile.index); i < last; i++) {
      const Segment s = block.lists.segments[i];
      const int rank = rank_of(s, gate_up);
      if (rank == 0) continue;
      wait_for_count((gate_up ? k.gate_up_v_ready : k.down_v_ready) + i,
                     ceil_div_int(rank, shrink_ranks(k, gate_up)));
      gather_rank_vectors<C>(ring, at, static_cast<const T*>(gate_up ? k.gate_up_v : k.down_v),
                             gate_up ? k.gate_up_v_ranks : k.down_v_ranks, gate_up ? 2 : 1, rank, s,
                             entries, lane);
    }
  }
}

}  // namespace moelora::fused_decode

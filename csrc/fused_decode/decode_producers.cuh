// The two warps that fill the ring: one lane streams weights, one warp gathers token rows. Both
// walk the same tiles and the same stages; a stage is full when both have delivered.
#pragma once

#include "decode_exchange.cuh"
#include "decode_schedule.cuh"

namespace moelora::fused_decode {

template <class C>
__device__ __forceinline__ int bytes_in_flight(const KernelParams& k) {
  return k.has_lora() ? C::kConfig.bytes_in_flight_with_lora : C::kConfig.bytes_in_flight;
}

// One lane. Takes tickets, announces tiles, streams weights and adapter matrices. It waits for
// stages of its own block only, never for another block's results.
template <class C>
class WeightStream {
 public:
  __device__ __forceinline__ WeightStream(const KernelParams& k, const TensorMaps& maps,
                                          const Block<C>& block)
      : k(k), maps(maps), block(block), policy(ptx::evict_first_policy()) {}

  // Before run(), and before there are lists: asks for the first weights of the first tile, a
  // gate_up tile of this expert, in at most so many stages from the ring's first on.
  __device__ __forceinline__ void start(const Tile& gate_up_tile, int expert, int free_stages) {
    count_from(k.p.hidden_size, C::kGateUpColumns);
    const int most = min(bytes_in_flight<C>(k) / C::kWeightBytes, free_stages);
    started_columns = min(static_cast<int>(k.p.hidden_size), most * C::kGateUpColumns);
    gate_up_rows(expert, gate_up_tile.block, 0, started_columns);
  }

  __device__ __forceinline__ void run(int ticket) {
    int n = 0;  // tiles announced
    for (;;) {
      const Tile tile = block.plan.tile(ticket);
      if (tile.kind == TileKind::kEnd) break;
      const bool is_started = started_columns > 0;
      const bool gate_up = is_gate_up(tile.kind);
      if (is_shrink(tile.kind)) {
        const Segment segment = block.lists.segments[tile.index];
        const int first_rank = rank_block<C>(tile) * shrink_ranks(k.p, gate_up);
        if (first_rank < rank_of(segment, gate_up)) {
          block.queue.push(n++, tile, at);
          shrink(tile, segment, first_rank, gate_up);
        }  // else beyond this slot's rank: no such tile
      } else {
        block.queue.push(n++, tile, is_started ? RingCursor{0, 0} : at);
        if (C::kDirect && !gate_up) {
          const int first = block.first_item(tile), end = block.end_item(tile);
          count_from(k.p.intermediate_size, C::kDownColumns, end - first);
#pragma unroll 1
          for (int i = first; i < end; i++) down(block.item(i).expert, tile.block);
          direct_expands(tile);
        } else if (gate_up) {
          if (!is_started) count_from(k.p.hidden_size, C::kGateUpColumns);
          gate_up_rows(block.item(tile.index).expert, tile.block, started_columns,
                       static_cast<int>(k.p.hidden_size));
          started_columns = 0;
          if (!C::kDirect) expands(tile.index, tile.block, true);
        } else {
          count_from(k.p.intermediate_size, C::kDownColumns);
          down(block.item(tile.index).expert, tile.block);
          expands(tile.index, tile.block, false);
        }
      }
      if (next_ticket < 0) take_ticket();
      ticket = next_ticket;
      next_ticket = -1;
    }
    // One end mark for every group.
    for (int g = 0; g < kConsumerGroups; g++) {
      block.queue.push(n++, {TileKind::kEnd, 0, 0}, at);
    }
  }

 private:
  const KernelParams& k;
  const TensorMaps& maps;
  const Block<C>& block;
  const uint64_t policy;
  RingCursor at = {0, 0}, landed = {0, 0};
  int in_flight = 0;
  int next_ticket = -1, stages_before_ticket = 0;
  int started_columns = 0;  // of the first tile, by start()
  uint32_t full, dst;       // of the stage being filled

  __device__ __forceinline__ void take_ticket() {
    next_ticket = static_cast<int>(atomicAdd(k.counters + kTicketCounter, 1u));
  }
  // The next ticket is taken early enough to hide the counter's latency, late enough to keep the
  // order of work: three stages before the end of a tile of so many columns, one or more times.
  __device__ __forceinline__ void count_from(int64_t columns, int stage_columns, int times = 1) {
    const int stages = ceil_div_int(static_cast<int>(columns), stage_columns);
    stages_before_ticket = max(times * stages - 3, 0);
  }
  __device__ __forceinline__ void count_stage() {
    if (stages_before_ticket-- == 0) take_ticket();
  }
  // Waits until a stage of `bytes` can join those whose weights are on their way. With all of a
  // large ring on its way every other access queues behind it: the last gate_up tiles' weights
  // behind other blocks' W2, and whatever one block waits for of another behind both.
  __device__ __forceinline__ void limit_in_flight(int bytes) {
    const int stages = block.ring.stages;
    const int most = bytes == 0 ? stages : min(bytes_in_flight<C>(k) / bytes, stages);
#pragma unroll 1
    for (; in_flight >= most; in_flight--) {
      ptx::mbarrier_wait(block.ring.weights_full(landed), landed.phase);
      landed.advance(block.ring.stages);
    }
    in_flight++;
  }
  __device__ __forceinline__ void begin_stage(int bytes) {
    limit_in_flight(bytes);
    full = block.ring.weights_full(at);
    dst = block.ring.weights + at.stage * C::kWeightBytes;
    block.ring.wait_empty(at);
    ptx::mbarrier_arrive_expect_tx(full, bytes);
  }
  __device__ __forceinline__ void end_stage() { at.advance(block.ring.stages); }

  __device__ __forceinline__ void shrink(const Tile& tile, const Segment& segment, int first_rank,
                                         bool gate_up) {
    const LoraStack& a = gate_up ? k.p.gate_up_a : k.p.down_a;
    const CUtensorMap* map = gate_up ? &maps.gate_up_a : &maps.down_a;
    const int expert = a.shared_outer ? 0 : block.item(segment.item).expert;
    const int stage_columns = C::shrink_columns((segment.count + 7) / 8);
    const ColumnRange range = shrink_range<C>(k.p, tile, stage_columns);
    count_from(range.end - range.begin, stage_columns);
#pragma unroll 1
    for (int c = range.begin; c < range.end; c += stage_columns) {
      count_stage();
      begin_stage(kShrinkRows * stage_columns * 2);
#pragma unroll 1
      for (int b = 0; b < stage_columns; b += 64) {
        ptx::tma_load_5d(dst + b * (kShrinkRows * 2), map, full, c + b, first_rank, 0, expert,
                         segment.slot, policy);
      }
      end_stage();
    }
  }
  __device__ __forceinline__ void gate_up_rows(int expert, int row_block, int begin, int end) {
    const int first = row_block * (C::kGateUpRows / 16);  // in blocks of 8 gate and 8 up rows
#pragma unroll 1
    for (int c = begin; c < end; c += C::kGateUpColumns) {
      count_stage();
      begin_stage(C::kGateUpRows * C::kGateUpColumns * 2);
      if (C::kGateUpColumns > 64 && k.w13_expert_blocks > 0) {
        ptx::tma_load_5d(dst, &maps.w13, full, 0, 0, 0, expert * k.w13_expert_blocks + first,
                         c / 64, policy);
      } else {
#pragma unroll
        for (int b = 0; b < C::kGateUpColumns; b += 64) {
          ptx::tma_load_5d(dst + b * (C::kGateUpRows * 2), &maps.w13, full, c + b, 0, 0, first,
                           expert, policy);
        }
      }
      end_stage();
    }
  }
  __device__ __forceinline__ void down(int expert, int row_block) {
    const int first = row_block * C::kDownRows;
#pragma unroll 1
    for (int c = 0; c < k.p.intermediate_size; c += C::kDownColumns) {
      count_stage();
      begin_stage(C::kDownRows * C::kDownColumns * 2);
      if (C::kDownColumns > 64 && k.w2_folded) {
        ptx::tma_load_4d(dst, &maps.w2, full, 0, first, c / 64, expert, policy);
      } else {
#pragma unroll
        for (int b = 0; b < C::kDownColumns; b += 64) {
          ptx::tma_load_4d(dst + b * (C::kDownRows * 2), &maps.w2, full, c + b, first, 0, expert,
                           policy);
        }
      }
      end_stage();
    }
  }
  // B of every segment of an item, 32 ranks a stage.
  __device__ __forceinline__ void expands(int item_index, int row_block, bool gate_up) {
    const int end = block.end_segment(item_index);
#pragma unroll 1
    for (int i = block.first_segment(item_index); i < end; i++) {
      const Segment segment = block.lists.segments[i];
      const int expert = block.item(item_index).expert;
      for (int r = 0; r < rank_of(segment, gate_up); r += kExpandColumns) {
        if (gate_up) {
          begin_stage(C::kGateUpRows * kExpandColumns * 2);
          ptx::tma_load_5d(dst, &maps.gate_up_b, full, r, 0, 0, row_block * (C::kGateUpRows / 16),
                           segment.slot * k.gate_up_b_slot_step + expert, policy);
        } else {
          begin_stage(C::kDownRows * kExpandColumns * 2);
          ptx::tma_load_4d(dst, &maps.down_b, full, r, row_block * C::kDownRows,
                           k.p.down_b.shared_outer ? 0 : expert, segment.slot, policy);
        }
        end_stage();
      }
    }
  }
  // The rank vectors of a direct tile come without weights: the consumers have read B themselves.
  __device__ __forceinline__ void direct_expands(const Tile& tile) {
    const int chunks = block.num_rank_chunks(tile);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += C::kDirectChunks) {
      begin_stage(0);
      end_stage();
    }
  }
};

// Which counters of a row of them have come to their end, 32 at a time: one look of a warp answers
// for 32 items or segments.
class ReadyCounters {
 public:
  __device__ __forceinline__ explicit ReadyCounters(const uint32_t* counters)
      : counters(counters) {}

  // All lanes. Waits until counter `index` of `count` is at target_of(index).
  template <class TargetOf>
  __device__ __forceinline__ void wait(int index, int count, int lane, TargetOf&& target_of) {
    if (index / 32 != window) {
      window = index / 32;
      ready = 0;
    }
    if (ready >> (index % 32) & 1) return;
    const int mine = window * 32 + lane;
    const uint32_t target = mine < count ? target_of(mine) : 0;
    while ((ready >> (index % 32) & 1) == 0) {
      ready = __ballot_sync(~0u, mine < count && ptx::load_acquire(counters + mine) >= target);
    }
    __syncwarp();  // what one lane has acquired, all may read
  }

 private:
  const uint32_t* counters;
  int window = -1;
  uint32_t ready = 0;
};

// One warp. Gathers rows of x, z and the rank vectors, after waiting for what other tiles make of
// them.
template <class C, class T>
class TokenStream {
 public:
  __device__ __forceinline__ TokenStream(const KernelParams& k, const Block<C>& block, int lane)
      : k(k),
        block(block),
        lane(lane),
        z(k.z_ready),
        gate_up_v(k.gate_up_v_ready),
        down_v(k.down_v_ready) {}

  __device__ __forceinline__ void run() {
    RingCursor tile_start;
    for (int n = 0;; n++) {
      const Tile tile = block.queue.wait(n, tile_start);
      __syncwarp();
      if (lane == 0) block.queue.release(n);
      switch (tile.kind) {
        case TileKind::kEnd:
          return;
        case TileKind::kGateUpShrink:
        case TileKind::kDownShrink:
          shrink(tile, block.lists.segments[tile.index]);
          break;
        case TileKind::kGateUp:
          gate_up(tile.index);
          if (!C::kDirect) expands(tile.index, true);
          break;
        case TileKind::kDown:
          down(tile.index);
          if (!C::kDirect) expands(tile.index, false);
          break;
        case TileKind::kDirectDown:
#pragma unroll 1
          for (int i = block.first_item(tile); i < block.end_item(tile); i++) down(i);
          if (C::kDirect) direct_expands(tile);
          break;
      }
    }
  }

 private:
  const KernelParams& k;
  const Block<C>& block;
  const int lane;
  RingCursor at = {0, 0};
  ReadyCounters z, gate_up_v, down_v;

  __device__ __forceinline__ uint32_t token_of(uint32_t entry) const {
    return static_cast<uint32_t>(k.token_of(pair_of(entry)));
  }
  __device__ __forceinline__ void wait_for_z(int item_index) {
    z.wait(item_index, block.plan.items, lane, [&](int) { return block.plan.gate_up_blocks; });
  }
  // The rank vectors of one segment.
  __device__ __forceinline__ void wait_for_v(int segment_index, bool gate_up) {
    (gate_up ? gate_up_v : down_v).wait(segment_index, block.plan.segments, lane, [&](int i) {
      return shrink_tiles(k.p, rank_of(block.lists.segments[i], gate_up), gate_up);
    });
  }

  // The columns `range` of `count` rows (at most kMaxRows), kColumns a stage, zeros from column
  // `columns` on. Row n of the stage comes from element_of(n) on and goes to row row_of(n); other
  // rows keep what the stage held.
  template <int kColumns, int kMaxRows, class ElementOf, class RowOf>
  __device__ __forceinline__ void gather(const T* matrix, ColumnRange range, int columns, int count,
                                         ElementOf&& element_of, RowOf&& row_of) {
    constexpr int kPitch = token_pitch(kColumns);
    constexpr int kChunks = kColumns / 8;  // of 16 bytes
    constexpr int kLanesPerRow = kChunks < 32 ? kChunks : 32;
    constexpr int kChunksPerLane = kChunks / kLanesPerRow;
    constexpr int kRowsPerPass = 32 / kLanesPerRow;
    constexpr int kPasses = (kMaxRows + kRowsPerPass - 1) / kRowsPerPass;
    const int first_row = lane / kLanesPerRow, first_column = lane % kLanesPerRow * 8;
    uint32_t element[kPasses], offset[kPasses];
#pragma unroll
    for (int q = 0; q < kPasses; q++) {
      const int n = min(first_row + q * kRowsPerPass, count - 1);
      element[q] = element_of(n) + first_column;
      offset[q] = row_of(n) * kPitch + first_column * 2;
    }
#pragma unroll 1
    for (int c = range.begin; c < range.end; c += kColumns) {
      const uint32_t dst = block.ring.tokens + at.stage * C::kTokenBytes;
      block.ring.wait_empty(at);
#pragma unroll
      for (int q = 0; q < kPasses; q++) {
        if (first_row + q * kRowsPerPass >= count) break;
#pragma unroll
        for (int d = 0; d < kChunksPerLane; d++) {
          const bool inside = c + first_column + d * 256 < columns;
          ptx::cp_async_16(dst + offset[q] + d * 512,
                           matrix + (inside ? element[q] + c + d * 256 : 0), inside ? 16 : 0);
        }
      }
      end_stage();
    }
  }
  __device__ __forceinline__ void end_stage() {
    ptx::cp_async_arrive(block.ring.tokens_full(at));
    at.advance(block.ring.stages);
  }

  __device__ __forceinline__ void shrink(const Tile& tile, const Segment& segment) {
    const bool gate_up = is_gate_up(tile.kind);
    const Item item = block.item(segment.item);
    const uint32_t* entries = block.lists.entries + item.start + segment.begin;
    const uint32_t x_stride = static_cast<uint32_t>(k.p.hidden_states_stride);
    const uint32_t inter = static_cast<uint32_t>(k.p.intermediate_size);
    if (!gate_up) wait_for_z(segment.item);
    const T* rows = static_cast<const T*>(gate_up ? k.p.hidden_states_ptr : k.z);
    const int columns = int(gate_up ? k.p.hidden_size : k.p.intermediate_size);
    const auto element_of = [&](int n) {
      return gate_up ? token_of(entries[n]) * x_stride : pair_of(entries[n]) * inter;
    };
    dispatch_token_blocks<C>((segment.count + 7) / 8, [&](auto blocks) {
      constexpr int kBlocks = decltype(blocks)::value;
      constexpr int kColumns = C::shrink_columns(kBlocks);
      gather<kColumns, C::stage_tokens(kBlocks)>(rows, shrink_range<C>(k.p, tile, kColumns),
                                                 columns, segment.count, element_of,
                                                 [](int n) { return n; });
    });
  }
  __device__ __forceinline__ void gate_up(int item_index) {
    const Item item = block.item(item_index);
    const uint32_t* entries = block.lists.entries + item.start;
    const uint32_t stride = static_cast<uint32_t>(k.p.hidden_states_stride);
    gather<C::kGateUpColumns, C::kMaxTokens>(
        static_cast<const T*>(k.p.hidden_states_ptr), {0, int(k.p.hidden_size)},
        int(k.p.hidden_size), item.count, [&](int n) { return token_of(entries[n]) * stride; },
        [](int n) { return n; });
  }
  __device__ __forceinline__ void down(int item_index) {
    const Item item = block.item(item_index);
    const uint32_t* entries = block.lists.entries + item.start;
    const uint32_t stride = static_cast<uint32_t>(k.p.intermediate_size);
    wait_for_z(item_index);
    gather<C::kDownColumns, C::kMaxTokens>(
        static_cast<const T*>(k.z), {0, int(k.p.intermediate_size)}, int(k.p.intermediate_size),
        item.count, [&](int n) { return pair_of(entries[n]) * stride; },
        [&](int n) { return C::kDirect ? int(token_of(entries[n])) : n; });
  }
  // The rank vectors of a direct tile, 32 ranks side by side for each chunk of a stage; rows are
  // tokens. Four lanes a chunk.
  __device__ __forceinline__ void direct_expands(const Tile& tile) {
    static_assert(!C::kDirect || C::kDirectChunks * 4 == 32, "a stage's chunks take all lanes");
    const int chunks = block.num_rank_chunks(tile);
#pragma unroll 1
    for (int first = 0; first < chunks; first += C::kDirectChunks) {
      const RankChunk chunk = block.rank_chunk(tile, first + lane / 4);
      block.ring.wait_empty(at);
      copy_vectors(chunk, lane % 4 * 8);
      ptx::mbarrier_arrive(block.ring.tokens_full(at));
      at.advance(block.ring.stages);
    }
  }
  // Copies 8 ranks of a chunk's vectors a lane, again until they have been written.
  __device__ __forceinline__ void copy_vectors(const RankChunk& chunk, int rank) {
    const Segment& segment = chunk.segment;
    const int rows = rank < padded_rank(chunk.ranks) ? int{segment.count} : 0;
    const uint32_t* entries =
        block.lists.entries + (rows > 0 ? block.item(segment.item).start + segment.begin : 0);
    const T* v = static_cast<const T*>(k.down_v) + chunk.first_rank + rank;
    const uint32_t dst = block.ring.tokens + at.stage * C::kTokenBytes + lane * 16;
    bool written;
    do {
#pragma unroll 1
      for (int n = 0; n < rows; n++) {
        ptx::cp_async_16(dst + token_of(entries[n]) * token_pitch(C::kDownColumns),
                         v + pair_of(entries[n]) * k.down_v_ranks, 16);
      }
      ptx::cp_async_wait_all();
      written = true;
#pragma unroll 1
      for (int n = 0; n < rows; n++) {
        const uint32_t row = dst + token_of(entries[n]) * token_pitch(C::kDownColumns);
        written = written && is_written(ptx::load_shared_16(row));
      }
    } while (!__all_sync(~0u, written));
  }
  // The rank vectors of every segment of an item into its rows of the expand stages: gate's ranks,
  // then (gate_up) up's. Ranks beyond the slot's, up to the next multiple of 16, are zeros in
  // memory.
  __device__ __forceinline__ void expands(int item_index, bool gate_up) {
    const uint32_t* entries = block.lists.entries + block.item(item_index).start;
    const T* v = static_cast<const T*>(gate_up ? k.gate_up_v : k.down_v);
    const int v_ranks = gate_up ? k.gate_up_v_ranks : k.down_v_ranks;
    const int components = gate_up ? 2 : 1;
    const int row = lane / 8, component = lane % 8 / 4, chunk = lane % 4;
    const int end = block.end_segment(item_index);
#pragma unroll 1
    for (int i = block.first_segment(item_index); i < end; i++) {
      const Segment segment = block.lists.segments[i];
      const int rank = rank_of(segment, gate_up);
      if (rank == 0) continue;
      wait_for_v(i, gate_up);
      for (int first = 0; first < rank; first += kExpandColumns) {
        const int width = min(padded_rank(rank - first), kExpandColumns);
        const uint32_t dst = block.ring.tokens + at.stage * C::kTokenBytes +
                             component * (kExpandColumns * 2) + chunk * 16;
        block.ring.wait_empty(at);
        if (component < components && chunk * 8 < width) {
          for (int n = segment.begin + row; n < segment.begin + segment.count; n += 4) {
            const int pair = pair_of(entries[n]);
            ptx::cp_async_16(dst + n * kExpandPitch,
                             v + (pair * components + component) * v_ranks + first + chunk * 8, 16);
          }
        }
        end_stage();
      }
    }
  }
};

}  // namespace moelora::fused_decode

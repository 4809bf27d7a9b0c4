// The adapters of direct configurations (few tokens), on the tiles' own threads. Every wait for
// another block costs such a short layer a microsecond or two, so there are as few as can be:
// gate_up shrinks are cut into parts that the epilogue of each tile adds up, and down shrinks have
// no tiles: each gate_up tile leaves A times its columns of z as a part, and the last tile of an
// expert adds those up. B is read to registers before a tile's products: copies of it by TMA, many
// short rows that come last, took a microsecond. Sums are always taken in one fixed order. Loops of
// no constant length stay rolled up: so short a layer runs most code once, and fetches it for that.
#pragma once

#include "decode_epilogue.cuh"
#include "decode_exchange.cuh"

namespace moelora::fused_decode {

// Where part `part` of a gate_up shrink leaves its sums.
template <class C>
__device__ __forceinline__ float2* gate_up_part(const KernelParams& k, int pair, int part,
                                                int component, int rank) {
  return reinterpret_cast<float2*>(
      static_cast<float*>(k.gate_up_v) +
      ((pair * C::kShrinkParts + part) * 2 + component) * k.gate_up_v_ranks + rank);
}
template <class C>
__device__ __forceinline__ void send_gate_up_part(const KernelParams& k, const float* sums,
                                                  const Tile& tile, const Segment& segment,
                                                  const uint32_t* item_entries, int thread) {
  for_each_rank_pair(k, true, rank_block<C>(tile), segment.count, thread,
                     [&](int n, int component, int rank, int first) {
                       const int pair = pair_of(item_entries[segment.begin + n]);
                       send(gate_up_part<C>(k, pair, tile.block % C::kShrinkParts, component, rank),
                            float_bits(read_shrink_sums<C>(k, sums, true, n, component, first)));
                     });
}

// v = scale * sum of the parts of one segment's down shrink, 16 ranks a warp at a time: every four
// lanes take every eighth part.
template <class C, class T>
__device__ __forceinline__ void send_down_vectors(const KernelParams& k, const Block<C>& block,
                                                  const Segment& segment, int thread) {
  constexpr int kBatch = 8, kSharers = 8;
  const uint32_t* entries = block.lists.entries + block.item(segment.item).start + segment.begin;
  const int parts = block.plan.gate_up_blocks, lane = thread % 32;
  const int steps = padded_rank(segment.down_rank) / 16;
  const float scale = k.p.scaling_ptr == nullptr ? 1.0f : k.p.scaling_ptr[3 * segment.slot + 2];
  // The last warp first: the first is still telling of z.
#pragma unroll 1
  for (int at = kGroupWarps - 1 - thread / 32; at < segment.count * steps; at += kGroupWarps) {
    const int pair = pair_of(entries[at / steps]), rank = at % steps * 16 + lane % 4 * 4;
    const float* first = k.down_parts + pair * parts * k.down_v_ranks + rank;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int b = lane / 4; b < parts; b += kBatch * kSharers) {
      uint4 part[kBatch];
      const int count = min(ceil_div_int(parts - b, kSharers), kBatch);
      receive(part, count, [&](int i) { return first + (b + i * kSharers) * k.down_v_ranks; });
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        if (i == count) break;
        sum.x += __uint_as_float(part[i].x), sum.y += __uint_as_float(part[i].y);
        sum.z += __uint_as_float(part[i].z), sum.w += __uint_as_float(part[i].w);
      }
    }
    __syncwarp();
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, distance);
      sum.y += __shfl_xor_sync(~0u, sum.y, distance);
      sum.z += __shfl_xor_sync(~0u, sum.z, distance);
      sum.w += __shfl_xor_sync(~0u, sum.w, distance);
    }
    if (lane < 4) {
      send(static_cast<T*>(k.down_v) + pair * k.down_v_ranks + rank,
           make_uint2(ptx::pack2<T>(scale * sum.x, scale * sum.y),
                      ptx::pack2<T>(scale * sum.z, scale * sum.w)));
    }
  }
}

// Eight neighbouring elements of B or A: zeros from element `ranks` on, because beyond a slot's
// rank memory may hold anything.
__device__ __forceinline__ uint4 mask_row(uint4 values, int ranks) {
  if (ranks >= 8) return values;
  uint32_t* words = reinterpret_cast<uint32_t*>(&values);
#pragma unroll
  for (int c = 0; c < 4; c++) {
    words[c] &= 2 * c + 1 < ranks ? ~0u : (2 * c < ranks ? 0xffffu : 0u);
  }
  return values;
}
template <class T>
__device__ __forceinline__ void unpack8(const uint4& row, float (&values)[8]) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    const float2 pair = ptx::unpack2<T>(words[c]);
    values[2 * c] = pair.x, values[2 * c + 1] = pair.y;
  }
}
// Eight such elements times fp32 values, added up.
template <class T>
__device__ __forceinline__ float dot8(const uint4& row, const float* values) {
  float own[8], sum = 0.0f;
  unpack8<T>(row, own);
#pragma unroll
  for (int c = 0; c < 8; c++) sum += own[c] * values[c];
  return sum;
}

// The adapter work of one gate_up tile by one consumer group. What a thread reads first of B and A
// is read before the tile's products.
template <class C, class T>
class DirectLora {
 public:
  __device__ __forceinline__ void prefetch(const KernelParams& params, const Block<C>& its_block,
                                           const Tile& its_tile, int thread) {
    k = &params, block = &its_block, tile = its_tile;
    first = block->first_segment(tile.index), end = block->end_segment(tile.index);
    if (first == end) return;
    const Segment segment = block->lists.segments[first];
    if (thread < segment.count * kRows) {
      const T* row = gate_up_b_row(segment, thread % kRows);
      if (row != nullptr) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          if (i * 8 < segment.gate_up_rank) b[i] = load8(row + i * 8);
        }
      }
    }
    const int ranks = padded_rank(segment.down_rank);
    if (thread < segment.count * ranks) load_down_a(segment, thread % ranks, a);
  }

  // The sums of all parts, scaled and rounded, to shared memory: fp32 [tokens, 2, kMaxRank].
  __device__ __forceinline__ void load_gate_up_vectors(float* sums, int thread) const {
    float* v = vectors(sums);
    const int ranks = k->gate_up_v_ranks;
#pragma unroll 1
    for (int i = first; i < end; i++) {
      const Segment segment = block->lists.segments[i];
#pragma unroll 1
      for (int at = thread; at < segment.count * ranks; at += kGroupThreads) {
        const int row = at / (ranks / 2), rank = at % (ranks / 2) * 2;
        const int n = segment.begin + row / 2, component = row % 2;
        float2 total = make_float2(0.0f, 0.0f);
        if (rank < segment.gate_up_rank) {
          uint2 sums_of_parts[C::kShrinkParts];
          receive(sums_of_parts, C::kShrinkParts,
                  [&](int part) { return gate_up_part<C>(*k, pair(n), part, component, rank); });
#pragma unroll
          for (int part = 0; part < C::kShrinkParts; part++) {
            total.x += __uint_as_float(sums_of_parts[part].x);
            total.y += __uint_as_float(sums_of_parts[part].y);
          }
          // The sum of a row beyond an odd rank, which may be NaN.
          if (rank + 1 == segment.gate_up_rank) total.y = 0.0f;
        }
        const float scale =
            k->p.scaling_ptr == nullptr ? 1.0f : k->p.scaling_ptr[3 * segment.slot + component];
        const float2 rounded = ptx::unpack2<T>(ptx::pack2<T>(scale * total.x, scale * total.y));
        *reinterpret_cast<float2*>(v + (n * 2 + component) * kMaxRank + rank) = rounded;
      }
    }
  }
  // Adds B v to the sums of the tile.
  __device__ __forceinline__ void add_gate_up(float* sums, int thread) const {
#pragma unroll 1
    for (int i = first; i < end; i++) {
      const Segment segment = block->lists.segments[i];
#pragma unroll 1
      for (int at = thread; at < segment.count * kRows; at += kGroupThreads) {
        const int n = segment.begin + at / kRows, row = at % kRows;
        const T* b_row = gate_up_b_row(segment, row);
        if (b_row == nullptr) continue;
        const float* v = vectors(sums) + (n * 2 + component_of(row)) * kMaxRank;
        float delta = 0.0f;
#pragma unroll 1
        for (int r = 0; r < segment.gate_up_rank; r += 8) {
          const bool is_prefetched = i == first && at == thread && r < 16;
          const uint4 values = !is_prefetched ? load8(b_row + r) : r == 0 ? b[0] : b[1];
          delta += dot8<T>(mask_row(values, segment.gate_up_rank - r), v + r);
        }
        sums[n * (kRows + 4) + row] += delta;
      }
    }
  }
  // A times the tile's columns of z.
  __device__ __forceinline__ void send_down_parts(const float* sums, int thread) const {
    const float* z = sums + C::kSumFloats;
#pragma unroll 1
    for (int i = first; i < end; i++) {
      const Segment segment = block->lists.segments[i];
      const int ranks = padded_rank(segment.down_rank);
#pragma unroll 1
      for (int at = thread; at < segment.count * ranks; at += kGroupThreads) {
        const int n = segment.begin + at / ranks, rank = at % ranks;
        uint4 row[2] = {a[0], a[1]};
        if (i != first || at != thread) load_down_a(segment, rank, row);
        float sum = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (rank >= segment.down_rank || !inside(half)) break;
          sum += dot8<T>(row[half], z + n * kColumns + half * 8);
        }
        const int part = pair(n) * block->plan.gate_up_blocks + tile.block;
        send(k->down_parts + part * k->down_v_ranks + rank, __float_as_uint(sum));
      }
    }
  }

 private:
  static constexpr int kRows = C::kGateUpRows, kColumns = kRows / 2;

  const KernelParams* k;
  const Block<C>* block;
  Tile tile;
  int first, end;  // segments of the tile's item
  uint4 b[2], a[2];

  __device__ __forceinline__ static float* vectors(float* sums) {
    return sums + C::kSumFloats + C::kMaxTokens * kColumns;
  }
  __device__ __forceinline__ static uint4 load8(const T* row) { return ptx::load_cg_16(row); }
  __device__ __forceinline__ int pair(int n) const {
    return pair_of(block->lists.entries[block->item(tile.index).start + n]);
  }
  // Is the half-th 8 of the tile's columns one of z's?
  __device__ __forceinline__ bool inside(int half) const {
    return tile.block * kColumns + half * 8 < k->p.intermediate_size;
  }
  // Rows of a tile come 8 of the first half, 8 of the second, and so on. 0: gate, 1: up.
  __device__ __forceinline__ int component_of(int row) const {
    return (row >> 3 & 1) ^ int { k->p.layout == GateUpLayout::kUpGate };
  }
  // The row of B (gate's rows, then up's) for a row of the tile, null beyond the last column.
  __device__ __forceinline__ const T* gate_up_b_row(const Segment& segment, int row) const {
    if (k->gate_up_rank == 0 || !inside(row / 16)) return nullptr;
    const LoraStack& stack = k->p.gate_up_b;
    const int column = tile.block * kColumns + row / 16 * 8 + (row & 7);
    const int b_row = component_of(row) * static_cast<int>(k->p.intermediate_size) + column;
    return static_cast<const T*>(stack.ptr) +
           row_begin(stack, segment.slot, block->item(tile.index).expert, b_row);
  }
  __device__ __forceinline__ void load_down_a(const Segment& segment, int rank,
                                              uint4 (&row)[2]) const {
    if (rank >= segment.down_rank) return;
    const LoraStack& stack = k->p.down_a;
    const T* columns = static_cast<const T*>(stack.ptr) +
                       row_begin(stack, segment.slot, block->item(tile.index).expert, rank) +
                       tile.block * kColumns;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (inside(half)) row[half] = load8(columns + half * 8);
    }
  }
};

// B v of one direct down tile by one consumer group: a row of a chunk a thread. The first stage's B
// is read before the tile's products.
template <class C, class T>
class DirectDownLora {
 public:
  __device__ __forceinline__ DirectDownLora(const KernelParams& k, const Block<C>& block,
                                            const Tile& tile, int thread)
      : k(k), block(block), tile(tile), row(thread % kRows), place(thread / kRows) {
    static_assert(kGroupThreads == kRows * C::kDirectChunks, "a stage's chunks take all threads");
    num_chunks = block.num_rank_chunks(tile);
    if (num_chunks > 0) fetch(0);
  }

  // Calls with_stage(body) for each stage of rank vectors.
  template <class WithStage>
  __device__ __forceinline__ void add(WithStage&& with_stage) {
#pragma unroll 1
    for (int first = 0; first < num_chunks; first += C::kDirectChunks) {
      if (first > 0) fetch(first);
      with_stage([&](uint32_t, uint32_t tokens) { add_stage(tokens); });
    }
  }
  // To the sums [tokens, rows + 4] that this warp has stored.
  __device__ __forceinline__ void add_to(float* plane) const {
    if (num_chunks == 0) return;
    __syncwarp();
#pragma unroll
    for (int t = 0; t < C::kMaxTokens; t++) {
      const float sum = sums[t] + __shfl_xor_sync(~0u, sums[t], kRows);
      if (t < k.p.num_tokens && place % 2 == 0) plane[t * (kRows + 4) + row] += sum;
    }
  }

 private:
  static constexpr int kRows = C::kDownRows, kLoads = kExpandColumns / 8;
  static_assert(kLoads == 4, "what sums are written for");
  static_assert(!C::kDirect || kRows == 16, "two chunks a warp");

  const KernelParams& k;
  const Block<C>& block;
  const Tile tile;
  const int row, place;  // of the tile's; of the stage's chunks
  int num_chunks, ranks;
  uint4 b[kLoads];
  uint32_t token_mask;
  const float* weights;  // of the router, by token
  float sums[C::kMaxTokens] = {};

  __device__ __forceinline__ void fetch(int first_chunk) {
    const RankChunk chunk = block.rank_chunk(tile, first_chunk + place);
    const int column = tile.block * kRows + row;
    ranks = column < k.p.hidden_size ? chunk.ranks : 0;
    if (ranks == 0) return;
    const Item item = block.item(chunk.segment.item);
    const T* from = static_cast<const T*>(k.p.down_b.ptr) + chunk.first_rank +
                    row_begin(k.p.down_b, chunk.segment.slot, item.expert, column);
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      if (i * 8 < ranks) b[i] = ptx::load_cg_16(from + i * 8);
    }
    weights = block.lists.direct_items[chunk.segment.item].weights;
    const uint32_t* entries = block.lists.entries + item.start + chunk.segment.begin;
    token_mask = 0;
#pragma unroll 1
    for (int n = 0; n < chunk.segment.count; n++) {
      token_mask |= 1u << k.token_of(pair_of(entries[n]));
    }
  }
  // Rows of the stage are tokens, with the chunks side by side.
  __device__ __forceinline__ void add_stage(uint32_t tokens) {
    if (ranks == 0) return;
#pragma unroll 1
    for (uint32_t left = token_mask; left != 0; left &= left - 1) {
      const int token = __ffs(left) - 1;
      const uint32_t v =
          tokens + token * token_pitch(C::kDownColumns) + place * (kExpandColumns * 2);
      float sum[kLoads] = {};
#pragma unroll
      for (int i = 0; i < kLoads; i++) {
        if (i * 8 >= ranks) break;
        float values[8];
        unpack8<T>(ptx::load_shared_16(v + i * 16), values);
        sum[i] = dot8<T>(mask_row(b[i], ranks - i * 8), values);
      }
      const float weighted = weights[token] * ((sum[0] + sum[1]) + (sum[2] + sum[3]));
#pragma unroll
      for (int t = 0; t < C::kMaxTokens; t++) {
        if (t == token) sums[t] += weighted;
      }
    }
  }
};

}  // namespace moelora::fused_decode

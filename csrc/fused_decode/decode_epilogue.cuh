// From a group's fp32 sums in shared memory to rank vectors, z and y in the workspace. All are
// indexed by pair, so nothing is sorted or permuted.
#pragma once

#include "../activation/activation_math.h"
#include "decode_mma.cuh"

namespace moelora::fused_decode {

constexpr int kGroupThreads = kGroupWarps * 32;

template <class T>
__device__ __forceinline__ float2 load_bias2(const void* bias, int64_t element) {
  return ptx::unpack2<T>(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(bias) + element));
}

// Calls visit(n, component, rank, first) for every two neighbouring ranks that a shrink tile holds
// of a segment's vectors: pair n of the segment, gate's or up's vector, the rank, and its place
// among the tile's ranks.
template <class Visit>
__device__ __forceinline__ void for_each_rank_pair(const KernelParams& k, bool gate_up,
                                                   int rank_block, int count, int thread,
                                                   Visit&& visit) {
  const int covered = shrink_ranks(k.p, gate_up), components = gate_up ? 2 : 1;
  const int v_ranks = gate_up ? k.gate_up_v_ranks : k.down_v_ranks;
  const int pairs_per_row = covered / 2;
#pragma unroll 1
  for (int i = thread; i < count * components * pairs_per_row; i += kGroupThreads) {
    const int first = i % pairs_per_row * 2, row = i / pairs_per_row;
    const int rank = rank_block * covered + first;
    if (rank < v_ranks) visit(row / components, row % components, rank, first);
  }
}
// The sums of a shrink tile for those.
template <class C>
__device__ __forceinline__ float2 read_shrink_sums(const KernelParams& k, const float* sums,
                                                   bool gate_up, int n, int component, int first) {
  const int covered = shrink_ranks(k.p, gate_up);
  // With an A of each, the tile holds 16 rows of gate's, then 16 of up's.
  const int row = gate_up && covered < kShrinkRows ? component * covered + first : first;
  return read_sums2<C, kShrinkRows>(sums, n, row);
}

// v = scale * A x of one segment, zero from the slot's rank up to the next multiple of 16. Gate's
// and up's vectors are both stored, scaled by their own factors, where they share one A as well.
template <class C, class T>
__device__ __forceinline__ void store_rank_vectors(const KernelParams& k, const float* sums,
                                                   bool gate_up, int rank_block,
                                                   const Segment& segment,
                                                   const uint32_t* item_entries, int thread) {
  const int slot_rank = rank_of(segment, gate_up), components = gate_up ? 2 : 1;
  const int v_ranks = gate_up ? k.gate_up_v_ranks : k.down_v_ranks;
  T* v = static_cast<T*>(gate_up ? k.gate_up_v : k.down_v);
  const float* scaling =
      k.p.scaling_ptr == nullptr ? nullptr : k.p.scaling_ptr + 3 * segment.slot + (gate_up ? 0 : 2);
  for_each_rank_pair(
      k, gate_up, rank_block, segment.count, thread,
      [&](int n, int component, int rank, int first) {
        const float2 sum = read_shrink_sums<C>(k, sums, gate_up, n, component, first);
        const float scale = scaling == nullptr ? 1.0f : scaling[component];
        const uint32_t value = ptx::pack2<T>(rank < slot_rank ? scale * sum.x : 0.0f,
                                             rank + 1 < slot_rank ? scale * sum.y : 0.0f);
        const int pair = pair_of(item_entries[segment.begin + n]);
        *reinterpret_cast<uint32_t*>(v + (pair * components + component) * v_ranks + rank) = value;
      });
}

// z = act(gate, up) of one gate_up tile; where tiles are direct also into shared memory, after the
// sums: fp32 [tokens, columns of the tile], of the rounded values.
template <class C, class T>
__device__ __forceinline__ void store_z(const KernelParams& k, float* sums, int block,
                                        const Item& item, const uint32_t* entries, int thread) {
  const FusedDecodeParams& p = k.p;
  const int inter = static_cast<int>(p.intermediate_size);
  constexpr int kColumnPairs = C::kGateUpRows / 4;
  const bool up_first = p.layout == GateUpLayout::kUpGate;
  const bool interleaved = p.layout == GateUpLayout::kInterleaved;
  T* z = static_cast<T*>(k.z);
#pragma unroll 1
  for (int i = thread; i < item.count * kColumnPairs; i += kGroupThreads) {
    const int n = i / kColumnPairs, j = i % kColumnPairs * 2;
    const int column = block * (C::kGateUpRows / 2) + j;
    if (column >= inter) continue;
    // Rows of a tile come 8 of the first half, 8 of the second, and so on.
    const int row = (j >> 3) * 16 + (j & 7);
    float2 gate = read_sums2<C, C::kGateUpRows>(sums, n, row);
    float2 up = read_sums2<C, C::kGateUpRows>(sums, n, row + 8);
    if (up_first) {
      const float2 first = gate;
      gate = up;
      up = first;
    }
    const int pair = pair_of(entries[n]);
    if (p.weight_on_input) {
      const float w = matrix_element(p.weights, pair, 0);  // K = 1
      gate.x *= w, gate.y *= w, up.x *= w, up.y *= w;
    }
    if (p.w13_bias_ptr != nullptr) {
      const int64_t base = int64_t{item.expert} * 2 * inter;
      float2 gate_bias, up_bias;
      if (interleaved) {
        const float2 first = load_bias2<T>(p.w13_bias_ptr, base + 2 * column);
        const float2 second = load_bias2<T>(p.w13_bias_ptr, base + 2 * column + 2);
        gate_bias = make_float2(first.x, second.x);
        up_bias = make_float2(first.y, second.y);
      } else {
        gate_bias = load_bias2<T>(p.w13_bias_ptr, base + column + (up_first ? inter : 0));
        up_bias = load_bias2<T>(p.w13_bias_ptr, base + column + (up_first ? 0 : inter));
      }
      gate.x += gate_bias.x, gate.y += gate_bias.y, up.x += up_bias.x, up.y += up_bias.y;
    }
    const float z0 = gated_activation(p.activation, gate.x, up.x, p.alpha, p.limit);
    const float z1 = gated_activation(p.activation, gate.y, up.y, p.alpha, p.limit);
    const uint32_t rounded = ptx::pack2<T>(z0, z1);
    *reinterpret_cast<uint32_t*>(z + int64_t{pair} * inter + column) = rounded;
    if constexpr (C::kDirect) {
      *reinterpret_cast<float2*>(sums + C::kSumFloats + n * (C::kGateUpRows / 2) + j) =
          ptx::unpack2<T>(rounded);
    }
  }
}

// y = W2 z + b2 + adapter of one down tile.
template <class C, class T>
__device__ __forceinline__ void store_y(const KernelParams& k, const float* sums, int block,
                                        const Item& item, const uint32_t* entries, int thread) {
  const int hidden = static_cast<int>(k.p.hidden_size);
  constexpr int kQuads = C::kDownRows / 4;
  T* y = static_cast<T*>(k.y);
#pragma unroll 1
  for (int i = thread; i < item.count * kQuads; i += kGroupThreads) {
    const int n = i / kQuads, j = i % kQuads * 4;
    const int column = block * C::kDownRows + j;
    if (column >= hidden) continue;
    float2 low = read_sums2<C, C::kDownRows>(sums, n, j);
    float2 high = read_sums2<C, C::kDownRows>(sums, n, j + 2);
    if (k.p.w2_bias_ptr != nullptr) {
      const int64_t base = int64_t{item.expert} * hidden + column;
      const float2 b0 = load_bias2<T>(k.p.w2_bias_ptr, base);
      const float2 b1 = load_bias2<T>(k.p.w2_bias_ptr, base + 2);
      low.x += b0.x, low.y += b0.y, high.x += b1.x, high.y += b1.y;
    }
    *reinterpret_cast<uint2*>(y + int64_t{pair_of(entries[n])} * hidden + column) =
        make_uint2(ptx::pack2<T>(low.x, low.y), ptx::pack2<T>(high.x, high.y));
  }
}

// One direct tile: 16 rows of `out` for every token, or this piece's share of them. Of several
// pieces each leaves its fp32 sums in the workspace, and the last to arrive adds them up in the
// order of the pieces, so that the bits do not depend on who came last.
template <class C, class T>
__device__ __forceinline__ void store_direct(const KernelParams& k, const Block<C>& block,
                                             const float* sums, const Tile& tile, int group,
                                             int thread) {
  const FusedDecodeParams& p = k.p;
  const int hidden = static_cast<int>(p.hidden_size), tokens = static_cast<int>(p.num_tokens);
  constexpr int kPairs = C::kDownRows / 2;
  const int token = thread / kPairs, j = thread % kPairs * 2;
  const int column = tile.block * C::kDownRows + j;
  const bool inside = token < tokens && column < hidden;
  const auto store_out = [&](float2 value) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out_ptr) + int64_t{token} * p.out_stride +
                                 column) =
        ptx::pack2<T>(p.routed_scaling_factor * value.x, p.routed_scaling_factor * value.y);
  };
  float2 total = make_float2(0.0f, 0.0f);
  if (inside) {
    total = read_sums2<C, C::kDownRows>(sums, token, j);
    if (p.w2_bias_ptr != nullptr) {
#pragma unroll 1
      for (int i = block.first_item(tile); i < block.end_item(tile); i++) {
        const DirectItem& direct = block.lists.direct_items[i];
        if ((direct.token_mask >> token & 1) == 0) continue;
        const float2 bias =
            load_bias2<T>(p.w2_bias_ptr, int64_t{block.item(i).expert} * hidden + column);
        total.x += direct.weights[token] * bias.x;
        total.y += direct.weights[token] * bias.y;
      }
    }
  }
  if (block.plan.pieces == 1) {
    if (inside) store_out(total);
    return;
  }
  float* partial = static_cast<float*>(k.y) + int64_t{token} * hidden + column;
  const int64_t piece_stride = int64_t{tokens} * hidden;
  if (inside) *reinterpret_cast<float2*>(partial + tile.index * piece_stride) = total;
  ptx::named_barrier(1 + group, kGroupThreads);
  const bool last = thread == 0 && ptx::add_acquire_release(k.row_blocks_done + tile.block) + 1 ==
                                       static_cast<uint32_t>(block.plan.pieces);
  if (!ptx::named_barrier_or(1 + group, kGroupThreads, last) || !inside) return;
  total = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (int piece = 0; piece < block.plan.pieces; piece++) {
    const float2 value = __ldcg(reinterpret_cast<const float2*>(partial + piece * piece_stride));
    total.x += value.x;
    total.y += value.y;
  }
  store_out(total);
}

}  // namespace moelora::fused_decode

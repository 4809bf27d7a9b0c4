// Tensor maps of the weights and adapters, made on the host at each launch.
#pragma once

#include "../common/tensor_map.h"
#include "decode_layout.h"

namespace moelora::fused_decode {

// All but an A or B of all experts are read once a call; all leave L2 first.
template <int kDims>
CUtensorMap encode_map(const void* ptr, DType dtype, int swizzle_bytes,
                       const MapDim (&dims)[kDims]) {
  return encode_tensor_map<kDims>(ptr, dtype, swizzle_bytes, /*evict_first=*/true, dims);
}

// Stages of more than 64 columns take one copy instruction where the map can step over blocks of 64
// columns: whole blocks only, and for w13 experts at whole row blocks (it has no sixth dimension).
inline bool w2_folds(const FusedDecodeParams& p) { return p.intermediate_size % 64 == 0; }
// Row blocks (of 8 gate and 8 up rows) from one expert to the next, 0 where w13 does not fold.
inline int64_t w13_expert_blocks(const FusedDecodeParams& p) {
  const int64_t inter = p.intermediate_size;
  if (p.hidden_size % 64 != 0) return 0;
  if (p.num_local_experts > 1 && p.w13.expert_stride != 2 * inter * p.w13.row_stride) return 0;
  return p.layout == GateUpLayout::kInterleaved ? inter / 8 : inter / 4;
}

// gate_up weights as rows of 8 gate, 8 up (8 up, 8 gate where up comes first in memory), so that a
// gate and its up lie in one thread's accumulators whatever the layout.
inline CUtensorMap gate_up_weight_map(const FusedDecodeParams& p, int rows, int columns) {
  const int64_t row = p.w13.row_stride, inter = p.intermediate_size;
  const bool interleaved = p.layout == GateUpLayout::kInterleaved;
  const MapDim eight_rows = {8, interleaved ? 2 * row : row, 8};
  const MapDim gate_and_up = {2, interleaved ? row : inter * row, 2};
  const int64_t block_stride = interleaved ? 16 * row : 8 * row;
  if (columns > 64 && w13_expert_blocks(p) > 0) {
    const int64_t blocks = (p.num_local_experts - 1) * w13_expert_blocks(p) + inter / 8;
    return encode_map<5>(p.w13.ptr, p.dtype, 128,
                         {{64, 1, 64},
                          eight_rows,
                          gate_and_up,
                          {blocks, block_stride, rows / 16},
                          {p.hidden_size / 64, 64, columns / 64}});
  }
  return encode_map<5>(p.w13.ptr, p.dtype, 128,
                       {{p.hidden_size, 1, 64},
                        eight_rows,
                        gate_and_up,
                        {inter / 8, block_stride, rows / 16},
                        {p.num_local_experts, p.w13.expert_stride, 1}});
}
inline CUtensorMap down_weight_map(const FusedDecodeParams& p, int rows, int columns) {
  const MapDim down_rows = {p.hidden_size, p.w2.row_stride, rows};
  const MapDim experts = {p.num_local_experts, p.w2.expert_stride, 1};
  if (columns > 64 && w2_folds(p)) {
    return encode_map<4>(
        p.w2.ptr, p.dtype, 128,
        {{64, 1, 64}, down_rows, {p.intermediate_size / 64, 64, columns / 64}, experts});
  }
  return encode_map<4>(p.w2.ptr, p.dtype, 128,
                       {{p.intermediate_size, 1, 64}, down_rows, {1, 64, 1}, experts});
}

// A of either part: a box holds kShrinkRows rows, split evenly between gate's A and up's.
inline CUtensorMap shrink_map(const FusedDecodeParams& p, const LoraStack& a, int64_t columns,
                              int rank, int components) {
  return encode_map<5>(a.ptr, p.dtype, 128,
                       {{columns, 1, 64},
                        {rank, a.row_stride, kShrinkRows / components},
                        {components, rank * a.row_stride, components},
                        {a.shared_outer ? 1 : p.num_local_experts, a.expert_stride, 1},
                        {p.slots.num_slots, a.slot_stride, 1}});
}

// gate_up B takes all five dimensions for rank and rows, so slots and experts share the last one:
// matrix (s, e) is number s * gate_up_b_slot_step + e.
inline int64_t gate_up_b_slot_step(const FusedDecodeParams& p) {
  if (p.num_local_experts == 1) return 1;
  if (p.slots.num_slots == 1) return p.num_local_experts;
  return p.gate_up_b.slot_stride / p.gate_up_b.expert_stride;
}
inline CUtensorMap gate_up_b_map(const FusedDecodeParams& p, int rows) {
  const LoraStack& b = p.gate_up_b;
  const int64_t matrices = (p.slots.num_slots - 1) * gate_up_b_slot_step(p) + p.num_local_experts;
  return encode_map<5>(b.ptr, p.dtype, 64,
                       {{p.gate_up_rank, 1, kExpandColumns},
                        {8, b.row_stride, 8},
                        {2, p.intermediate_size * b.row_stride, 2},
                        {p.intermediate_size / 8, 8 * b.row_stride, rows / 16},
                        {matrices, p.num_local_experts == 1 ? b.slot_stride : b.expert_stride, 1}});
}
inline CUtensorMap down_b_map(const FusedDecodeParams& p, int rows) {
  const LoraStack& b = p.down_b;
  return encode_map<4>(p.down_b.ptr, p.dtype, 64,
                       {{p.down_rank, 1, kExpandColumns},
                        {p.hidden_size, b.row_stride, rows},
                        {b.shared_outer ? 1 : p.num_local_experts, b.expert_stride, 1},
                        {p.slots.num_slots, b.slot_stride, 1}});
}

}  // namespace moelora::fused_decode

// The op lora_shrink: A x by pair, or by token where A is shared outer.
#include "lora_shrink.h"

#include "../ops.h"

namespace moelora {
namespace {

// Rows of x: [T, in] is one a token, [T, K, in] one a pair.
struct InputRows {
  int64_t stride, in_features;
};

InputRows input_rows(const Tensor& x, int64_t num_tokens, int64_t top_k) {
  check_value(x.dim() == 2 || x.dim() == 3, "x: expected shape [T, in] or [T, K, in], got ",
              shape_string(x));
  check_last_dim_contiguous(x, "x");
  check_aligned(x, "x");
  if (x.dim() == 2) {
    check_shape(x, "x", {num_tokens, -1});
    return {x.stride(0), x.size(1)};
  }
  check_shape(x, "x", {num_tokens, top_k, -1});
  check_value(num_tokens <= 1 || top_k == 1 || x.stride(0) == top_k * x.stride(1),
              "x: expected evenly spaced rows, got strides ", x.stride(0), " and ", x.stride(1));
  return {top_k == 1 ? x.stride(0) : x.stride(1), x.size(2)};
}

// v has one row a token where A is the same for all pairs of the token, and so is x; else one a
// pair.
int64_t num_rank_vectors(const Tensor& x, const Tensor& lora_a, int64_t num_tokens, int64_t top_k) {
  return lora_a.size(1) == 1 && x.dim() == 2 ? num_tokens : num_tokens * top_k;
}

}  // namespace

void lora_shrink_out(const Tensor& x, const Tensor& lora_a, const Tensor& topk_ids,
                     const OptionalTensor& adapter_ids, const OptionalTensor& ranks, int64_t rank,
                     int64_t part, int64_t num_local_experts, int64_t expert_offset,
                     const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                     const OptionalTensor& tile_row_limit, Tensor out) {
  const DType dtype = model_dtype(x, "x");
  const IdMatrix ids = id_matrix(topk_ids, "topk_ids", x);
  const int64_t num_tokens = topk_ids.size(0), top_k = topk_ids.size(1);
  const InputRows rows = input_rows(x, num_tokens, top_k);
  check_value(rows.in_features % 8 == 0, "x: expected a row size that is a multiple of 8, got ",
              shape_string(x));
  check_value(part == 0 || part == 1, "part: unknown code ", part);
  check_value(rank >= 1 && rank <= kMaxRank, "rank: expected 1 to ", kMaxRank, ", got ", rank);
  check_value(num_local_experts >= 1 && num_local_experts <= kMaxExperts,
              "num_local_experts: expected 1 to ", kMaxExperts, ", got ", num_local_experts);
  check_value(expert_offset >= 0 && expert_offset <= INT32_MAX - kMaxExperts,
              "expert_offset: expected a global expert id, got ", expert_offset);

  check_shape(lora_a, "lora_a", {-1, -1, -1, rows.in_features});
  check_dtype(lora_a, "lora_a", x.scalar_type());
  check_same_device(lora_a, "lora_a", x, "x");
  check_last_dim_contiguous(lora_a, "lora_a");
  const bool shared_outer = lora_a.size(1) == 1;
  check_value((shared_outer && part == 0) || lora_a.size(1) == num_local_experts,
              "lora_a: expected ", num_local_experts, part == 0 ? " or 1 experts" : " experts",
              " in dim 1, got ", shape_string(lora_a));
  check_value(lora_a.size(2) == rank || (part == 0 && lora_a.size(2) == 2 * rank),
              "lora_a: expected ", rank, part == 0 ? " or twice as many" : "",
              " rows (rank) in dim 2, got ", shape_string(lora_a));
  check_out(out, "out", {num_rank_vectors(x, lora_a, num_tokens, top_k), lora_a.size(2)},
            ScalarType::Float, x);
  check_value(reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 16 == 0,
              "out: expected a 16-byte aligned base pointer");
  check_no_overlap(out, "out", x, "x");
  check_no_overlap(out, "out", lora_a, "lora_a");
  check_no_overlap(out, "out", topk_ids, "topk_ids");
  if (adapter_ids.has_value()) check_no_overlap(out, "out", *adapter_ids, "adapter_ids");

  LoraShrinkParams params;
  params.x_ptr = x.const_data_ptr();
  params.x_stride = rows.stride;
  params.lora_a_ptr = lora_a.const_data_ptr();
  params.slot_stride = lora_a.stride(0);
  params.expert_stride = lora_a.stride(1);
  params.row_stride = lora_a.stride(2);
  params.shared_outer = shared_outer;
  params.v_ptr = static_cast<float*>(out.mutable_data_ptr());
  params.ids = ids;
  params.slots = slot_view(adapter_ids, ranks, lora_a.size(0), num_tokens, x);
  params.part = static_cast<LoraPart>(part);
  params.maps = row_maps(permuted_to_expanded, tile_expert, tile_row_limit, x);
  params.num_tokens = num_tokens;
  params.in_features = rows.in_features;
  params.x_by_pair = x.dim() == 3;
  params.top_k = static_cast<int32_t>(top_k);
  params.rank = static_cast<int32_t>(rank);
  params.num_components = static_cast<int32_t>(lora_a.size(2) / rank);
  params.num_local_experts = static_cast<int32_t>(num_local_experts);
  params.expert_offset = static_cast<int32_t>(expert_offset);
  params.dtype = dtype;
  if (out.numel() == 0) return;
  run_on_device(x, params, lora_shrink_cpu, launch_lora_shrink);
}

Tensor lora_shrink(const Tensor& x, const Tensor& lora_a, const Tensor& topk_ids,
                   const OptionalTensor& adapter_ids, const OptionalTensor& ranks, int64_t rank,
                   int64_t part, int64_t num_local_experts, int64_t expert_offset,
                   const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                   const OptionalTensor& tile_row_limit) {
  check_shape(topk_ids, "topk_ids", {-1, -1});
  check_shape(lora_a, "lora_a", {-1, -1, -1, -1});
  const int64_t num_rows = num_rank_vectors(x, lora_a, topk_ids.size(0), topk_ids.size(1));
  Tensor out = new_tensor(x, {num_rows, lora_a.size(2)}, ScalarType::Float);
  lora_shrink_out(x, lora_a, topk_ids, adapter_ids, ranks, rank, part, num_local_experts,
                  expert_offset, permuted_to_expanded, tile_expert, tile_row_limit, out);
  return out;
}

}  // namespace moelora

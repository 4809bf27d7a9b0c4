// The op lora_expand: B v by pair, scaled, every element of the delta written.
#include "lora_expand.h"

#include "../ops.h"

namespace moelora {

void lora_expand_out(const Tensor& v, const Tensor& lora_b, const Tensor& topk_ids,
                     const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
                     const OptionalTensor& scaling, const OptionalTensor& row_weights, int64_t part,
                     int64_t num_local_experts, int64_t expert_offset,
                     const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                     const OptionalTensor& tile_row_limit, Tensor out) {
  const DType dtype = model_dtype(lora_b, "lora_b");
  check_shape(lora_b, "lora_b", {-1, -1, -1, -1});
  check_last_dim_contiguous(lora_b, "lora_b");
  const int64_t num_slots = lora_b.size(0), out_features = lora_b.size(2), rank = lora_b.size(3);
  const IdMatrix ids = id_matrix(topk_ids, "topk_ids", lora_b);
  const int64_t num_tokens = topk_ids.size(0), top_k = topk_ids.size(1);
  check_value(part == 0 || part == 1, "part: unknown code ", part);
  check_value(rank >= 1 && rank <= kMaxRank, "lora_b: expected a rank of 1 to ", kMaxRank,
              " in dim 3, got ", shape_string(lora_b));
  check_value(out_features % (part == 0 ? 16 : 8) == 0, "lora_b: expected a multiple of ",
              part == 0 ? 16 : 8, " rows in dim 2, got ", shape_string(lora_b));
  check_value(num_local_experts >= 1 && num_local_experts <= kMaxExperts,
              "num_local_experts: expected 1 to ", kMaxExperts, ", got ", num_local_experts);
  check_value(expert_offset >= 0 && expert_offset <= INT32_MAX - kMaxExperts,
              "expert_offset: expected a global expert id, got ", expert_offset);
  const bool shared_outer = lora_b.size(1) == 1;
  check_value((shared_outer && part == 1) || lora_b.size(1) == num_local_experts,
              "lora_b: expected ", num_local_experts, part == 1 ? " or 1 experts" : " experts",
              " in dim 1, got ", shape_string(lora_b));

  check_shape(v, "v", {-1, -1});
  check_dtype(v, "v", ScalarType::Float);
  check_same_device(v, "v", lora_b, "lora_b");
  check_contiguous(v, "v");
  check_value(reinterpret_cast<uintptr_t>(v.const_data_ptr()) % 16 == 0,
              "v: expected a 16-byte aligned base pointer");
  check_value(v.size(0) == num_tokens || v.size(0) == num_tokens * top_k, "v: expected ",
              num_tokens, " (T) or ", num_tokens * top_k, " (T * K) rows, got ", shape_string(v));
  check_value(v.size(1) == rank || (part == 0 && v.size(1) == 2 * rank), "v: expected ", rank,
              part == 0 ? " columns (lora_b's rank) or twice as many" : " columns (lora_b's rank)",
              ", got ", shape_string(v));
  check_out(out, "out", {num_tokens, top_k, out_features}, lora_b.scalar_type(), lora_b);
  check_aligned(out, "out");
  check_no_overlap(out, "out", v, "v");
  check_no_overlap(out, "out", lora_b, "lora_b");
  check_no_overlap(out, "out", topk_ids, "topk_ids");
  if (adapter_ids.has_value()) check_no_overlap(out, "out", *adapter_ids, "adapter_ids");

  LoraExpandParams params;
  params.v_ptr = static_cast<const float*>(v.const_data_ptr());
  params.v_stride = v.size(1);
  params.lora_b_ptr = lora_b.const_data_ptr();
  params.slot_stride = lora_b.stride(0);
  params.expert_stride = lora_b.stride(1);
  params.row_stride = lora_b.stride(2);
  params.shared_outer = shared_outer;
  params.v_per_token = v.size(0) == num_tokens;
  params.scaling_ptr = nullptr;
  if (scaling.has_value()) {
    check_out(*scaling, "scaling", {num_slots, 3}, ScalarType::Float, lora_b);
    params.scaling_ptr = static_cast<const float*>(scaling->const_data_ptr());
  }
  params.row_weights = unit_weights(top_k);
  if (row_weights.has_value()) {
    params.row_weights = weight_matrix(*row_weights, "row_weights", ids, num_tokens, lora_b);
    check_no_overlap(out, "out", *row_weights, "row_weights");
  }
  params.delta_ptr = out.mutable_data_ptr();
  params.ids = ids;
  params.slots = slot_view(adapter_ids, ranks, num_slots, num_tokens, lora_b);
  params.part = static_cast<LoraPart>(part);
  params.maps = row_maps(permuted_to_expanded, tile_expert, tile_row_limit, lora_b);
  params.num_tokens = num_tokens;
  params.out_features = out_features;
  params.top_k = static_cast<int32_t>(top_k);
  params.rank = static_cast<int32_t>(rank);
  params.v_columns = static_cast<int32_t>(v.size(1));
  params.num_local_experts = static_cast<int32_t>(num_local_experts);
  params.expert_offset = static_cast<int32_t>(expert_offset);
  params.dtype = dtype;
  if (out.numel() == 0) return;
  run_on_device(lora_b, params, lora_expand_cpu, launch_lora_expand);
}

Tensor lora_expand(const Tensor& v, const Tensor& lora_b, const Tensor& topk_ids,
                   const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
                   const OptionalTensor& scaling, const OptionalTensor& row_weights, int64_t part,
                   int64_t num_local_experts, int64_t expert_offset,
                   const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                   const OptionalTensor& tile_row_limit) {
  check_shape(topk_ids, "topk_ids", {-1, -1});
  check_shape(lora_b, "lora_b", {-1, -1, -1, -1});
  Tensor out = new_tensor(lora_b, {topk_ids.size(0), topk_ids.size(1), lora_b.size(2)},
                          lora_b.scalar_type());
  lora_expand_out(v, lora_b, topk_ids, adapter_ids, ranks, scaling, row_weights, part,
                  num_local_experts, expert_offset, permuted_to_expanded, tile_expert,
                  tile_row_limit, out);
  return out;
}

}  // namespace moelora

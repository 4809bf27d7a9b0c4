// The op finalize: the weighted sum of each token's down rows and down deltas.
#include "finalize.h"

#include "../ops.h"

namespace moelora {

void finalize_out(const Tensor& down, const OptionalTensor& topk_weights,
                  const Tensor& expanded_to_permuted, const OptionalTensor& down_lora_delta,
                  int64_t top_k, bool delta_is_weighted, double routed_scaling_factor, Tensor out) {
  check_shape(down, "down", {-1, -1});
  const DType dtype = model_dtype(down, "down");
  check_contiguous(down, "down");
  check_aligned(down, "down");
  const int64_t max_rows = down.size(0), hidden_size = down.size(1);
  check_value(hidden_size % 8 == 0, "down: expected a row size that is a multiple of 8, got shape ",
              shape_string(down));
  check_value(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
  check_shape(expanded_to_permuted, "expanded_to_permuted", {-1});
  const int64_t num_pairs = expanded_to_permuted.size(0), num_tokens = num_pairs / top_k;
  check_value(num_tokens * top_k == num_pairs, "expanded_to_permuted: expected a multiple of ",
              top_k, " (top_k) elements, got ", num_pairs);
  // Not check_out: the caller's out may be a slice of a wider tensor.
  check_shape(out, "out", {num_tokens, hidden_size});
  check_dtype(out, "out", down.scalar_type());
  check_same_device(out, "out", down, "down");
  check_last_dim_contiguous(out, "out");
  check_aligned(out, "out");
  check_value(num_tokens <= 1 || out.stride(0) >= hidden_size,
              "out: expected rows that do not overlap, got row stride ", out.stride(0));
  check_no_overlap(out, "out", down, "down");
  check_no_overlap(out, "out", expanded_to_permuted, "expanded_to_permuted");

  FinalizeParams params;
  params.weights = unit_weights(top_k);
  if (topk_weights.has_value()) {
    const IdMatrix columns{nullptr, 0, 0, IdMatrix::Kind::kInt32, static_cast<int32_t>(top_k)};
    params.weights = weight_matrix(*topk_weights, "topk_weights", columns, num_tokens, down);
    check_no_overlap(out, "out", *topk_weights, "topk_weights");
  }
  params.delta_ptr = nullptr;
  if (down_lora_delta.has_value()) {
    const Tensor& delta = *down_lora_delta;
    check_out(delta, "down_lora_delta", {num_tokens, top_k, hidden_size}, down.scalar_type(), down);
    check_aligned(delta, "down_lora_delta");
    check_no_overlap(out, "out", delta, "down_lora_delta");
    params.delta_ptr = delta.const_data_ptr();
  }
  params.down_ptr = down.const_data_ptr();
  params.expanded_to_permuted_ptr =
      int32_map(expanded_to_permuted, "expanded_to_permuted", num_pairs, down);
  params.out_ptr = out.mutable_data_ptr();
  params.out_stride = out.stride(0);
  params.num_tokens = num_tokens;
  params.max_rows = max_rows;
  params.hidden_size = hidden_size;
  params.top_k = static_cast<int32_t>(top_k);
  params.delta_is_weighted = delta_is_weighted;
  params.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  params.dtype = dtype;
  if (out.numel() == 0) return;
  run_on_device(down, params, finalize_cpu, launch_finalize);
}

Tensor finalize(const Tensor& down, const OptionalTensor& topk_weights,
                const Tensor& expanded_to_permuted, const OptionalTensor& down_lora_delta,
                int64_t top_k, bool delta_is_weighted, double routed_scaling_factor) {
  check_shape(down, "down", {-1, -1});
  check_shape(expanded_to_permuted, "expanded_to_permuted", {-1});
  check_value(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
  Tensor out =
      new_tensor(down, {expanded_to_permuted.size(0) / top_k, down.size(1)}, down.scalar_type());
  finalize_out(down, topk_weights, expanded_to_permuted, down_lora_delta, top_k, delta_is_weighted,
               routed_scaling_factor, out);
  return out;
}

}  // namespace moelora

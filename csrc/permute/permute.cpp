// The op permute: gathers rows of hidden_states into the order of moe_sort.
#include "permute.h"

#include "../ops.h"

namespace moelora {

void permute_out(const Tensor& hidden_states, const Tensor& permuted_to_expanded, int64_t top_k,
                 const OptionalTensor& row_weights, Tensor out) {
  check_shape(hidden_states, "hidden_states", {-1, -1});
  const DType dtype = model_dtype(hidden_states, "hidden_states");
  check_last_dim_contiguous(hidden_states, "hidden_states");
  check_aligned(hidden_states, "hidden_states");
  const int64_t num_tokens = hidden_states.size(0), hidden_size = hidden_states.size(1);
  check_value(hidden_size % 8 == 0, "hidden_states: expected a row size that is a multiple of 8, ",
              "got shape ", shape_string(hidden_states));
  check_value(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
  check_shape(permuted_to_expanded, "permuted_to_expanded", {-1});
  const int64_t max_rows = permuted_to_expanded.size(0);
  check_out(out, "out", {max_rows, hidden_size}, hidden_states.scalar_type(), hidden_states);
  check_aligned(out, "out");
  check_no_overlap(out, "out", hidden_states, "hidden_states");
  check_no_overlap(out, "out", permuted_to_expanded, "permuted_to_expanded");

  PermuteParams params;
  params.row_weights = unit_weights(top_k);
  if (row_weights.has_value()) {
    const IdMatrix columns{nullptr, 0, 0, IdMatrix::Kind::kInt32, static_cast<int32_t>(top_k)};
    params.row_weights =
        weight_matrix(*row_weights, "row_weights", columns, num_tokens, hidden_states);
    check_no_overlap(out, "out", *row_weights, "row_weights");
  }
  params.hidden_states_ptr = hidden_states.const_data_ptr();
  params.hidden_states_stride = hidden_states.stride(0);
  params.permuted_to_expanded_ptr =
      int32_map(permuted_to_expanded, "permuted_to_expanded", max_rows, hidden_states);
  params.permuted_ptr = out.mutable_data_ptr();
  params.num_tokens = num_tokens;
  params.hidden_size = hidden_size;
  params.max_rows = max_rows;
  params.top_k = static_cast<int32_t>(top_k);
  params.dtype = dtype;
  if (out.numel() == 0) return;
  run_on_device(hidden_states, params, permute_cpu, launch_permute);
}

Tensor permute(const Tensor& hidden_states, const Tensor& permuted_to_expanded, int64_t top_k,
               const OptionalTensor& row_weights) {
  check_shape(hidden_states, "hidden_states", {-1, -1});
  check_shape(permuted_to_expanded, "permuted_to_expanded", {-1});
  Tensor out = new_tensor(hidden_states, {permuted_to_expanded.size(0), hidden_states.size(1)},
                          hidden_states.scalar_type());
  permute_out(hidden_states, permuted_to_expanded, top_k, row_weights, out);
  return out;
}

}  // namespace moelora

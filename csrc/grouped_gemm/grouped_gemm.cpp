// The ops gate_up_gemm and down_gemm: one grouped GEMM under two names, so that profiles and errors
// tell them apart.
#include "grouped_gemm.h"

#include "../ops.h"

namespace moelora {
namespace {

struct Names {
  const char *rows, *weight, *bias;
};
constexpr Names kGateUp{"permuted", "w13", "w13_bias"};
constexpr Names kDown{"z", "w2", "w2_bias"};

void grouped_gemm_out(const Names& names, const Tensor& rows, const Tensor& weight,
                      const OptionalTensor& bias, const Tensor& expert_offsets,
                      const Tensor& tile_expert, const Tensor& tile_row_limit,
                      int64_t expected_rows, Tensor out) {
  check_shape(rows, names.rows, {-1, -1});
  check_contiguous(rows, names.rows);
  check_aligned(rows, names.rows);
  const DType dtype = model_dtype(rows, names.rows);
  check_shape(weight, names.weight, {-1, -1, rows.size(1)});
  check_dtype(weight, names.weight, rows.scalar_type());
  check_same_device(weight, names.weight, rows, names.rows);
  check_last_dim_contiguous(weight, names.weight);
  check_aligned(weight, names.weight);
  const int64_t experts = weight.size(0), out_features = weight.size(1);
  check_value(experts >= 1 && experts <= kMaxExperts, names.weight, ": expected 1 to ", kMaxExperts,
              " experts, got ", experts);
  check_value(rows.size(1) % 8 == 0 && out_features % 8 == 0, names.weight,
              ": expected feature sizes that are multiples of 8, got shape ", shape_string(weight));
  if (bias.has_value()) {
    check_out(*bias, names.bias, {experts, out_features}, rows.scalar_type(), rows);
  }
  check_out(out, "out", {rows.size(0), out_features}, rows.scalar_type(), rows);
  check_no_overlap(out, "out", rows, names.rows);
  check_no_overlap(out, "out", weight, names.weight);
  check_shape(tile_expert, "tile_expert", {-1});
  const int64_t tiles = tile_expert.size(0);
  check_value(tiles == 0 ? rows.size(0) == 0 : rows.size(0) % tiles == 0, names.rows,
              ": expected a multiple of tile_expert's ", tiles, " tiles, got ", rows.size(0),
              " rows");

  GroupedGemmParams params;
  params.rows_ptr = rows.const_data_ptr();
  params.weight = {weight.const_data_ptr(), weight.stride(0), weight.stride(1), dtype};
  params.bias_ptr = bias.has_value() ? bias->const_data_ptr() : nullptr;
  params.out_ptr = out.mutable_data_ptr();
  params.expert_offsets_ptr = int32_map(expert_offsets, "expert_offsets", experts + 1, rows);
  params.maps = {nullptr, int32_map(tile_expert, "tile_expert", tiles, rows),
                 int32_map(tile_row_limit, "tile_row_limit", tiles, rows), tiles,
                 tiles == 0 ? 0 : static_cast<int32_t>(rows.size(0) / tiles)};
  params.max_rows = rows.size(0);
  params.in_features = rows.size(1);
  params.out_features = out_features;
  params.expected_rows = expected_rows;
  params.num_local_experts = static_cast<int32_t>(experts);
  run_on_device(rows, params, grouped_gemm_cpu, launch_grouped_gemm);
}

Tensor grouped_gemm(const Names& names, const Tensor& rows, const Tensor& weight,
                    const OptionalTensor& bias, const Tensor& expert_offsets,
                    const Tensor& tile_expert, const Tensor& tile_row_limit,
                    int64_t expected_rows) {
  check_shape(rows, names.rows, {-1, -1});
  check_shape(weight, names.weight, {-1, -1, -1});
  Tensor out = new_tensor(rows, {rows.size(0), weight.size(1)}, rows.scalar_type());
  grouped_gemm_out(names, rows, weight, bias, expert_offsets, tile_expert, tile_row_limit,
                   expected_rows, out);
  return out;
}

}  // namespace

Tensor gate_up_gemm(const Tensor& permuted, const Tensor& w13, const OptionalTensor& w13_bias,
                    const Tensor& expert_offsets, const Tensor& tile_expert,
                    const Tensor& tile_row_limit, int64_t expected_rows) {
  return grouped_gemm(kGateUp, permuted, w13, w13_bias, expert_offsets, tile_expert, tile_row_limit,
                      expected_rows);
}

void gate_up_gemm_out(const Tensor& permuted, const Tensor& w13, const OptionalTensor& w13_bias,
                      const Tensor& expert_offsets, const Tensor& tile_expert,
                      const Tensor& tile_row_limit, int64_t expected_rows, Tensor out) {
  grouped_gemm_out(kGateUp, permuted, w13, w13_bias, expert_offsets, tile_expert, tile_row_limit,
                   expected_rows, out);
}

Tensor down_gemm(const Tensor& z, const Tensor& w2, const OptionalTensor& w2_bias,
                 const Tensor& expert_offsets, const Tensor& tile_expert,
                 const Tensor& tile_row_limit, int64_t expected_rows) {
  return grouped_gemm(kDown, z, w2, w2_bias, expert_offsets, tile_expert, tile_row_limit,
                      expected_rows);
}

void down_gemm_out(const Tensor& z, const Tensor& w2, const OptionalTensor& w2_bias,
                   const Tensor& expert_offsets, const Tensor& tile_expert,
                   const Tensor& tile_row_limit, int64_t expected_rows, Tensor out) {
  grouped_gemm_out(kDown, z, w2, w2_bias, expert_offsets, tile_expert, tile_row_limit,
                   expected_rows, out);
}

}  // namespace moelora

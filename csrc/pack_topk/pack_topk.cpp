#include "pack_topk.h"

#include "../ops.h"

namespace moelora {

void pack_topk_out(const Tensor& topk_weights, const Tensor& topk_ids, Tensor out) {
  PackTopkParams params;
  params.ids = id_matrix(topk_ids, "topk_ids", topk_ids);
  const int64_t num_tokens = topk_ids.size(0), top_k = topk_ids.size(1);
  params.weights = weight_matrix(topk_weights, "topk_weights", params.ids, num_tokens, topk_ids);
  check_out(out, "out", {num_tokens, top_k}, ScalarType::Int, topk_ids);
  check_no_overlap(out, "out", topk_ids, "topk_ids");
  check_no_overlap(out, "out", topk_weights, "topk_weights");
  params.packed_ptr = static_cast<int32_t*>(out.mutable_data_ptr());
  params.num_pairs = num_tokens * top_k;
  run_on_device(topk_ids, params, pack_topk_cpu, launch_pack_topk);
}

Tensor pack_topk(const Tensor& topk_weights, const Tensor& topk_ids) {
  check_shape(topk_ids, "topk_ids", {-1, -1});
  Tensor out = new_tensor(topk_ids, {topk_ids.size(0), topk_ids.size(1)}, ScalarType::Int);
  pack_topk_out(topk_weights, topk_ids, out);
  return out;
}

void unpack_topk_out(const Tensor& packed, Tensor topk_weights, Tensor topk_ids) {
  UnpackTopkParams params;
  params.ids = packed_matrix(packed, "packed", packed);
  params.weights = {params.ids.ptr, params.ids.row_stride, params.ids.col_stride,
                    WeightMatrix::Kind::kPacked, params.ids.num_cols};
  const int64_t num_tokens = packed.size(0), top_k = packed.size(1);
  check_out(topk_weights, "topk_weights", {num_tokens, top_k}, ScalarType::Float, packed);
  check_out(topk_ids, "topk_ids", {num_tokens, top_k}, ScalarType::Int, packed);
  check_no_overlap(topk_weights, "topk_weights", packed, "packed");
  check_no_overlap(topk_ids, "topk_ids", packed, "packed");
  check_no_overlap(topk_ids, "topk_ids", topk_weights, "topk_weights");
  params.topk_weights_ptr = static_cast<float*>(topk_weights.mutable_data_ptr());
  params.topk_ids_ptr = static_cast<int32_t*>(topk_ids.mutable_data_ptr());
  params.num_pairs = num_tokens * top_k;
  run_on_device(packed, params, unpack_topk_cpu, launch_unpack_topk);
}

std::tuple<Tensor, Tensor> unpack_topk(const Tensor& packed) {
  check_shape(packed, "packed", {-1, -1});
  Tensor topk_weights = new_tensor(packed, {packed.size(0), packed.size(1)}, ScalarType::Float);
  Tensor topk_ids = new_tensor(packed, {packed.size(0), packed.size(1)}, ScalarType::Int);
  unpack_topk_out(packed, topk_weights, topk_ids);
  return {topk_weights, topk_ids};
}

}  // namespace moelora

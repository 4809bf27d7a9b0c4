#include "../common/torch_bridge.h"
#include "grouped_gemm.h"

namespace moelora {

// One ATen GEMM per expert that has rows, on views of the caller's buffers.
void grouped_gemm_cpu(const GroupedGemmParams& params) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const ScalarType dtype = scalar_type(params.weight.dtype);
  const int64_t bytes = dtype_bytes(params.weight.dtype);
  const int64_t in = params.in_features, out = params.out_features;
  const auto at = [&](const void* base, int64_t element) {
    return const_cast<char*>(static_cast<const char*>(base)) + element * bytes;
  };
  for (int64_t e = 0; e < params.num_local_experts; ++e) {
    const int64_t begin = params.expert_offsets_ptr[e], end = params.expert_offsets_ptr[e + 1];
    if (begin == end) continue;
    const int64_t rows = params.maps.tile_row_limit_ptr[begin / params.maps.tile_rows] - begin;
    const Tensor x = torch::stable::from_blob(at(params.rows_ptr, begin * in), {{rows, in}},
                                              {{in, 1}}, cpu, dtype);
    const Tensor weight_t =
        torch::stable::from_blob(at(params.weight.ptr, e * params.weight.expert_stride),
                                 {{in, out}}, {{1, params.weight.row_stride}}, cpu, dtype);
    Tensor y = torch::stable::from_blob(at(params.out_ptr, begin * out), {{rows, out}}, {{out, 1}},
                                        cpu, dtype);
    Tensor product = torch::stable::matmul(x, weight_t);
    if (params.bias_ptr != nullptr) {
      const Tensor bias =
          torch::stable::from_blob(at(params.bias_ptr, e * out), {{out}}, {{1}}, cpu, dtype);
      product = torch::stable::subtract(product, bias, -1.0);
    }
    torch::stable::copy_(y, product);
  }
}

}  // namespace moelora

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "../common/cpu.h"
#include "finalize.h"

namespace moelora {
namespace {

template <class T>
void finalize_token(const FinalizeParams& params, int64_t token, std::vector<float>& sum) {
  const int64_t width = params.hidden_size;
  sum.assign(width, 0.0f);
  const auto add = [&](float weight, const void* base, int64_t row) {
    const T* values = static_cast<const T*>(base) + row * width;
    for (int64_t h = 0; h < width; ++h) sum[h] += weight * static_cast<float>(values[h]);
  };
  for (int32_t k = 0; k < params.top_k; ++k) {
    const int64_t pair = token * params.top_k + k, row = params.expanded_to_permuted_ptr[pair];
    if (row < 0 || row >= params.max_rows) continue;
    const float weight = params.weights(pair);
    add(weight, params.down_ptr, row);
    if (params.delta_ptr != nullptr) {
      add(params.delta_is_weighted ? 1.0f : weight, params.delta_ptr, pair);
    }
  }
  T* out = static_cast<T*>(params.out_ptr) + token * params.out_stride;
  for (int64_t h = 0; h < width; ++h) {
    out[h] = static_cast<T>(params.routed_scaling_factor * sum[h]);
  }
}

}  // namespace

void finalize_cpu(const FinalizeParams& params) {
  dispatch_dtype(params.dtype, [&](auto tag) {
    using T = decltype(tag);
    torch::stable::parallel_for(0, params.num_tokens, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> sum;
      for (int64_t token = begin; token < end; ++token) finalize_token<T>(params, token, sum);
    });
  });
}

}  // namespace moelora

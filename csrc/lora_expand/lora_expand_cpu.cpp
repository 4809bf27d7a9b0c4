#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../common/cpu.h"
#include "../common/lora_rows.h"
#include "lora_expand.h"

namespace moelora {
namespace {

// delta[n] = scale * B[n, :rank] v for `count` rows of B.
template <class T>
void expand_columns(const T* b, int64_t row_stride, const float* v, int32_t rank, float scale,
                    int64_t count, T* delta) {
  for (int64_t n = 0; n < count; ++n) {
    const T* b_row = b + n * row_stride;
    float sum = 0.0f;
    for (int32_t r = 0; r < rank; ++r) sum += static_cast<float>(b_row[r]) * v[r];
    delta[n] = static_cast<T>(scale * sum);
  }
}

template <class T>
void expand_pair(const LoraExpandParams& params, int64_t pair) {
  const int64_t width = params.out_features;
  T* delta = static_cast<T*>(params.delta_ptr) + pair * width;
  const MatrixIndex index = matrix_of_pair(params, pair);
  if (!index.exists()) {
    std::fill_n(delta, width, static_cast<T>(0.0f));
    return;
  }
  const T* b = static_cast<const T*>(params.lora_b_ptr) + index.slot * params.slot_stride +
               index.expert * params.expert_stride;
  const float* v =
      params.v_ptr + (params.v_per_token ? pair / params.top_k : pair) * params.v_stride;
  const float weight = params.row_weights(pair);
  const auto scale = [&](int component) {
    return weight * (params.scaling_ptr == nullptr
                         ? 1.0f
                         : params.scaling_ptr[3 * static_cast<int64_t>(index.slot) + component]);
  };
  if (params.part == LoraPart::kDown) {
    expand_columns(b, params.row_stride, v, index.rank, scale(2), width, delta);
    return;
  }
  const int64_t half = width / 2;
  const float* v_up = v + (params.v_columns - params.rank);
  expand_columns(b, params.row_stride, v, index.rank, scale(0), half, delta);
  expand_columns(b + half * params.row_stride, params.row_stride, v_up, index.rank, scale(1), half,
                 delta + half);
}

}  // namespace

void lora_expand_cpu(const LoraExpandParams& params) {
  dispatch_dtype(params.dtype, [&](auto tag) {
    using T = decltype(tag);
    torch::stable::parallel_for(0, params.num_tokens * params.top_k, 1,
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t pair = begin; pair < end; ++pair)
                                    expand_pair<T>(params, pair);
                                });
  });
}

}  // namespace moelora

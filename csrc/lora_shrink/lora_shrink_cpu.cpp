#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "../common/cpu.h"
#include "../common/lora_rows.h"
#include "lora_shrink.h"

namespace moelora {
namespace {

// Eight partial sums, so that the compiler can keep them in vector registers; `size` is a multiple
// of 8.
template <class T>
float dot(const T* a, const float* x, int64_t size) {
  float sums[8] = {};
  for (int64_t i = 0; i < size; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<float>(a[i + j]) * x[i + j];
  }
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// v[row] = A x[x_row] for the matrix `index`, 0 beyond its rank in each component.
template <class T>
void shrink_row(const LoraShrinkParams& params, int64_t row, int64_t x_row, MatrixIndex index,
                std::vector<float>& x) {
  const int64_t width = params.in_features;
  float* v = params.v_ptr + row * params.num_components * params.rank;
  std::fill_n(v, params.num_components * params.rank, 0.0f);
  if (!index.exists()) return;
  const T* x_from = static_cast<const T*>(params.x_ptr) + x_row * params.x_stride;
  x.assign(x_from, x_from + width);
  const T* a = static_cast<const T*>(params.lora_a_ptr) + index.slot * params.slot_stride +
               index.expert * params.expert_stride;
  for (int32_t component = 0; component < params.num_components; ++component) {
    for (int32_t r = 0; r < index.rank; ++r) {
      const int64_t a_row = component * params.rank + r;
      v[a_row] = dot(a + a_row * params.row_stride, x.data(), width);
    }
  }
}

}  // namespace

void lora_shrink_cpu(const LoraShrinkParams& params) {
  const int64_t num_rows = params.num_rank_vectors();
  dispatch_dtype(params.dtype, [&](auto tag) {
    using T = decltype(tag);
    torch::stable::parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> x;
      for (int64_t row = begin; row < end; ++row) {
        const MatrixIndex index =
            params.v_per_token() ? matrix_of_token(params, row) : matrix_of_pair(params, row);
        shrink_row<T>(params, row, params.x_row(row), index, x);
      }
    });
  });
}

}  // namespace moelora

#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../common/cpu.h"
#include "permute.h"

namespace moelora {
namespace {

template <class T>
void copy_row(const PermuteParams& params, int64_t row, int64_t pair) {
  const int64_t token = pair / params.top_k;
  const T* from =
      static_cast<const T*>(params.hidden_states_ptr) + token * params.hidden_states_stride;
  T* to = static_cast<T*>(params.permuted_ptr) + row * params.hidden_size;
  if (params.row_weights.kind == WeightMatrix::Kind::kOne) {
    std::memcpy(to, from, params.hidden_size * sizeof(T));
    return;
  }
  const float weight = params.row_weights(pair);
  for (int64_t h = 0; h < params.hidden_size; ++h) {
    to[h] = static_cast<T>(weight * static_cast<float>(from[h]));
  }
}

}  // namespace

void permute_cpu(const PermuteParams& params) {
  const int64_t num_pairs = params.num_tokens * params.top_k;
  dispatch_dtype(params.dtype, [&](auto tag) {
    using T = decltype(tag);
    torch::stable::parallel_for(0, params.max_rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t pair = params.permuted_to_expanded_ptr[row];
        if (pair >= 0 && pair < num_pairs) copy_row<T>(params, row, pair);
      }
    });
  });
}

}  // namespace moelora

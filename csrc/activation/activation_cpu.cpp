#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "../common/cpu.h"
#include "activation.h"
#include "activation_math.h"

namespace moelora {
namespace {

// Column of gate j and of up j in a gate_up row is `first + j * step`.
struct Columns {
  int64_t gate_first, up_first, step;
};

Columns columns_of(GateUpLayout layout, int64_t intermediate) {
  switch (layout) {
    case GateUpLayout::kUpGate:
      return {intermediate, 0, 1};
    case GateUpLayout::kInterleaved:
      return {0, 1, 2};
    default:
      return {0, intermediate, 1};
  }
}

template <class T>
void activate_pair(const ActivationParams& params, int64_t pair) {
  const int64_t width = params.intermediate_size, row = params.expanded_to_permuted_ptr[pair];
  T* lora_input = params.lora_input_ptr == nullptr
                      ? nullptr
                      : static_cast<T*>(params.lora_input_ptr) + pair * width;
  if (row < 0 || row >= params.max_rows) {
    if (lora_input != nullptr) std::memset(lora_input, 0, width * sizeof(T));
    return;
  }
  const Columns columns = columns_of(params.layout, width);
  const T* gate_up = static_cast<const T*>(params.gate_up_ptr) + row * 2 * width;
  const T* delta = params.delta_ptr == nullptr
                       ? nullptr
                       : static_cast<const T*>(params.delta_ptr) + pair * 2 * width;
  T* z = static_cast<T*>(params.z_ptr) + row * width;
  for (int64_t j = 0; j < width; ++j) {
    float gate = static_cast<float>(gate_up[columns.gate_first + j * columns.step]);
    float up = static_cast<float>(gate_up[columns.up_first + j * columns.step]);
    if (delta != nullptr) {
      gate += static_cast<float>(delta[j]);
      up += static_cast<float>(delta[width + j]);
    }
    z[j] =
        static_cast<T>(gated_activation(params.activation, gate, up, params.alpha, params.limit));
  }
  if (lora_input != nullptr) std::memcpy(lora_input, z, width * sizeof(T));
}

}  // namespace

void activation_cpu(const ActivationParams& params) {
  dispatch_dtype(params.dtype, [&](auto tag) {
    using T = decltype(tag);
    torch::stable::parallel_for(0, params.num_pairs, 4, [&](int64_t begin, int64_t end) {
      for (int64_t pair = begin; pair < end; ++pair) activate_pair<T>(params, pair);
    });
  });
}

}  // namespace moelora

// The gated activations of one (gate, up) pair in fp32, on host and device.
#pragma once

#include <cmath>

#include "../common/views.h"

namespace moelora {

MOELORA_HOST_DEVICE float sigmoid(float x) {
#ifdef __CUDA_ARCH__
  // Relative error below 2^-17 for every x whose result is a normal bf16 or fp16 number: the
  // hardware exponential and division are far more exact than the one rounding that follows.
  return __fdividef(1.0f, 1.0f + __expf(-x));
#else
  return 1.0f / (1.0f + std::exp(-x));
#endif
}

MOELORA_HOST_DEVICE float silu(float x) { return x * sigmoid(x); }

// 0.5 x (1 + tanh(y)) written as x sigmoid(2 y), which loses nothing to cancellation.
MOELORA_HOST_DEVICE float gelu_tanh(float x) {
  const float y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x * sigmoid(2.0f * y);
}

// gpt-oss: the gate is clamped from above only, up on both sides. Comparisons keep NaN a NaN.
MOELORA_HOST_DEVICE float swiglu_oai(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : (up < -limit ? -limit : up);
  return gate * sigmoid(alpha * gate) * (up + 1.0f);
}

MOELORA_HOST_DEVICE float gated_activation(ActivationKind kind, float gate, float up, float alpha,
                                           float limit) {
  if (kind == ActivationKind::kSilu) return silu(gate) * up;
  if (kind == ActivationKind::kGeluTanh) return gelu_tanh(gate) * up;
  return swiglu_oai(gate, up, alpha, limit);
}

}  // namespace moelora

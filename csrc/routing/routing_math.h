// The arithmetic of routing, shared by the CPU and the CUDA code. Every step is an IEEE operation
// that both devices round alike (explicit fmaf, sums in one fixed order, no library exp), so that
// both choose the same experts and give the same bits even where rounding makes keys tie.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "../common/views.h"
#include "../pack_topk/packed_word.h"
#include "routing.h"

namespace moelora {

// Partial sums a row's softmax denominator is gathered in: expert e goes to partial e % kLanes.
constexpr int kLanes = 32;

MOELORA_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
MOELORA_HOST_DEVICE float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// NaN counts as -inf, +inf as the largest fp32.
MOELORA_HOST_DEVICE float finite_or_minus_inf(float x) {
  if (!(x == x)) return -INFINITY;
  return x < FLT_MAX ? x : FLT_MAX;
}

// Keys as integers in the same order: -inf is the smallest code, and 0 stays free for "taken".
// Adding 0 makes -0 a +0, which it equals.
constexpr uint32_t kTakenKey = 0;
constexpr uint32_t kMinusInfKey = 0x007fffffu;
MOELORA_HOST_DEVICE uint32_t encode_key(float key) {
  const uint32_t bits = float_bits(finite_or_minus_inf(key) + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
MOELORA_HOST_DEVICE float decode_key(uint32_t code) {
  return bits_float(code & 0x80000000u ? code & 0x7fffffffu : ~code);
}

// x - n ln 2, ln 2 in two pieces.
MOELORA_HOST_DEVICE float exp_remainder(float x, float n) {
  return fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
}

// exp(x) within 1.5 ulp, never decreasing in x: the remainder r and all Horner terms are >= 0, so
// that each rounding keeps the order, and the clamps keep it where the exponent n steps. NaN gives
// 0.
MOELORA_HOST_DEVICE float exp_monotone(float x) {
  if (!(x > -104.0f)) return 0.0f;  // rounds to 0
  if (x > 89.0f) return INFINITY;   // above the largest fp32
  // The product's rounding can push n over the next integer, or hold it below.
  float n = floorf(x * 1.44269504f);
  float r = exp_remainder(x, n);
  if (r < 0.0f || r >= 0.693147181f) {
    n += r < 0.0f ? -1.0f : 1.0f;
    r = fmaxf(exp_remainder(x, n), 0.0f);
  }
  float y = 1.0f / 362880;  // Taylor to r^9: the rest is below 1e-8 for r <= ln 2
  y = fmaf(y, r, 1.0f / 40320);
  y = fmaf(y, r, 1.0f / 5040);
  y = fmaf(y, r, 1.0f / 720);
  y = fmaf(y, r, 1.0f / 120);
  y = fmaf(y, r, 1.0f / 24);
  y = fmaf(y, r, 1.0f / 6);
  y = fmaf(y, r, 0.5f);
  y = fmaf(y, r, 1.0f);
  y = fminf(fmaf(y, r, 1.0f), 2.0f);
  // y * 2^n in two steps, both scales being normal numbers: only the last one rounds, to a
  // denormal.
  const int exponent = static_cast<int>(n), half = exponent / 2;
  const float scale = bits_float(static_cast<uint32_t>(half + 127) << 23);
  return y * scale * bits_float(static_cast<uint32_t>(exponent - half + 127) << 23);
}

MOELORA_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_monotone(-x)); }

MOELORA_HOST_DEVICE bool uses_softmax_key(RoutingMethod method) {
  return method == RoutingMethod::kSoftmax || method == RoutingMethod::kRenormalizeNaive;
}
MOELORA_HOST_DEVICE bool uses_sigmoid_key(RoutingMethod method) {
  return method == RoutingMethod::kDeepseekV3 || method == RoutingMethod::kSigmoid;
}

// A chosen expert's weight before normalisation. `logit` is read by the sigmoid methods only.
MOELORA_HOST_DEVICE float raw_weight(RoutingMethod method, float key, float largest_key,
                                     float logit) {
  if (key == -INFINITY) return 0.0f;
  switch (method) {
    case RoutingMethod::kRenormalize:
      return exp_monotone(key - largest_key);
    case RoutingMethod::kLlama4:
      return sigmoid(key);
    case RoutingMethod::kDeepseekV3:
    case RoutingMethod::kSigmoid:
      return sigmoid(logit);
    default:
      return key;  // a probability, or the logit itself
  }
}

// The weight that is written: divided by the sum of the chosen where the method wants that, scaled,
// finite.
MOELORA_HOST_DEVICE float final_weight(const RoutingParams& params, float raw, float sum) {
  if (uses_sigmoid_key(params.method)) {
    if (params.renormalize) raw /= sum + 1e-20f;
  } else if (params.method == RoutingMethod::kRenormalize ||
             params.method == RoutingMethod::kRenormalizeNaive) {
    raw = sum > 0.0f ? raw / sum : 0.0f;
  }
  // Packed weights are bf16, whose largest number is smaller: fp32 above it would round to
  // infinity.
  const float largest = params.packed ? bits_float(0x7f7f0000u) : FLT_MAX;
  return fminf(fmaxf(raw * params.routed_scaling_factor, -largest), largest);
}

// Whether group `g` is among the topk_group best of scores [n_group]; equals go to the smaller
// group.
MOELORA_HOST_DEVICE bool is_chosen_group(const RoutingParams& params, const float* scores, int g) {
  int better = 0;
  for (int other = 0; other < params.n_group; ++other) {
    better += scores[other] > scores[g] || (scores[other] == scores[g] && other < g);
  }
  return better < params.topk_group;
}

MOELORA_HOST_DEVICE void write_choice(const RoutingParams& params, int64_t pair, int32_t id,
                                      float weight) {
  if (params.packed) {
    params.topk_ids_ptr[pair] = packed_word(id, weight);
  } else {
    params.topk_ids_ptr[pair] = id;
    params.topk_weights_ptr[pair] = weight;
  }
  if (params.replay_ids_ptr == nullptr) return;
  if (params.replay_is_int16) {
    static_cast<int16_t*>(params.replay_ids_ptr)[pair] = static_cast<int16_t>(id);
  } else {
    static_cast<int32_t*>(params.replay_ids_ptr)[pair] = id;
  }
}

}  // namespace moelora

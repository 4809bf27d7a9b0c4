#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "routing_math.h"

namespace moelora {

constexpr int kRoutingWarps = 4;  // tokens per block
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ float load_float(const void* ptr, int64_t at, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(ptr)[at];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(ptr)[at]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(ptr)[at]);
}

// A lane's logits of the row at `row_ptr`, -inf beyond E. All loads are issued before the first is
// used.
template <int kPerLane, class T>
__device__ __forceinline__ void load_logits(const T* row_ptr, int lane, int num_experts,
                                            float (&x)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * kLanes + lane;
    x[i] = e < num_experts ? static_cast<float>(row_ptr[e]) : -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = finite_or_minus_inf(x[i]);
}

// Sum over the lanes, the same bits in each: adding is commutative, and so the butterfly is the
// CPU's tree.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Turns logits into keys: softmax over all experts of the row.
template <int kPerLane>
__device__ __forceinline__ void softmax_keys(float (&x)[kPerLane]) {
  uint32_t largest_code = kTakenKey;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) largest_code = max(largest_code, encode_key(x[i]));
  const float largest = decode_key(__reduce_max_sync(kAllLanes, largest_code));
  float partial = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    x[i] = exp_monotone(x[i] - largest);
    partial += x[i];
  }
  const float sum = warp_sum(partial);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = sum > 0.0f ? x[i] / sum : 0.0f;
}

// Sets the keys of all experts outside the topk_group best groups to -inf. `scratch` is this warp's
// [E + n_group] words.
template <int kPerLane>
__device__ __forceinline__ void keep_best_groups(const RoutingParams& params, int lane,
                                                 uint32_t* scratch, uint32_t (&keys)[kPerLane]) {
  const int num_experts = params.num_experts, size = num_experts / params.n_group;
  float* scores = reinterpret_cast<float*>(scratch + num_experts);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * kLanes + lane;
    if (e < num_experts) scratch[e] = keys[i];
  }
  __syncwarp();
  for (int g = lane; g < params.n_group; g += kLanes) {
    // Each lane starts at another place of its group: groups of 32 would all lie in one bank.
    uint32_t best = kTakenKey, second = kTakenKey;
    for (int j = 0, at = g % size; j < size; ++j, at = at + 1 == size ? 0 : at + 1) {
      const uint32_t key = scratch[g * size + at];
      second = max(second, min(best, key));
      best = max(best, key);
    }
    scores[g] = size == 1 ? decode_key(best) : decode_key(best) + decode_key(second);
  }
  __syncwarp();
  for (int g = lane; g < params.n_group; g += kLanes) {
    if (is_chosen_group(params, scores, g)) continue;
    for (int e = g * size; e < (g + 1) * size; ++e) scratch[e] = kMinusInfKey;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * kLanes + lane;
    if (e < num_experts) keys[i] = scratch[e];
  }
}

// One warp per token; a block serves kRoutingWarps tokens. Lane l holds experts l, l + 32, ...
// (kPerLane of them, so E <= 32 * kPerLane); K rounds of a warp-wide arg-max choose, lane k keeping
// the k-th choice. Each token is computed on its own, so that its result does not depend on T.
// Dynamic shared memory: kRoutingWarps * (E + n_group) words where n_group > 1, else none.
template <int kPerLane>
__global__ void __launch_bounds__(kRoutingWarps* kLanes)
    routing_kernel(const RoutingParams params) {
  extern __shared__ uint32_t shared_words[];
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRoutingWarps + warp;
  if (token >= params.num_tokens) return;  // a whole warp leaves
  const int num_experts = params.num_experts, top_k = params.top_k;
  const int64_t pair = token * top_k + lane;
  if (params.num_valid_tokens_ptr != nullptr && token >= *params.num_valid_tokens_ptr) {
    if (lane < top_k) write_choice(params, pair, -1, 0.0f);
    return;
  }

  // Keys of this lane's experts.
  const int64_t row = token * params.logits_stride;
  float x[kPerLane];
  if (params.logits_dtype == DType::kFloat32) {
    load_logits(static_cast<const float*>(params.logits_ptr) + row, lane, num_experts, x);
  } else if (params.logits_dtype == DType::kFloat16) {
    load_logits(static_cast<const __half*>(params.logits_ptr) + row, lane, num_experts, x);
  } else {
    load_logits(static_cast<const __nv_bfloat16*>(params.logits_ptr) + row, lane, num_experts, x);
  }
  if (uses_softmax_key(params.method)) {
    softmax_keys(x);
  } else if (uses_sigmoid_key(params.method)) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int e = i * kLanes + lane;
      x[i] = sigmoid(x[i]);
      if (params.correction_bias_ptr != nullptr && e < num_experts) {
        x[i] += load_float(params.correction_bias_ptr, e, params.correction_bias_dtype);
      }
    }
  }
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    keys[i] = i * kLanes + lane < num_experts ? encode_key(x[i]) : kTakenKey;
  }
  if (params.n_group > 1) {
    keep_best_groups(params, lane, shared_words + warp * (num_experts + params.n_group), keys);
  }

  // K times the best (key, then smaller id) that is left; K <= E leaves one every time.
  uint32_t my_code = kTakenKey, largest_code = kTakenKey;
  int my_id = 0;
  for (int k = 0; k < top_k; ++k) {
    uint32_t lane_best = kTakenKey;
    int lane_id = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (keys[i] > lane_best) {
        lane_best = keys[i];
        lane_id = i * kLanes + lane;
      }
    }
    const uint32_t best = __reduce_max_sync(kAllLanes, lane_best);
    const int id = __reduce_min_sync(kAllLanes, lane_best == best ? lane_id : kMaxExperts);
    if (k == 0) largest_code = best;
    if (lane == k) {
      my_code = best;
      my_id = id;
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * kLanes + lane == id) keys[i] = kTakenKey;
    }
  }

  // Lane k weighs the k-th choice.
  float raw = 0.0f;
  if (lane < top_k) {
    const float logit =
        uses_sigmoid_key(params.method)
            ? finite_or_minus_inf(load_float(params.logits_ptr, row + my_id, params.logits_dtype))
            : 0.0f;
    raw = raw_weight(params.method, decode_key(my_code), decode_key(largest_code), logit);
  }
  const float sum = warp_sum(raw);
  if (lane < top_k) write_choice(params, pair, my_id, final_weight(params, raw, sum));
}

}  // namespace moelora

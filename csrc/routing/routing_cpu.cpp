#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "routing_math.h"

namespace moelora {
namespace {

// Elements per task: enough rows that handing out work costs nothing.
constexpr int64_t kElementsPerTask = 16384;

float load(const void* ptr, int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(ptr)[at];
    case DType::kFloat16:
      return static_cast<const c10::Half*>(ptr)[at];
    default:
      return static_cast<const c10::BFloat16*>(ptr)[at];
  }
}

// Adds the 32 partial sums pairwise in the order of a warp's butterfly.
float tree_sum(float (&partial)[kLanes]) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    for (int lane = 0; lane < offset; ++lane) partial[lane] += partial[lane + offset];
  }
  return partial[0];
}

// One token's selection: logits and keys of all experts.
class Row {
 public:
  Row(const RoutingParams& params, int64_t token) : params_(params) {
    const int64_t begin = token * params.logits_stride;
    for (int e = 0; e < params.num_experts; ++e) {
      logits_[e] = finite_or_minus_inf(load(params.logits_ptr, begin + e, params.logits_dtype));
    }
    if (uses_softmax_key(params.method)) {
      softmax_keys();
    } else if (uses_sigmoid_key(params.method)) {
      sigmoid_keys();
      if (params.n_group > 1) keep_best_groups();
    } else {
      for (int e = 0; e < params.num_experts; ++e) keys_[e] = encode_key(logits_[e]);
    }
  }

  // Fills ids and weights [K] with the best keys, descending, the smaller id first among equals.
  void choose(int32_t* ids, float* weights) {
    const RoutingMethod method = params_.method;
    float largest_key = 0.0f, raw[kLanes] = {}, partial[kLanes];
    for (int k = 0; k < params_.top_k; ++k) {
      const int id = static_cast<int>(std::max_element(keys_, keys_ + params_.num_experts) - keys_);
      const float key = decode_key(keys_[id]);
      if (k == 0) largest_key = key;
      ids[k] = id;
      raw[k] = raw_weight(method, key, largest_key, logits_[id]);
      keys_[id] = kTakenKey;
    }
    std::copy(raw, raw + kLanes, partial);
    const float sum = tree_sum(partial);
    for (int k = 0; k < params_.top_k; ++k) weights[k] = final_weight(params_, raw[k], sum);
  }

 private:
  void softmax_keys() {
    const float largest = *std::max_element(logits_, logits_ + params_.num_experts);
    float probability[kMaxExperts], partial[kLanes] = {};
    for (int e = 0; e < params_.num_experts; ++e) {
      probability[e] = exp_monotone(logits_[e] - largest);
      partial[e % kLanes] += probability[e];
    }
    const float sum = tree_sum(partial);
    for (int e = 0; e < params_.num_experts; ++e) {
      keys_[e] = encode_key(sum > 0.0f ? probability[e] / sum : 0.0f);
    }
  }

  void sigmoid_keys() {
    for (int e = 0; e < params_.num_experts; ++e) {
      float key = sigmoid(logits_[e]);
      if (params_.correction_bias_ptr != nullptr) {
        key += load(params_.correction_bias_ptr, e, params_.correction_bias_dtype);
      }
      keys_[e] = encode_key(key);
    }
  }

  void keep_best_groups() {
    const int size = params_.num_experts / params_.n_group;
    float scores[kMaxExperts];
    for (int g = 0; g < params_.n_group; ++g) {
      uint32_t best = kTakenKey, second = kTakenKey;
      for (int e = g * size; e < (g + 1) * size; ++e) {
        second = std::max(second, std::min(best, keys_[e]));
        best = std::max(best, keys_[e]);
      }
      scores[g] = size == 1 ? decode_key(best) : decode_key(best) + decode_key(second);
    }
    for (int g = 0; g < params_.n_group; ++g) {
      if (!is_chosen_group(params_, scores, g)) {
        std::fill(keys_ + g * size, keys_ + (g + 1) * size, kMinusInfKey);
      }
    }
  }

  const RoutingParams& params_;
  float logits_[kMaxExperts];
  uint32_t keys_[kMaxExperts];
};

void route_token(const RoutingParams& params, int64_t token) {
  int32_t ids[kMaxTopK];
  float weights[kMaxTopK];
  if (params.num_valid_tokens_ptr != nullptr && token >= *params.num_valid_tokens_ptr) {
    std::fill(ids, ids + params.top_k, -1);
    std::fill(weights, weights + params.top_k, 0.0f);
  } else {
    Row(params, token).choose(ids, weights);
  }
  for (int k = 0; k < params.top_k; ++k) {
    write_choice(params, token * params.top_k + k, ids[k], weights[k]);
  }
}

}  // namespace

void routing_cpu(const RoutingParams& params) {
  const int64_t tokens_per_task = std::max<int64_t>(1, kElementsPerTask / params.num_experts);
  torch::stable::parallel_for(0, params.num_tokens, tokens_per_task,
                              [&](int64_t begin, int64_t end) {
                                for (int64_t t = begin; t < end; ++t) route_token(params, t);
                              });
}

}  // namespace moelora

#include "routing.h"

#include <cmath>

#include "../ops.h"
#include "routing_math.h"

namespace moelora {
namespace {

DType float_dtype(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      check_type(false, name, ": expected bfloat16, float16 or float32, got ",
                 dtype_name(tensor.scalar_type()));
      return DType::kFloat32;
  }
}

const char* method_name(RoutingMethod method) {
  static const char* const kNames[] = {
      "softmax", "renormalize", "renormalize_naive", "deepseek_v3", "llama4", "topk", "sigmoid"};
  return kNames[static_cast<int>(method)];
}

// Everything that can be said without looking at a tensor's data pointer.
void check_options(const RoutingParams& params, int64_t n_group, int64_t topk_group,
                   bool has_bias) {
  const char* method = method_name(params.method);
  const bool sigmoid_key = uses_sigmoid_key(params.method);
  check_value(params.method != RoutingMethod::kLlama4 || params.top_k == 1,
              "top_k: method llama4 needs 1, got ", params.top_k);
  check_value(sigmoid_key || !has_bias, "correction_bias: method ", method, " has no use for it");
  check_value(sigmoid_key || !params.renormalize, "renormalize: method ", method,
              " has no use for it");
  check_value(params.method == RoutingMethod::kDeepseekV3 || (n_group == 1 && topk_group == 1),
              "n_group, topk_group: method ", method, " has no use for them, got ", n_group,
              " and ", topk_group);
  check_value(n_group >= 1 && params.num_experts % n_group == 0,
              "n_group: expected a divisor of the ", params.num_experts, " experts, got ", n_group);
  check_value(topk_group >= 1 && topk_group <= n_group,
              "topk_group: expected 1 to n_group = ", n_group, ", got ", topk_group);
  const int64_t reachable = topk_group * (params.num_experts / n_group);
  check_value(params.top_k <= reachable, "top_k: expected at most the ", reachable,
              " experts of topk_group = ", topk_group, " of n_group = ", n_group, " groups, got ",
              params.top_k);
  check_value(std::isfinite(params.routed_scaling_factor),
              "routed_scaling_factor: expected a finite fp32 number, got ",
              params.routed_scaling_factor);
}

}  // namespace

void routing_out(const Tensor& router_logits, int64_t top_k, int64_t method,
                 const OptionalTensor& correction_bias, int64_t n_group, int64_t topk_group,
                 bool renormalize, double routed_scaling_factor,
                 const OptionalTensor& num_valid_tokens, bool packed, Tensor topk_weights,
                 Tensor topk_ids, const OptionalTensor& replay_ids) {
  check_shape(router_logits, "router_logits", {-1, -1});
  const int64_t num_tokens = router_logits.size(0), num_experts = router_logits.size(1);
  check_value(num_experts >= 1 && num_experts <= kMaxExperts, "router_logits: expected 1 to ",
              kMaxExperts, " experts in the last dim, got ", shape_string(router_logits));
  check_last_dim_contiguous(router_logits, "router_logits");
  check_value(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
  check_value(top_k <= num_experts, "top_k: expected at most the ", num_experts, " experts, got ",
              top_k);
  check_value(method >= 0 && method <= static_cast<int64_t>(RoutingMethod::kSigmoid),
              "method: expected a code from 0 to ", static_cast<int>(RoutingMethod::kSigmoid),
              ", got ", method);

  RoutingParams params{};
  params.logits_dtype = float_dtype(router_logits, "router_logits");
  params.logits_ptr = router_logits.const_data_ptr();
  params.logits_stride = router_logits.stride(0);
  params.num_tokens = num_tokens;
  params.num_experts = static_cast<int32_t>(num_experts);
  params.top_k = static_cast<int32_t>(top_k);
  params.method = static_cast<RoutingMethod>(method);
  params.renormalize = renormalize;
  params.routed_scaling_factor = static_cast<float>(routed_scaling_factor);
  params.packed = packed;
  check_options(params, n_group, topk_group, correction_bias.has_value());
  params.n_group = static_cast<int32_t>(n_group);
  params.topk_group = static_cast<int32_t>(topk_group);

  // The buffers that are written, and none of an input's bytes with them.
  const auto writable = [&](const Tensor& out, const char* name) {
    check_no_overlap(out, name, router_logits, "router_logits");
    if (correction_bias.has_value()) {
      check_no_overlap(out, name, *correction_bias, "correction_bias");
    }
    if (num_valid_tokens.has_value()) {
      check_no_overlap(out, name, *num_valid_tokens, "num_valid_tokens");
    }
    return out.mutable_data_ptr();
  };
  if (correction_bias.has_value()) {
    params.correction_bias_dtype = float_dtype(*correction_bias, "correction_bias");
    check_out(*correction_bias, "correction_bias", {num_experts}, correction_bias->scalar_type(),
              router_logits);
    params.correction_bias_ptr = correction_bias->const_data_ptr();
  }
  if (num_valid_tokens.has_value()) {
    check_value(num_valid_tokens->numel() == 1, "num_valid_tokens: expected one number, got shape ",
                shape_string(*num_valid_tokens));
    check_dtype(*num_valid_tokens, "num_valid_tokens", ScalarType::Int);
    check_same_device(*num_valid_tokens, "num_valid_tokens", router_logits, "router_logits");
    params.num_valid_tokens_ptr = static_cast<const int32_t*>(num_valid_tokens->const_data_ptr());
  }
  check_out(topk_ids, "topk_ids", {num_tokens, top_k}, ScalarType::Int, router_logits);
  params.topk_ids_ptr = static_cast<int32_t*>(writable(topk_ids, "topk_ids"));
  if (packed) {
    check_value(topk_weights.numel() == 0, "topk_weights: expected an empty tensor with packed, ",
                "got shape ", shape_string(topk_weights));
  } else {
    check_out(topk_weights, "topk_weights", {num_tokens, top_k}, ScalarType::Float, router_logits);
    check_no_overlap(topk_weights, "topk_weights", topk_ids, "topk_ids");
    params.topk_weights_ptr = static_cast<float*>(writable(topk_weights, "topk_weights"));
  }
  if (replay_ids.has_value()) {
    params.replay_is_int16 = replay_ids->scalar_type() == ScalarType::Short;
    check_type(params.replay_is_int16 || replay_ids->scalar_type() == ScalarType::Int,
               "replay_ids: expected int16 or int32, got ", dtype_name(replay_ids->scalar_type()));
    check_out(*replay_ids, "replay_ids", {num_tokens, top_k}, replay_ids->scalar_type(),
              router_logits);
    check_no_overlap(*replay_ids, "replay_ids", topk_ids, "topk_ids");
    check_no_overlap(*replay_ids, "replay_ids", topk_weights, "topk_weights");
    params.replay_ids_ptr = writable(*replay_ids, "replay_ids");
  }
  run_on_device(router_logits, params, routing_cpu, launch_routing);
}

std::tuple<Tensor, Tensor> routing(const Tensor& router_logits, int64_t top_k, int64_t method,
                                   const OptionalTensor& correction_bias, int64_t n_group,
                                   int64_t topk_group, bool renormalize,
                                   double routed_scaling_factor,
                                   const OptionalTensor& num_valid_tokens, bool packed) {
  check_shape(router_logits, "router_logits", {-1, -1});
  check_value(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
  const int64_t num_tokens = router_logits.size(0);
  Tensor topk_weights = packed ? new_tensor(router_logits, {0}, ScalarType::Float)
                               : new_tensor(router_logits, {num_tokens, top_k}, ScalarType::Float);
  Tensor topk_ids = new_tensor(router_logits, {num_tokens, top_k}, ScalarType::Int);
  routing_out(router_logits, top_k, method, correction_bias, n_group, topk_group, renormalize,
              routed_scaling_factor, num_valid_tokens, packed, topk_weights, topk_ids,
              std::nullopt);
  return {topk_weights, topk_ids};
}

}  // namespace moelora

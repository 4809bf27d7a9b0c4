// The op fused_moe_lora: reads and checks the arguments of one call, picks a path from shapes, runs
// it.
#include "../ops.h"
#include "layer.h"
#include "path.h"
#include "plan.h"

namespace moelora {
namespace {

// The op's arguments by name, as the schema gives them.
struct LayerArguments {
  const Tensor &hidden_states, &w13, &w2;
  const OptionalTensor& topk_weights;
  const Tensor& topk_ids;
  int64_t num_experts, expert_offset, activation;
  double activation_alpha, activation_limit;
  int64_t gate_up_layout;
  bool weight_on_input;
  double routed_scaling_factor;
  const OptionalTensor &gate_up_a, &gate_up_b, &down_a, &down_b, &scaling, &ranks, &adapter_ids;
  const OptionalTensor &w13_bias, &w2_bias, &gate_up_lora_delta, &down_lora_delta;
  bool down_lora_delta_is_weighted;
};

void check_choice(int64_t code, int64_t count, const char* name) {
  check_value(code >= 0 && code < count, name, ": expected a code of 0 to ", count - 1, ", got ",
              code);
}

const void* optional_bias(const OptionalTensor& bias, const char* name, int64_t experts,
                          int64_t features, const Tensor& like) {
  if (!bias.has_value()) return nullptr;
  check_out(*bias, name, {experts, features}, like.scalar_type(), like);
  return bias->const_data_ptr();
}

const void* optional_delta(const OptionalTensor& delta, const char* name, int64_t tokens,
                           int64_t top_k, int64_t features, const Tensor& like) {
  if (!delta.has_value()) return nullptr;
  check_out(*delta, name, {tokens, top_k, features}, like.scalar_type(), like);
  check_aligned(*delta, name);
  return delta->const_data_ptr();
}

WeightOperand weight_operand(const Tensor& weight, const char* name, int64_t experts,
                             int64_t out_features, int64_t in_features, const Tensor& like) {
  check_shape(weight, name, {experts, out_features, in_features});
  check_dtype(weight, name, like.scalar_type());
  check_same_device(weight, name, like, "hidden_states");
  check_last_dim_contiguous(weight, name);
  check_aligned(weight, name);
  return {weight.const_data_ptr(), weight.stride(0), weight.stride(1), model_dtype(weight, name)};
}

// A tensor of an adapter stack [L, experts, rows, columns].
void check_stack(const Tensor& stack, const char* name, int64_t slots, int64_t experts,
                 int64_t rows, int64_t columns, const Tensor& like) {
  check_shape(stack, name, {slots, experts, rows, columns});
  check_dtype(stack, name, like.scalar_type());
  check_same_device(stack, name, like, "hidden_states");
  check_last_dim_contiguous(stack, name);
}

LoraSide lora_side(const OptionalTensor& a, const OptionalTensor& b, const char* a_name,
                   const char* b_name, int64_t slots, int64_t experts, int64_t in_features,
                   int64_t out_features, bool gate_up, const Tensor& like) {
  LoraSide side;
  check_value(a.has_value() == b.has_value(), a_name, " and ", b_name, ": give both or neither");
  if (!a.has_value()) return side;
  check_shape(*b, b_name, {slots, -1, out_features, -1});
  check_shape(*a, a_name, {slots, -1, -1, in_features});
  const int64_t rank = b->size(3), rows = a->size(2);
  check_value(rank >= 1 && rank <= kMaxRank, b_name, ": expected a rank of 1 to ", kMaxRank,
              ", got ", rank);
  check_value(rows == rank || (gate_up && rows == 2 * rank), a_name, ": expected ", rank,
              gate_up ? " or twice as many" : "", " rows for ", b_name, "'s rank, got ", rows);
  side.a_shared_outer = gate_up && a->size(1) == 1;
  side.b_shared_outer = !gate_up && b->size(1) == 1;
  check_stack(*a, a_name, slots, side.a_shared_outer ? 1 : experts, rows, in_features, like);
  check_stack(*b, b_name, slots, side.b_shared_outer ? 1 : experts, out_features, rank, like);
  side.a_ptr = a->const_data_ptr();
  side.a_slot_stride = a->stride(0);
  side.a_expert_stride = a->stride(1);
  side.a_row_stride = a->stride(2);
  side.b_ptr = b->const_data_ptr();
  side.b_slot_stride = b->stride(0);
  side.b_expert_stride = b->stride(1);
  side.b_row_stride = b->stride(2);
  side.rank = static_cast<int32_t>(rank);
  side.num_components = static_cast<int32_t>(rows / rank);
  return side;
}

LayerParams read_layer(const LayerArguments& args) {
  const Tensor& x = args.hidden_states;
  LayerParams layer = {};
  check_shape(x, "hidden_states", {-1, -1});
  layer.dtype = model_dtype(x, "hidden_states");
  check_last_dim_contiguous(x, "hidden_states");
  check_aligned(x, "hidden_states");
  layer.hidden_states_ptr = x.const_data_ptr();
  layer.hidden_states_stride = x.stride(0);
  layer.num_tokens = x.size(0);
  layer.hidden_size = x.size(1);
  check_shape(args.w13, "w13", {-1, -1, -1});
  const int64_t experts = args.w13.size(0), inner = args.w13.size(1) / 2;
  check_value(args.w13.size(1) % 2 == 0, "w13: expected [E_loc, 2I, H], got shape ",
              shape_string(args.w13));
  check_value(layer.hidden_size % 8 == 0 && layer.hidden_size > 0,
              "hidden_states: expected a hidden size that is a multiple of 8, got ",
              layer.hidden_size);
  check_value(inner % 8 == 0 && inner > 0,
              "w13: expected an intermediate size that is a multiple of 8, got ", inner);
  check_value(experts >= 1 && experts <= kMaxExperts, "w13: expected 1 to ", kMaxExperts,
              " experts, got ", experts);
  layer.intermediate_size = inner;
  layer.num_local_experts = static_cast<int32_t>(experts);
  layer.w13 = weight_operand(args.w13, "w13", experts, 2 * inner, layer.hidden_size, x);
  layer.w2 = weight_operand(args.w2, "w2", experts, layer.hidden_size, inner, x);
  check_value(args.num_experts >= 1 && args.num_experts <= kMaxExperts,
              "num_experts: expected 1 to ", kMaxExperts, ", got ", args.num_experts);
  check_value(args.expert_offset >= 0 && args.expert_offset + experts <= args.num_experts,
              "expert_offset: expected ", experts, " local experts from ", args.expert_offset,
              " on to lie inside the model's ", args.num_experts, " (num_experts)");
  layer.num_experts = static_cast<int32_t>(args.num_experts);
  layer.expert_offset = static_cast<int32_t>(args.expert_offset);

  if (args.topk_weights.has_value()) {
    layer.ids = id_matrix(args.topk_ids, "topk_ids", x);
    layer.weights =
        weight_matrix(*args.topk_weights, "topk_weights", layer.ids, layer.num_tokens, x);
  } else {
    layer.ids = packed_matrix(args.topk_ids, "topk_ids (packed, as topk_weights is None)", x);
    layer.weights = {layer.ids.ptr, layer.ids.row_stride, layer.ids.col_stride,
                     WeightMatrix::Kind::kPacked, layer.ids.num_cols};
  }
  check_shape(args.topk_ids, "topk_ids", {layer.num_tokens, -1});
  layer.top_k = layer.ids.num_cols;
  check_value(layer.top_k <= args.num_experts,
              "topk_ids: expected at most num_experts = ", args.num_experts,
              " experts per token, got ", layer.top_k);

  layer.w13_bias_ptr = optional_bias(args.w13_bias, "w13_bias", experts, 2 * inner, x);
  layer.w2_bias_ptr = optional_bias(args.w2_bias, "w2_bias", experts, layer.hidden_size, x);
  check_choice(args.activation, 3, "activation");
  check_choice(args.gate_up_layout, 3, "gate_up_layout");
  layer.activation = static_cast<ActivationKind>(args.activation);
  layer.layout = static_cast<GateUpLayout>(args.gate_up_layout);
  layer.activation_alpha = static_cast<float>(args.activation_alpha);
  layer.activation_limit = static_cast<float>(args.activation_limit);
  layer.weight_on_input = args.weight_on_input;
  check_value(
      !args.weight_on_input || layer.top_k == 1,
      "apply_router_weight_on_input: needs one expert per token (K = 1), got K = ", layer.top_k);
  layer.routed_scaling_factor = static_cast<float>(args.routed_scaling_factor);

  const OptionalTensor& any_a = args.gate_up_a.has_value() ? args.gate_up_a : args.down_a;
  const int64_t slots = any_a.has_value() ? any_a->size(0) : 0;
  layer.gate_up = lora_side(args.gate_up_a, args.gate_up_b, "gate_up_a", "gate_up_b", slots,
                            experts, layer.hidden_size, 2 * inner, true, x);
  layer.down = lora_side(args.down_a, args.down_b, "down_a", "down_b", slots, experts, inner,
                         layer.hidden_size, false, x);
  layer.slots = slot_view(args.adapter_ids, args.ranks, slots, layer.num_tokens, x);
  if (slots > 0 && args.scaling.has_value()) {
    check_out(*args.scaling, "scaling", {slots, 3}, ScalarType::Float, x);
    layer.scaling_ptr = static_cast<const float*>(args.scaling->const_data_ptr());
  }

  check_value(!(args.gate_up_lora_delta.has_value() && layer.gate_up.exists()),
              "gate_up_lora_delta: takes the place of the lora's gate_up part; give one of them");
  check_value(!(args.down_lora_delta.has_value() && layer.down.exists()),
              "down_lora_delta: takes the place of the lora's down part; give one of them");
  layer.gate_up_delta_ptr = optional_delta(args.gate_up_lora_delta, "gate_up_lora_delta",
                                           layer.num_tokens, layer.top_k, 2 * inner, x);
  layer.down_delta_ptr = optional_delta(args.down_lora_delta, "down_lora_delta", layer.num_tokens,
                                        layer.top_k, layer.hidden_size, x);
  layer.down_delta_is_weighted = args.down_lora_delta_is_weighted;
  return layer;
}

void set_out(LayerParams& layer, const LayerArguments& args, const Tensor& out) {
  const Tensor& x = args.hidden_states;
  check_shape(out, "out", {layer.num_tokens, layer.hidden_size});
  check_dtype(out, "out", x.scalar_type());
  check_same_device(out, "out", x, "hidden_states");
  check_last_dim_contiguous(out, "out");
  check_aligned(out, "out");
  const std::pair<const OptionalTensor&, const char*> optional_inputs[] = {
      {args.topk_weights, "topk_weights"},
      {args.gate_up_a, "gate_up_a"},
      {args.gate_up_b, "gate_up_b"},
      {args.down_a, "down_a"},
      {args.down_b, "down_b"},
      {args.scaling, "scaling"},
      {args.ranks, "ranks"},
      {args.adapter_ids, "adapter_ids"},
      {args.w13_bias, "w13_bias"},
      {args.w2_bias, "w2_bias"},
      {args.gate_up_lora_delta, "gate_up_lora_delta"},
      {args.down_lora_delta, "down_lora_delta"}};
  const ByteRange bytes(out);
  bytes.check_apart("out", x, "hidden_states");
  bytes.check_apart("out", args.w13, "w13");
  bytes.check_apart("out", args.w2, "w2");
  bytes.check_apart("out", args.topk_ids, "topk_ids");
  for (const auto& [input, name] : optional_inputs) {
    if (input.has_value()) bytes.check_apart("out", *input, name);
  }
  layer.out_ptr = out.mutable_data_ptr();
  layer.out_stride = out.stride(0);
}

// do_finalize=False: the caller gets the down rows and what it needs to finish by itself.
void set_unfinished(LayerParams& layer, const LayerArguments& args,
                    const OptionalTensor& down_output, const OptionalTensor& expanded_to_permuted,
                    const OptionalTensor& activation_lora_input) {
  const Tensor& x = args.hidden_states;
  check_value(down_output.has_value() && expanded_to_permuted.has_value(),
              "out: give it, or down_output and expanded_to_permuted");
  const int64_t max_rows = plan_decomposed(layer, x.is_cuda()).max_rows;
  check_out(*down_output, "down_output", {max_rows, layer.hidden_size}, x.scalar_type(), x);
  check_out(*expanded_to_permuted, "expanded_to_permuted", {layer.num_pairs()}, ScalarType::Int, x);
  layer.down_output_ptr = down_output->mutable_data_ptr();
  layer.expanded_to_permuted_ptr = static_cast<int32_t*>(expanded_to_permuted->mutable_data_ptr());
  if (!activation_lora_input.has_value()) return;
  check_out(*activation_lora_input, "activation_lora_input",
            {layer.num_tokens, layer.top_k, layer.intermediate_size}, x.scalar_type(), x);
  layer.lora_input_ptr = activation_lora_input->mutable_data_ptr();
}

void check_no_limit(std::optional<int64_t> limit) {
  check_value(!limit.has_value(),
              "workspace_limit_bytes: has no use with do_finalize=False, whose outputs are of the "
              "whole batch");
}

void* handle(int64_t raw) { return reinterpret_cast<void*>(static_cast<intptr_t>(raw)); }

void run_layer(const LayerParams& layer, LayerPath path, std::optional<int64_t> limit,
               LayerStreams streams, const Tensor& like, const Tensor& workspace) {
  check_dtype(workspace, "workspace", ScalarType::Byte);
  check_same_device(workspace, "workspace", like, "hidden_states");
  check_contiguous(workspace, "workspace");
  const int64_t needed = layer_workspace_bytes(layer, path, like.is_cuda(), limit);
  check_value(workspace.numel() >= needed, "workspace: expected at least ", needed, " bytes, got ",
              workspace.numel());
  void* workspace_ptr = workspace.mutable_data_ptr();
  if (like.is_cpu()) return run_decomposed_cpu(layer, limit, workspace_ptr);
  require_supported_device(like.get_device_index());
  DeviceScope scope(like);
  streams.main = current_stream(like);
  run_layer_cuda(layer, path, is_sm90(like.get_device_index()), limit, streams, workspace_ptr);
}

}  // namespace

int64_t fused_moe_lora_workspace_bytes(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                                       int64_t num_local_experts, int64_t hidden_size,
                                       int64_t intermediate_size, bool fp32, int64_t num_slots,
                                       int64_t gate_up_rank, int64_t gate_up_components,
                                       bool gate_up_a_shared_outer, int64_t down_rank, bool cuda,
                                       int64_t path, std::optional<int64_t> workspace_limit_bytes) {
  check_value(num_experts >= 1, "num_experts: expected 1 or more, got ", num_experts);
  check_choice(path, kNumLayerPaths, "path");
  LayerParams layer = {};
  layer.num_tokens = num_tokens;
  layer.top_k = static_cast<int32_t>(top_k);
  layer.num_experts = static_cast<int32_t>(num_experts);
  layer.num_local_experts = static_cast<int32_t>(num_local_experts);
  layer.hidden_size = hidden_size;
  layer.intermediate_size = intermediate_size;
  layer.dtype = fp32 ? DType::kFloat32 : DType::kBFloat16;
  layer.slots.num_slots = static_cast<int32_t>(num_slots);
  layer.gate_up.rank = static_cast<int32_t>(gate_up_rank);
  layer.gate_up.num_components = static_cast<int32_t>(gate_up_components);
  layer.gate_up.a_shared_outer = gate_up_a_shared_outer;
  layer.down.rank = static_cast<int32_t>(down_rank);
  // Nothing is read: only whether a side has adapters counts.
  if (layer.gate_up.exists()) layer.gate_up.a_ptr = layer.gate_up.b_ptr = &layer;
  if (layer.down.exists()) layer.down.a_ptr = layer.down.b_ptr = &layer;
  return layer_workspace_bytes(layer, static_cast<LayerPath>(path), cuda, workspace_limit_bytes);
}

void fused_moe_lora_out(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2,
                        const OptionalTensor& topk_weights, const Tensor& topk_ids,
                        int64_t num_experts, int64_t expert_offset, int64_t activation,
                        double activation_alpha, double activation_limit, int64_t gate_up_layout,
                        bool weight_on_input, double routed_scaling_factor, int64_t path,
                        const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b,
                        const OptionalTensor& down_a, const OptionalTensor& down_b,
                        const OptionalTensor& scaling, const OptionalTensor& ranks,
                        const OptionalTensor& adapter_ids, const OptionalTensor& w13_bias,
                        const OptionalTensor& w2_bias, const OptionalTensor& gate_up_lora_delta,
                        const OptionalTensor& down_lora_delta, bool down_lora_delta_is_weighted,
                        std::optional<int64_t> workspace_limit_bytes, int64_t side_stream,
                        int64_t fork_event, int64_t join_event, int64_t lora_ready_event,
                        int64_t down_gemm_done_event, const OptionalTensor& out,
                        const OptionalTensor& down_output,
                        const OptionalTensor& expanded_to_permuted,
                        const OptionalTensor& activation_lora_input, Tensor workspace) {
  const LayerArguments args(
      hidden_states, w13, w2, topk_weights, topk_ids, num_experts, expert_offset, activation,
      activation_alpha, activation_limit, gate_up_layout, weight_on_input, routed_scaling_factor,
      gate_up_a, gate_up_b, down_a, down_b, scaling, ranks, adapter_ids, w13_bias, w2_bias,
      gate_up_lora_delta, down_lora_delta, down_lora_delta_is_weighted);
  check_choice(path, kNumLayerPaths, "path");
  LayerParams layer = read_layer(args);
  if (out.has_value()) {
    set_out(layer, args, *out);
  } else {
    check_no_limit(workspace_limit_bytes);
    set_unfinished(layer, args, down_output, expanded_to_permuted, activation_lora_input);
  }
  LayerStreams streams;
  streams.side = handle(side_stream);
  streams.fork_event = handle(fork_event);
  streams.join_event = handle(join_event);
  streams.lora_ready_event = handle(lora_ready_event);
  streams.down_gemm_done_event = handle(down_gemm_done_event);
  run_layer(layer, static_cast<LayerPath>(path), workspace_limit_bytes, streams, hidden_states,
            workspace);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_moe_lora(
    const Tensor& hidden_states, const Tensor& w13, const Tensor& w2,
    const OptionalTensor& topk_weights, const Tensor& topk_ids, int64_t num_experts,
    int64_t expert_offset, int64_t activation, double activation_alpha, double activation_limit,
    int64_t gate_up_layout, bool weight_on_input, double routed_scaling_factor, int64_t path,
    const OptionalTensor& gate_up_a, const OptionalTensor& gate_up_b, const OptionalTensor& down_a,
    const OptionalTensor& down_b, const OptionalTensor& scaling, const OptionalTensor& ranks,
    const OptionalTensor& adapter_ids, const OptionalTensor& w13_bias,
    const OptionalTensor& w2_bias, const OptionalTensor& gate_up_lora_delta,
    const OptionalTensor& down_lora_delta, bool down_lora_delta_is_weighted,
    std::optional<int64_t> workspace_limit_bytes, bool do_finalize) {
  const LayerArguments args(
      hidden_states, w13, w2, topk_weights, topk_ids, num_experts, expert_offset, activation,
      activation_alpha, activation_limit, gate_up_layout, weight_on_input, routed_scaling_factor,
      gate_up_a, gate_up_b, down_a, down_b, scaling, ranks, adapter_ids, w13_bias, w2_bias,
      gate_up_lora_delta, down_lora_delta, down_lora_delta_is_weighted);
  check_choice(path, kNumLayerPaths, "path");
  if (!do_finalize) check_no_limit(workspace_limit_bytes);
  LayerParams layer = read_layer(args);
  const auto fresh = [&](bool wanted, std::initializer_list<int64_t> shape, ScalarType dtype) {
    return wanted ? new_tensor(hidden_states, shape, dtype) : new_tensor(hidden_states, {0}, dtype);
  };
  const ScalarType dtype = hidden_states.scalar_type();
  const bool cuda = hidden_states.is_cuda();
  const int64_t max_rows = do_finalize ? 0 : plan_decomposed(layer, cuda).max_rows;
  const bool lora_input = !do_finalize && (gate_up_a.has_value() || down_a.has_value() ||
                                           gate_up_lora_delta.has_value());
  Tensor out = fresh(do_finalize, {layer.num_tokens, layer.hidden_size}, dtype);
  Tensor down_output = fresh(!do_finalize, {max_rows, layer.hidden_size}, dtype);
  Tensor expanded_to_permuted = fresh(!do_finalize, {layer.num_pairs()}, ScalarType::Int);
  Tensor activation_lora_input =
      fresh(lora_input, {layer.num_tokens, layer.top_k, layer.intermediate_size}, dtype);
  if (do_finalize) {
    set_out(layer, args, out);
  } else {
    set_unfinished(layer, args, down_output, expanded_to_permuted,
                   lora_input ? OptionalTensor(activation_lora_input) : std::nullopt);
  }
  const auto layer_path = static_cast<LayerPath>(path);
  const int64_t bytes = layer_workspace_bytes(layer, layer_path, cuda, workspace_limit_bytes);
  Tensor workspace = new_tensor(hidden_states, {bytes}, ScalarType::Byte);
  run_layer(layer, layer_path, workspace_limit_bytes, {}, hidden_states, workspace);
  return {out, down_output, expanded_to_permuted, activation_lora_input};
}

}  // namespace moelora

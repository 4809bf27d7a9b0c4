// The op activation: gate_up rows (and a delta by pair) to z by permuted row, and to the input of
// the down adapter by pair.
#include "activation.h"

#include "../ops.h"

namespace moelora {

void activation_out(const Tensor& gate_up, const Tensor& expanded_to_permuted,
                    const OptionalTensor& gate_up_lora_delta, int64_t top_k, int64_t activation,
                    double alpha, double limit, int64_t gate_up_layout, Tensor z,
                    const OptionalTensor& activation_lora_input) {
  check_shape(gate_up, "gate_up", {-1, -1});
  const DType dtype = model_dtype(gate_up, "gate_up");
  check_contiguous(gate_up, "gate_up");
  check_aligned(gate_up, "gate_up");
  const int64_t max_rows = gate_up.size(0), width = gate_up.size(1), intermediate = width / 2;
  check_value(width % 16 == 0, "gate_up: expected rows of 2I elements with I a multiple of 8, ",
              "got shape ", shape_string(gate_up));
  check_value(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
  check_shape(expanded_to_permuted, "expanded_to_permuted", {-1});
  const int64_t num_pairs = expanded_to_permuted.size(0), num_tokens = num_pairs / top_k;
  check_value(num_tokens * top_k == num_pairs, "expanded_to_permuted: expected a multiple of ",
              top_k, " (top_k) elements, got ", num_pairs);
  check_value(activation >= 0 && activation <= 2, "activation: unknown code ", activation);
  check_value(gate_up_layout >= 0 && gate_up_layout <= 2, "gate_up_layout: unknown code ",
              gate_up_layout);
  check_out(z, "z", {max_rows, intermediate}, gate_up.scalar_type(), gate_up);
  check_aligned(z, "z");
  const auto check_output = [&](const Tensor& out, const char* name) {
    check_no_overlap(out, name, gate_up, "gate_up");
    check_no_overlap(out, name, expanded_to_permuted, "expanded_to_permuted");
    if (gate_up_lora_delta.has_value()) {
      check_no_overlap(out, name, *gate_up_lora_delta, "gate_up_lora_delta");
    }
  };
  check_output(z, "z");

  ActivationParams params;
  params.delta_ptr = nullptr;
  if (gate_up_lora_delta.has_value()) {
    const Tensor& delta = *gate_up_lora_delta;
    check_out(delta, "gate_up_lora_delta", {num_tokens, top_k, width}, gate_up.scalar_type(),
              gate_up);
    check_aligned(delta, "gate_up_lora_delta");
    params.delta_ptr = delta.const_data_ptr();
  }
  params.lora_input_ptr = nullptr;
  if (activation_lora_input.has_value()) {
    const Tensor& lora_input = *activation_lora_input;
    check_out(lora_input, "activation_lora_input", {num_tokens, top_k, intermediate},
              gate_up.scalar_type(), gate_up);
    check_aligned(lora_input, "activation_lora_input");
    check_output(lora_input, "activation_lora_input");
    check_no_overlap(lora_input, "activation_lora_input", z, "z");
    params.lora_input_ptr = lora_input.mutable_data_ptr();
  }
  params.gate_up_ptr = gate_up.const_data_ptr();
  params.expanded_to_permuted_ptr =
      int32_map(expanded_to_permuted, "expanded_to_permuted", num_pairs, gate_up);
  params.z_ptr = z.mutable_data_ptr();
  params.num_pairs = num_pairs;
  params.max_rows = max_rows;
  params.intermediate_size = intermediate;
  params.activation = static_cast<ActivationKind>(activation);
  params.layout = static_cast<GateUpLayout>(gate_up_layout);
  params.alpha = static_cast<float>(alpha);
  params.limit = static_cast<float>(limit);
  params.dtype = dtype;
  if (num_pairs == 0 || intermediate == 0) return;
  run_on_device(gate_up, params, activation_cpu, launch_activation);
}

std::tuple<Tensor, Tensor> activation(const Tensor& gate_up, const Tensor& expanded_to_permuted,
                                      const OptionalTensor& gate_up_lora_delta, int64_t top_k,
                                      int64_t activation, double alpha, double limit,
                                      int64_t gate_up_layout, bool lora_input) {
  check_shape(gate_up, "gate_up", {-1, -1});
  check_shape(expanded_to_permuted, "expanded_to_permuted", {-1});
  check_value(top_k >= 1 && top_k <= kMaxTopK, "top_k: expected 1 to ", kMaxTopK, ", got ", top_k);
  const int64_t intermediate = gate_up.size(1) / 2;
  Tensor z = new_tensor(gate_up, {gate_up.size(0), intermediate}, gate_up.scalar_type());
  OptionalTensor by_pair;
  if (lora_input) {
    by_pair = new_tensor(gate_up, {expanded_to_permuted.size(0) / top_k, top_k, intermediate},
                         gate_up.scalar_type());
  }
  activation_out(gate_up, expanded_to_permuted, gate_up_lora_delta, top_k, activation, alpha, limit,
                 gate_up_layout, z, by_pair);
  return {z, by_pair.has_value() ? *by_pair : new_tensor(gate_up, {0}, gate_up.scalar_type())};
}

}  // namespace moelora

// Every schema and kernel registration of moelora, on one page. docs/ops.md explains the schemas
// one by one.
#include "ops.h"

STABLE_TORCH_LIBRARY(moelora, m) {
  m.def(
      "routing(Tensor router_logits, int top_k, int method, *, Tensor? correction_bias=None, "
      "int n_group=1, int topk_group=1, bool renormalize=False, float routed_scaling_factor=1.0, "
      "Tensor? num_valid_tokens=None, bool packed=False) -> (Tensor, Tensor)");
  m.def(
      "routing.out(Tensor router_logits, int top_k, int method, *, Tensor? correction_bias=None, "
      "int n_group=1, int topk_group=1, bool renormalize=False, float routed_scaling_factor=1.0, "
      "Tensor? num_valid_tokens=None, bool packed=False, Tensor(a!) topk_weights, "
      "Tensor(b!) topk_ids, Tensor(c!)? replay_ids=None) -> ()");

  m.def("pack_topk(Tensor topk_weights, Tensor topk_ids) -> Tensor");
  m.def("pack_topk.out(Tensor topk_weights, Tensor topk_ids, *, Tensor(a!) out) -> ()");
  m.def("unpack_topk(Tensor packed) -> (Tensor, Tensor)");
  m.def("unpack_topk.out(Tensor packed, *, Tensor(a!) topk_weights, Tensor(b!) topk_ids) -> ()");

  m.def(
      "moe_sort(Tensor topk_ids, Tensor? adapter_ids, Tensor? ranks, int num_slots, "
      "int num_local_experts, int expert_offset, int tile_rows) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "moe_sort.out(Tensor topk_ids, Tensor? adapter_ids, Tensor? ranks, int num_slots, "
      "int num_local_experts, int expert_offset, int tile_rows, *, "
      "Tensor(a!) expanded_to_permuted, Tensor(b!) permuted_to_expanded, "
      "Tensor(c!) expert_offsets, Tensor(d!) tile_expert, Tensor(e!) tile_row_limit, "
      "Tensor(f!) num_padded_rows, Tensor(g!) workspace) -> ()");

  m.def(
      "permute(Tensor hidden_states, Tensor permuted_to_expanded, int top_k, "
      "Tensor? row_weights=None) -> Tensor");
  m.def(
      "permute.out(Tensor hidden_states, Tensor permuted_to_expanded, int top_k, "
      "Tensor? row_weights=None, *, Tensor(a!) out) -> ()");

  m.def(
      "gate_up_gemm(Tensor permuted, Tensor w13, Tensor? w13_bias, Tensor expert_offsets, "
      "Tensor tile_expert, Tensor tile_row_limit, int expected_rows) -> Tensor");
  m.def(
      "gate_up_gemm.out(Tensor permuted, Tensor w13, Tensor? w13_bias, Tensor expert_offsets, "
      "Tensor tile_expert, Tensor tile_row_limit, int expected_rows, *, Tensor(a!) out) -> ()");
  m.def(
      "down_gemm(Tensor z, Tensor w2, Tensor? w2_bias, Tensor expert_offsets, "
      "Tensor tile_expert, Tensor tile_row_limit, int expected_rows) -> Tensor");
  m.def(
      "down_gemm.out(Tensor z, Tensor w2, Tensor? w2_bias, Tensor expert_offsets, "
      "Tensor tile_expert, Tensor tile_row_limit, int expected_rows, *, Tensor(a!) out) -> ()");

  m.def(
      "lora_shrink(Tensor x, Tensor lora_a, Tensor topk_ids, Tensor? adapter_ids, Tensor? ranks, "
      "int rank, int part, int num_local_experts, int expert_offset, "
      "Tensor? permuted_to_expanded=None, Tensor? tile_expert=None, "
      "Tensor? tile_row_limit=None) -> Tensor");
  m.def(
      "lora_shrink.out(Tensor x, Tensor lora_a, Tensor topk_ids, Tensor? adapter_ids, "
      "Tensor? ranks, int rank, int part, int num_local_experts, int expert_offset, "
      "Tensor? permuted_to_expanded=None, Tensor? tile_expert=None, "
      "Tensor? tile_row_limit=None, *, Tensor(a!) out) -> ()");
  m.def(
      "lora_expand(Tensor v, Tensor lora_b, Tensor topk_ids, Tensor? adapter_ids, Tensor? ranks, "
      "Tensor? scaling, Tensor? row_weights, int part, int num_local_experts, int expert_offset, "
      "Tensor? permuted_to_expanded=None, Tensor? tile_expert=None, "
      "Tensor? tile_row_limit=None) -> Tensor");
  m.def(
      "lora_expand.out(Tensor v, Tensor lora_b, Tensor topk_ids, Tensor? adapter_ids, "
      "Tensor? ranks, Tensor? scaling, Tensor? row_weights, int part, int num_local_experts, "
      "int expert_offset, Tensor? permuted_to_expanded=None, Tensor? tile_expert=None, "
      "Tensor? tile_row_limit=None, *, Tensor(a!) out) -> ()");

  m.def(
      "activation(Tensor gate_up, Tensor expanded_to_permuted, Tensor? gate_up_lora_delta, "
      "int top_k, int activation, float alpha, float limit, int gate_up_layout, "
      "bool lora_input) -> (Tensor, Tensor)");
  m.def(
      "activation.out(Tensor gate_up, Tensor expanded_to_permuted, Tensor? gate_up_lora_delta, "
      "int top_k, int activation, float alpha, float limit, int gate_up_layout, *, "
      "Tensor(a!) z, Tensor(b!)? activation_lora_input=None) -> ()");

  m.def(
      "finalize(Tensor down, Tensor? topk_weights, Tensor expanded_to_permuted, "
      "Tensor? down_lora_delta, int top_k, bool delta_is_weighted, "
      "float routed_scaling_factor) -> Tensor");
  m.def(
      "finalize.out(Tensor down, Tensor? topk_weights, Tensor expanded_to_permuted, "
      "Tensor? down_lora_delta, int top_k, bool delta_is_weighted, "
      "float routed_scaling_factor, *, Tensor(a!) out) -> ()");

  m.def(
      "fused_moe_lora(Tensor hidden_states, Tensor w13, Tensor w2, Tensor? topk_weights, Tensor "
      "topk_ids, int num_experts, int expert_offset=0, int activation=0, float "
      "activation_alpha=1.702, float activation_limit=7.0, int gate_up_layout=0, bool "
      "weight_on_input=False, float routed_scaling_factor=1.0, int path=0, Tensor? "
      "gate_up_a=None, Tensor? gate_up_b=None, Tensor? down_a=None, Tensor? down_b=None, "
      "Tensor? scaling=None, Tensor? ranks=None, Tensor? adapter_ids=None, Tensor? "
      "w13_bias=None, Tensor? w2_bias=None, Tensor? gate_up_lora_delta=None, Tensor? "
      "down_lora_delta=None, bool down_lora_delta_is_weighted=False, int? "
      "workspace_limit_bytes=None, *, bool do_finalize=True) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "fused_moe_lora.out(Tensor hidden_states, Tensor w13, Tensor w2, Tensor? topk_weights, "
      "Tensor topk_ids, int num_experts, int expert_offset=0, int activation=0, float "
      "activation_alpha=1.702, float activation_limit=7.0, int gate_up_layout=0, bool "
      "weight_on_input=False, float routed_scaling_factor=1.0, int path=0, Tensor? "
      "gate_up_a=None, Tensor? gate_up_b=None, Tensor? down_a=None, Tensor? down_b=None, "
      "Tensor? scaling=None, Tensor? ranks=None, Tensor? adapter_ids=None, Tensor? "
      "w13_bias=None, Tensor? w2_bias=None, Tensor? gate_up_lora_delta=None, Tensor? "
      "down_lora_delta=None, bool down_lora_delta_is_weighted=False, int? "
      "workspace_limit_bytes=None, int side_stream=0, int fork_event=0, int join_event=0, int "
      "lora_ready_event=0, int down_gemm_done_event=0, *, "
      "Tensor(a!)? out=None, Tensor(b!)? down_output=None, Tensor(c!)? "
      "expanded_to_permuted=None, Tensor(d!)? activation_lora_input=None, Tensor(e!) workspace) "
      "-> ()");
  m.def(
      "fused_moe_lora_workspace_bytes(int num_tokens, int top_k, int num_experts, "
      "int num_local_experts, int hidden_size, int intermediate_size, bool fp32, int num_slots, "
      "int gate_up_rank, int gate_up_components, bool gate_up_a_shared_outer, int down_rank, "
      "bool cuda, int path=0, int? workspace_limit_bytes=None) -> int");
}

namespace {

// The same functions serve both devices: each looks at its tensors and runs the CPU code or
// launches the kernel.
void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("routing", TORCH_BOX(&moelora::routing));
  m.impl("routing.out", TORCH_BOX(&moelora::routing_out));
  m.impl("pack_topk", TORCH_BOX(&moelora::pack_topk));
  m.impl("pack_topk.out", TORCH_BOX(&moelora::pack_topk_out));
  m.impl("unpack_topk", TORCH_BOX(&moelora::unpack_topk));
  m.impl("unpack_topk.out", TORCH_BOX(&moelora::unpack_topk_out));
  m.impl("moe_sort", TORCH_BOX(&moelora::moe_sort));
  m.impl("moe_sort.out", TORCH_BOX(&moelora::moe_sort_out));
  m.impl("permute", TORCH_BOX(&moelora::permute));
  m.impl("permute.out", TORCH_BOX(&moelora::permute_out));
  m.impl("gate_up_gemm", TORCH_BOX(&moelora::gate_up_gemm));
  m.impl("gate_up_gemm.out", TORCH_BOX(&moelora::gate_up_gemm_out));
  m.impl("down_gemm", TORCH_BOX(&moelora::down_gemm));
  m.impl("down_gemm.out", TORCH_BOX(&moelora::down_gemm_out));
  m.impl("lora_shrink", TORCH_BOX(&moelora::lora_shrink));
  m.impl("lora_shrink.out", TORCH_BOX(&moelora::lora_shrink_out));
  m.impl("lora_expand", TORCH_BOX(&moelora::lora_expand));
  m.impl("lora_expand.out", TORCH_BOX(&moelora::lora_expand_out));
  m.impl("activation", TORCH_BOX(&moelora::activation));
  m.impl("activation.out", TORCH_BOX(&moelora::activation_out));
  m.impl("finalize", TORCH_BOX(&moelora::finalize));
  m.impl("finalize.out", TORCH_BOX(&moelora::finalize_out));
  m.impl("fused_moe_lora", TORCH_BOX(&moelora::fused_moe_lora));
  m.impl("fused_moe_lora.out", TORCH_BOX(&moelora::fused_moe_lora_out));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moelora, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(moelora, CUDA, m) { register_kernels(m); }

// Shape arithmetic: no tensor, so no device.
STABLE_TORCH_LIBRARY_IMPL(moelora, CompositeExplicitAutograd, m) {
  m.impl("fused_moe_lora_workspace_bytes", TORCH_BOX(&moelora::fused_moe_lora_workspace_bytes));
}

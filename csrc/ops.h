// The C++ function behind every schema in registration.cpp. `<op>` returns fresh tensors,
// `<op>_out` writes the caller's.
#pragma once

#include "common/torch_bridge.h"

namespace moelora {

std::tuple<Tensor, Tensor> routing(const Tensor& router_logits, int64_t top_k, int64_t method,
                                   const OptionalTensor& correction_bias, int64_t n_group,
                                   int64_t topk_group, bool renormalize,
                                   double routed_scaling_factor,
                                   const OptionalTensor& num_valid_tokens, bool packed);
void routing_out(const Tensor& router_logits, int64_t top_k, int64_t method,
                 const OptionalTensor& correction_bias, int64_t n_group, int64_t topk_group,
                 bool renormalize, double routed_scaling_factor,
                 const OptionalTensor& num_valid_tokens, bool packed, Tensor topk_weights,
                 Tensor topk_ids, const OptionalTensor& replay_ids);

Tensor pack_topk(const Tensor& topk_weights, const Tensor& topk_ids);
void pack_topk_out(const Tensor& topk_weights, const Tensor& topk_ids, Tensor out);
std::tuple<Tensor, Tensor> unpack_topk(const Tensor& packed);
void unpack_topk_out(const Tensor& packed, Tensor topk_weights, Tensor topk_ids);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> moe_sort(
    const Tensor& topk_ids, const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
    int64_t num_slots, int64_t num_local_experts, int64_t expert_offset, int64_t tile_rows);
void moe_sort_out(const Tensor& topk_ids, const OptionalTensor& adapter_ids,
                  const OptionalTensor& ranks, int64_t num_slots, int64_t num_local_experts,
                  int64_t expert_offset, int64_t tile_rows, Tensor expanded_to_permuted,
                  Tensor permuted_to_expanded, Tensor expert_offsets, Tensor tile_expert,
                  Tensor tile_row_limit, Tensor num_padded_rows, Tensor workspace);

Tensor permute(const Tensor& hidden_states, const Tensor& permuted_to_expanded, int64_t top_k,
               const OptionalTensor& row_weights);
void permute_out(const Tensor& hidden_states, const Tensor& permuted_to_expanded, int64_t top_k,
                 const OptionalTensor& row_weights, Tensor out);

Tensor gate_up_gemm(const Tensor& permuted, const Tensor& w13, const OptionalTensor& w13_bias,
                    const Tensor& expert_offsets, const Tensor& tile_expert,
                    const Tensor& tile_row_limit, int64_t expected_rows);
void gate_up_gemm_out(const Tensor& permuted, const Tensor& w13, const OptionalTensor& w13_bias,
                      const Tensor& expert_offsets, const Tensor& tile_expert,
                      const Tensor& tile_row_limit, int64_t expected_rows, Tensor out);
Tensor down_gemm(const Tensor& z, const Tensor& w2, const OptionalTensor& w2_bias,
                 const Tensor& expert_offsets, const Tensor& tile_expert,
                 const Tensor& tile_row_limit, int64_t expected_rows);
void down_gemm_out(const Tensor& z, const Tensor& w2, const OptionalTensor& w2_bias,
                   const Tensor& expert_offsets, const Tensor& tile_expert,
                   const Tensor& tile_row_limit, int64_t expected_rows, Tensor out);

Tensor lora_shrink(const Tensor& x, const Tensor& lora_a, const Tensor& topk_ids,
                   const OptionalTensor& adapter_ids, const OptionalTensor& ranks, int64_t rank,
                   int64_t part, int64_t num_local_experts, int64_t expert_offset,
                   const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                   const OptionalTensor& tile_row_limit);
void lora_shrink_out(const Tensor& x, const Tensor& lora_a, const Tensor& topk_ids,
                     const OptionalTensor& adapter_ids, const OptionalTensor& ranks, int64_t rank,
                     int64_t part, int64_t num_local_experts, int64_t expert_offset,
                     const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                     const OptionalTensor& tile_row_limit, Tensor out);

Tensor lora_expand(const Tensor& v, const Tensor& lora_b, const Tensor& topk_ids,
                   const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
                   const OptionalTensor& scaling, const OptionalTensor& row_weights, int64_t part,
                   int64_t num_local_experts, int64_t expert_offset,
                   const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                   const OptionalTensor& tile_row_limit);
void lora_expand_out(const Tensor& v, const Tensor& lora_b, const Tensor& topk_ids,
                     const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
                     const OptionalTensor& scaling, const OptionalTensor& row_weights, int64_t part,
                     int64_t num_local_experts, int64_t expert_offset,
                     const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                     const OptionalTensor& tile_row_limit, Tensor out);

std::tuple<Tensor, Tensor> activation(const Tensor& gate_up, const Tensor& expanded_to_permuted,
                                      const OptionalTensor& gate_up_lora_delta, int64_t top_k,
                                      int64_t activation, double alpha, double limit,
                                      int64_t gate_up_layout, bool lora_input);
void activation_out(const Tensor& gate_up, const Tensor& expanded_to_permuted,
                    const OptionalTensor& gate_up_lora_delta, int64_t top_k, int64_t activation,
                    double alpha, double limit, int64_t gate_up_layout, Tensor z,
                    const OptionalTensor& activation_lora_input);

Tensor finalize(const Tensor& down, const OptionalTensor& topk_weights,
                const Tensor& expanded_to_permuted, const OptionalTensor& down_lora_delta,
                int64_t top_k, bool delta_is_weighted, double routed_scaling_factor);
void finalize_out(const Tensor& down, const OptionalTensor& topk_weights,
                  const Tensor& expanded_to_permuted, const OptionalTensor& down_lora_delta,
                  int64_t top_k, bool delta_is_weighted, double routed_scaling_factor, Tensor out);

// The whole layer in one call.
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
    std::optional<int64_t> workspace_limit_bytes, bool do_finalize);
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
                        const OptionalTensor& activation_lora_input, Tensor workspace);
int64_t fused_moe_lora_workspace_bytes(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                                       int64_t num_local_experts, int64_t hidden_size,
                                       int64_t intermediate_size, bool fp32, int64_t num_slots,
                                       int64_t gate_up_rank, int64_t gate_up_components,
                                       bool gate_up_a_shared_outer, int64_t down_rank, bool cuda,
                                       int64_t path, std::optional<int64_t> workspace_limit_bytes);

}  // namespace moelora

#include "moe_sort.h"

#include "../ops.h"

namespace moelora {
namespace {

// Sizes that the outputs are allocated from, so checked before them.
void check_sizes(const Tensor& topk_ids, int64_t num_slots, int64_t num_local_experts,
                 int64_t expert_offset, int64_t tile_rows) {
  check_shape(topk_ids, "topk_ids", {-1, -1});
  check_value(num_local_experts >= 1 && num_local_experts <= kMaxExperts,
              "num_local_experts: expected 1 to ", kMaxExperts, ", got ", num_local_experts);
  check_value(expert_offset >= 0 && expert_offset <= INT32_MAX - num_local_experts,
              "expert_offset: expected 0 to ", INT32_MAX - num_local_experts, ", got ",
              expert_offset);
  check_value(num_slots >= 0 && num_slots < INT32_MAX, "num_slots: expected 0 or more, got ",
              num_slots);
  check_value(tile_rows >= 1 && tile_rows <= INT32_MAX, "tile_rows: expected 1 or more, got ",
              tile_rows);
  const int64_t num_pairs = topk_ids.size(0) * topk_ids.size(1);
  check_value(num_pairs <= INT32_MAX &&
                  max_padded_rows(num_pairs, num_local_experts, tile_rows) <= INT32_MAX,
              "topk_ids: rows are numbered in int32, which these do not fit: shape ",
              shape_string(topk_ids), " with ", num_local_experts, " experts and tile_rows ",
              tile_rows);
}

}  // namespace

void moe_sort_out(const Tensor& topk_ids, const OptionalTensor& adapter_ids,
                  const OptionalTensor& ranks, int64_t num_slots, int64_t num_local_experts,
                  int64_t expert_offset, int64_t tile_rows, Tensor expanded_to_permuted,
                  Tensor permuted_to_expanded, Tensor expert_offsets, Tensor tile_expert,
                  Tensor tile_row_limit, Tensor num_padded_rows, Tensor workspace) {
  check_sizes(topk_ids, num_slots, num_local_experts, expert_offset, tile_rows);
  const int64_t num_tokens = topk_ids.size(0);
  MoeSortParams params{};
  params.ids = id_matrix(topk_ids, "topk_ids", topk_ids);
  params.slots = slot_view(adapter_ids, ranks, num_slots, num_tokens, topk_ids);
  params.num_pairs = num_tokens * topk_ids.size(1);
  params.max_rows = max_padded_rows(params.num_pairs, num_local_experts, tile_rows);
  params.num_local_experts = static_cast<int32_t>(num_local_experts);
  params.expert_offset = static_cast<int32_t>(expert_offset);
  params.tile_rows = static_cast<int32_t>(tile_rows);

  const auto writable = [&](const Tensor& out, const char* name, int64_t size) {
    check_out(out, name, {size}, ScalarType::Int, topk_ids);
    check_no_overlap(out, name, topk_ids, "topk_ids");
    if (adapter_ids.has_value()) check_no_overlap(out, name, *adapter_ids, "adapter_ids");
    if (ranks.has_value()) check_no_overlap(out, name, *ranks, "ranks");
    return static_cast<int32_t*>(out.mutable_data_ptr());
  };
  const int64_t num_tiles = params.max_rows / tile_rows;
  params.expanded_to_permuted_ptr =
      writable(expanded_to_permuted, "expanded_to_permuted", params.num_pairs);
  params.permuted_to_expanded_ptr =
      writable(permuted_to_expanded, "permuted_to_expanded", params.max_rows);
  params.expert_offsets_ptr = writable(expert_offsets, "expert_offsets", num_local_experts + 1);
  params.tile_expert_ptr = writable(tile_expert, "tile_expert", num_tiles);
  params.tile_row_limit_ptr = writable(tile_row_limit, "tile_row_limit", num_tiles);
  params.num_padded_rows_ptr = writable(num_padded_rows, "num_padded_rows", 1);

  if (!topk_ids.is_cpu()) {
    check_same_device(workspace, "workspace", topk_ids, "topk_ids");
    check_contiguous(workspace, "workspace");
    const int64_t needed = moe_sort_workspace_bytes(num_tokens, num_local_experts, num_slots);
    const int64_t given = workspace.numel() * static_cast<int64_t>(workspace.element_size());
    check_value(given >= needed, "workspace: expected ", needed, " bytes, got ", given);
    check_value(reinterpret_cast<uintptr_t>(workspace.const_data_ptr()) % 16 == 0,
                "workspace: expected a 16-byte aligned base pointer");
    check_no_overlap(workspace, "workspace", topk_ids, "topk_ids");
    params.workspace_ptr = workspace.mutable_data_ptr();
  }
  run_on_device(topk_ids, params, moe_sort_cpu, launch_moe_sort);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> moe_sort(
    const Tensor& topk_ids, const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
    int64_t num_slots, int64_t num_local_experts, int64_t expert_offset, int64_t tile_rows) {
  check_sizes(topk_ids, num_slots, num_local_experts, expert_offset, tile_rows);
  const int64_t num_tokens = topk_ids.size(0), num_pairs = num_tokens * topk_ids.size(1);
  const int64_t max_rows = max_padded_rows(num_pairs, num_local_experts, tile_rows);
  const int64_t scratch =
      topk_ids.is_cpu() ? 0 : moe_sort_workspace_bytes(num_tokens, num_local_experts, num_slots);
  const auto map = [&](int64_t size) { return new_tensor(topk_ids, {size}, ScalarType::Int); };
  Tensor expanded_to_permuted = map(num_pairs), permuted_to_expanded = map(max_rows);
  Tensor expert_offsets = map(num_local_experts + 1);
  Tensor tile_expert = map(max_rows / tile_rows), tile_row_limit = map(max_rows / tile_rows);
  Tensor num_padded_rows = map(1);
  moe_sort_out(topk_ids, adapter_ids, ranks, num_slots, num_local_experts, expert_offset, tile_rows,
               expanded_to_permuted, permuted_to_expanded, expert_offsets, tile_expert,
               tile_row_limit, num_padded_rows, new_tensor(topk_ids, {scratch}, ScalarType::Byte));
  return {expanded_to_permuted, permuted_to_expanded, expert_offsets,
          tile_expert,          tile_row_limit,       num_padded_rows};
}

}  // namespace moelora

// The layer as a sequence of the ops, written once for both devices and both stream schedules.
#pragma once

#include "../activation/activation.h"
#include "../finalize/finalize.h"
#include "../grouped_gemm/grouped_gemm.h"
#include "../lora_expand/lora_expand.h"
#include "../lora_expand/lora_expand_config.h"
#include "../lora_shrink/lora_shrink.h"
#include "../lora_shrink/lora_shrink_config.h"
#include "../moe_sort/moe_sort.h"
#include "../permute/permute.h"
#include "plan.h"

namespace moelora {

// `Device` runs an op's params and orders streams; see decomposed.cpp for the two.
template <class Device>
class DecomposedLayer {
 public:
  DecomposedLayer(const LayerParams& layer, Device& device, void* workspace_ptr, bool cuda)
      : layer_(layer),
        device_(device),
        plan_(plan_decomposed(layer, cuda)),
        workspace_(static_cast<char*>(workspace_ptr)) {}

  // Side work is put on the side stream where the device has one; every buffer that crosses belongs
  // to the workspace, which the caller allocated on the main stream.
  void run() {
    const bool gate_up_lora = layer_.gate_up.exists();
    const bool down_lora = layer_.down.exists();
    // The side stream forks as early as its kernels allow (few pairs need no sort), but the sort is
    // launched first: one block, it would wait for an SM behind the shrink's many.
    const bool early = gate_up_lora && !gate_up_lora_reads_sort();
    if (early) device_.fork();
    moe_sort();
    if (gate_up_lora && !early) device_.fork();
    if (gate_up_lora) lora(device_.side(), layer_.gate_up, LoraPart::kGateUp);
    permute();
    gemm(layer_.w13, layer_.w13_bias_ptr, at(plan_.permuted), layer_.hidden_size, at(plan_.gate_up),
         2 * layer_.intermediate_size);
    if (gate_up_lora) device_.join();
    if (layer_.gate_up_delta_ptr != nullptr) device_.wait_lora_ready();
    activation();
    // The down adapter reads activation_lora_input and writes its own delta: nothing the down GEMM
    // touches.
    if (down_lora && layer_.finished()) {
      device_.fork();
      lora(device_.side(), layer_.down, LoraPart::kDown);
    }
    void* down_output = layer_.finished() ? at(plan_.down_output) : layer_.down_output_ptr;
    gemm(layer_.w2, layer_.w2_bias_ptr, at(plan_.z), layer_.intermediate_size, down_output,
         layer_.hidden_size);
    device_.record_down_gemm_done();
    if (!layer_.finished()) return;
    if (down_lora) device_.join();
    finalize();
  }

 private:
  void* at(int64_t offset) const { return workspace_ + offset; }
  int32_t* map(int64_t offset) const { return static_cast<int32_t*>(at(offset)); }

  int32_t* expanded_to_permuted() const {
    return layer_.finished() ? map(plan_.expanded_to_permuted) : layer_.expanded_to_permuted_ptr;
  }
  RowMaps maps() const {
    return {map(plan_.permuted_to_expanded), map(plan_.tile_expert), map(plan_.tile_row_limit),
            plan_.num_tiles, kTileRows};
  }
  WeightMatrix unit_weights() const {
    return {nullptr, 0, 0, WeightMatrix::Kind::kOne, layer_.top_k};
  }
  void* lora_input() const {
    if (!layer_.finished()) return layer_.lora_input_ptr;
    return layer_.down.exists() ? at(plan_.lora_input) : nullptr;
  }

  // From shapes alone, as the kernels choose: the same for one stream and two.
  bool gate_up_lora_reads_sort() const {
    const LoraSide& side = layer_.gate_up;
    const int64_t vectors = side.a_shared_outer ? layer_.num_tokens : layer_.num_pairs();
    const int64_t matrices = side.a_shared_outer ? 1 : layer_.num_local_experts;
    return lora_shrink_config(vectors, matrices, side.v_columns(), true).grouped ||
           lora_expand_config(layer_.num_pairs(), layer_.intermediate_size, true).grouped;
  }

  void moe_sort() {
    MoeSortParams params;
    params.ids = layer_.ids;
    params.slots = layer_.slots;
    if (!Device::kRowsBySlot) params.slots.num_slots = 0;
    params.expanded_to_permuted_ptr = expanded_to_permuted();
    params.permuted_to_expanded_ptr = map(plan_.permuted_to_expanded);
    params.expert_offsets_ptr = map(plan_.expert_offsets);
    params.tile_expert_ptr = map(plan_.tile_expert);
    params.tile_row_limit_ptr = map(plan_.tile_row_limit);
    params.num_padded_rows_ptr = map(plan_.num_padded_rows);
    params.workspace_ptr = at(plan_.sort_workspace);
    params.num_pairs = layer_.num_pairs();
    params.max_rows = plan_.max_rows;
    params.num_local_experts = layer_.num_local_experts;
    params.expert_offset = layer_.expert_offset;
    params.tile_rows = kTileRows;
    device_.run(device_.main(), params);
  }

  void permute() {
    PermuteParams params;
    params.hidden_states_ptr = layer_.hidden_states_ptr;
    params.hidden_states_stride = layer_.hidden_states_stride;
    params.permuted_to_expanded_ptr = map(plan_.permuted_to_expanded);
    params.row_weights = layer_.weight_on_input ? layer_.weights : unit_weights();
    params.permuted_ptr = at(plan_.permuted);
    params.num_tokens = layer_.num_tokens;
    params.hidden_size = layer_.hidden_size;
    params.max_rows = plan_.max_rows;
    params.top_k = layer_.top_k;
    params.dtype = layer_.dtype;
    device_.run(device_.main(), params);
  }

  void gemm(const WeightOperand& weight, const void* bias, void* rows, int64_t in_features,
            void* out, int64_t out_features) {
    GroupedGemmParams params;
    params.rows_ptr = rows;
    params.weight = weight;
    params.bias_ptr = bias;
    params.out_ptr = out;
    params.expert_offsets_ptr = map(plan_.expert_offsets);
    params.maps = maps();
    params.max_rows = plan_.max_rows;
    params.in_features = in_features;
    params.out_features = out_features;
    params.expected_rows = layer_.expected_rows();
    params.num_local_experts = layer_.num_local_experts;
    device_.run(device_.main(), params);
  }

  // Shrink and expand of one side of the adapters, into that side's delta.
  void lora(typename Device::Stream stream, const LoraSide& side, LoraPart part) {
    const bool gate_up = part == LoraPart::kGateUp;
    LoraShrinkParams shrink;
    shrink.x_ptr = gate_up ? layer_.hidden_states_ptr : at(plan_.lora_input);
    shrink.x_stride = gate_up ? layer_.hidden_states_stride : layer_.intermediate_size;
    shrink.lora_a_ptr = side.a_ptr;
    shrink.slot_stride = side.a_slot_stride;
    shrink.expert_stride = side.a_expert_stride;
    shrink.row_stride = side.a_row_stride;
    shrink.shared_outer = side.a_shared_outer;
    shrink.v_ptr = static_cast<float*>(at(gate_up ? plan_.gate_up_v : plan_.down_v));
    shrink.ids = layer_.ids;
    shrink.slots = layer_.slots;
    shrink.part = part;
    shrink.maps = maps();
    shrink.num_tokens = layer_.num_tokens;
    shrink.in_features = gate_up ? layer_.hidden_size : layer_.intermediate_size;
    shrink.x_by_pair = !gate_up;
    shrink.top_k = layer_.top_k;
    shrink.rank = side.rank;
    shrink.num_components = side.num_components;
    shrink.num_local_experts = layer_.num_local_experts;
    shrink.expert_offset = layer_.expert_offset;
    shrink.dtype = layer_.dtype;
    device_.run(stream, shrink);

    LoraExpandParams expand;
    expand.v_ptr = shrink.v_ptr;
    expand.v_stride = side.v_columns();
    expand.lora_b_ptr = side.b_ptr;
    expand.slot_stride = side.b_slot_stride;
    expand.expert_stride = side.b_expert_stride;
    expand.row_stride = side.b_row_stride;
    expand.shared_outer = side.b_shared_outer;
    expand.v_per_token = shrink.v_per_token();
    expand.scaling_ptr = layer_.scaling_ptr;
    expand.row_weights = gate_up && layer_.weight_on_input ? layer_.weights : unit_weights();
    expand.delta_ptr = at(gate_up ? plan_.gate_up_delta : plan_.down_delta);
    expand.ids = layer_.ids;
    expand.slots = layer_.slots;
    expand.part = part;
    expand.maps = maps();
    expand.num_tokens = layer_.num_tokens;
    expand.out_features = gate_up ? 2 * layer_.intermediate_size : layer_.hidden_size;
    expand.top_k = layer_.top_k;
    expand.rank = side.rank;
    expand.v_columns = side.v_columns();
    expand.num_local_experts = layer_.num_local_experts;
    expand.expert_offset = layer_.expert_offset;
    expand.dtype = layer_.dtype;
    device_.run(stream, expand);
  }

  void activation() {
    ActivationParams params;
    params.gate_up_ptr = at(plan_.gate_up);
    params.delta_ptr = layer_.gate_up.exists() ? at(plan_.gate_up_delta) : layer_.gate_up_delta_ptr;
    params.expanded_to_permuted_ptr = expanded_to_permuted();
    params.z_ptr = at(plan_.z);
    params.lora_input_ptr = lora_input();
    params.num_pairs = layer_.num_pairs();
    params.max_rows = plan_.max_rows;
    params.intermediate_size = layer_.intermediate_size;
    params.activation = layer_.activation;
    params.layout = layer_.layout;
    params.alpha = layer_.activation_alpha;
    params.limit = layer_.activation_limit;
    params.dtype = layer_.dtype;
    device_.run(device_.main(), params);
  }

  void finalize() {
    FinalizeParams params;
    params.down_ptr = at(plan_.down_output);
    params.weights = layer_.weight_on_input ? unit_weights() : layer_.weights;
    params.delta_ptr = layer_.down.exists() ? at(plan_.down_delta) : layer_.down_delta_ptr;
    params.expanded_to_permuted_ptr = expanded_to_permuted();
    params.out_ptr = layer_.out_ptr;
    params.out_stride = layer_.out_stride;
    params.num_tokens = layer_.num_tokens;
    params.max_rows = plan_.max_rows;
    params.hidden_size = layer_.hidden_size;
    params.top_k = layer_.top_k;
    params.delta_is_weighted = layer_.down_delta_is_weighted && !layer_.down.exists();
    params.routed_scaling_factor = layer_.routed_scaling_factor;
    params.dtype = layer_.dtype;
    device_.run(device_.main(), params);
  }

  const LayerParams& layer_;
  Device& device_;
  DecomposedPlan plan_;
  char* workspace_;
};

}  // namespace moelora

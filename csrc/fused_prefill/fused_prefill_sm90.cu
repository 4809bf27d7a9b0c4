// Runs the layer: the kernels of one chunk of tokens in a row, chunk after chunk.
#include "../finalize/finalize.h"
#include "../fused_moe_lora/plan.h"
#include "fused_prefill.h"
#include "prefill_gemm.h"
#include "prefill_maps.h"
#include "prefill_shrink.h"
#include "prefill_tiles.h"

namespace moelora {
namespace fused_prefill {
namespace {

class PrefillChunk {
 public:
  PrefillChunk(const LayerParams& layer, const PrefillPlan& plan, void* workspace_ptr, void* stream)
      : layer_(layer),
        plan_(plan),
        config_(kFusedPrefillConfigs[plan.config_index]),
        sizes_(prefill_sizes(layer, layer.num_tokens, config_)),
        workspace_(static_cast<char*>(workspace_ptr)),
        stream_(stream) {
    if (!has_lora(layer)) layer_.slots.num_slots = 0;
  }

  void run() const {
    sort();
    cut_tiles();
    if (has(layer_.gate_up)) shrink(LoraPart::kGateUp);
    gate_up();
    if (has(layer_.down)) shrink(LoraPart::kDown);
    down();
    finalize();
  }

 private:
  template <class T>
  T* at(int64_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }
  bool has(const LoraSide& side) const { return layer_.slots.num_slots > 0 && side.exists(); }

  void sort() const {
    MoeSortParams params = {};
    params.ids = layer_.ids;
    params.slots = layer_.slots;
    params.expanded_to_permuted_ptr = at<int32_t>(plan_.expanded_to_permuted);
    params.permuted_to_expanded_ptr = at<int32_t>(plan_.permuted_to_expanded);
    params.expert_offsets_ptr = at<int32_t>(plan_.expert_offsets);
    params.tile_expert_ptr = at<int32_t>(plan_.sort_tile_expert);
    params.tile_row_limit_ptr = at<int32_t>(plan_.sort_tile_row_limit);
    params.num_padded_rows_ptr = at<int32_t>(plan_.num_padded_rows);
    params.workspace_ptr = at<char>(plan_.sort_workspace);
    params.num_pairs = sizes_.pairs;
    params.max_rows = sizes_.max_rows;
    params.num_local_experts = layer_.num_local_experts;
    params.expert_offset = layer_.expert_offset;
    params.tile_rows = kRowStep;
    launch_moe_sort(params, stream_);
  }

  void cut_tiles() const {
    PrefillTilesParams params = {};
    params.expert_offsets = at<int32_t>(plan_.expert_offsets);
    params.permuted_to_expanded = at<int32_t>(plan_.permuted_to_expanded);
    params.weights = layer_.weights;
    params.slots = layer_.slots;
    params.top_k = layer_.top_k;
    params.num_local_experts = layer_.num_local_experts;
    params.max_tokens = config_.max_tokens;
    params.cluster = config_.cluster;
    params.max_tiles = sizes_.max_tiles;
    params.gate_up_rank = has(layer_.gate_up) ? layer_.gate_up.rank : 0;
    params.gate_up_units_capacity = static_cast<int32_t>(sizes_.gate_up_units);
    params.down_rank = has(layer_.down) ? layer_.down.rank : 0;
    params.down_units_capacity = static_cast<int32_t>(sizes_.down_units);
    params.gate_up_shares_a = layer_.gate_up.num_components == 1;
    params.scaling_ptr = layer_.scaling_ptr;
    params.gate_up_tiles = at<TokenTile>(plan_.gate_up_tiles);
    params.down_tiles = at<TokenTile>(plan_.down_tiles);
    params.num_tiles = at<int32_t>(plan_.num_tiles);
    params.next_items = at<int32_t>(plan_.next_items);
    params.z_ready = at<uint32_t>(plan_.z_ready);
    params.gate_up_units = at<LoraUnit>(plan_.gate_up_units);
    params.down_units = at<LoraUnit>(plan_.down_units);
    params.row_token = at<int32_t>(plan_.row_token);
    params.row_slot = layer_.slots.num_slots > 0 ? at<int32_t>(plan_.row_slot) : nullptr;
    params.row_weight = layer_.weight_on_input ? at<float>(plan_.row_weight) : nullptr;
    launch_prefill_tiles(params, stream_);
  }

  void shrink(LoraPart part) const {
    const bool gate_up = part == LoraPart::kGateUp;
    const LoraSide& side = gate_up ? layer_.gate_up : layer_.down;
    const bool by_token = side.a_shared_outer;
    PrefillShrinkParams params = {};
    params.max_tokens = config_.max_tokens;
    params.num_tokens = layer_.num_tokens;
    if (by_token) {
      params.num_groups = 1;
      params.expected_rows = layer_.num_tokens;
    } else {
      params.tiles = at<TokenTile>(gate_up ? plan_.gate_up_tiles : plan_.down_tiles);
      params.num_tiles = at<int32_t>(plan_.num_tiles);
      params.row_slot = at<int32_t>(plan_.row_slot);
      if (gate_up) {
        params.row_token = at<int32_t>(plan_.row_token);
      } else {
        params.z_ready = at<uint32_t>(plan_.z_ready);
        params.z_parts = z_parts();
      }
      params.num_groups = layer_.num_local_experts;
      params.expected_rows = layer_.expected_rows();
    }
    params.x_ptr = gate_up ? layer_.hidden_states_ptr : at<char>(plan_.z);
    params.x_stride = gate_up ? layer_.hidden_states_stride : layer_.intermediate_size;
    params.in_features =
        static_cast<int32_t>(gate_up ? layer_.hidden_size : layer_.intermediate_size);
    params.a_ptr = side.a_ptr;
    params.a_slot_stride = side.a_slot_stride;
    params.a_expert_stride = by_token ? 0 : side.a_expert_stride;
    params.a_row_stride = side.a_row_stride;
    params.rank = side.rank;
    params.components = side.num_components;
    params.slots = layer_.slots;
    params.part = part;
    params.scaling_ptr = layer_.scaling_ptr;
    params.v_ptr = at<char>(gate_up ? plan_.gate_up_v : plan_.down_v);
    params.dtype = layer_.dtype;
    launch_prefill_shrink(params, stream_);
  }

  // Of a block of weights, by each block of a cluster.
  int32_t loaded_rows() const { return config_.weight_rows / config_.cluster; }
  int32_t gate_up_weight_blocks() const {
    return static_cast<int32_t>(ceil_div(2 * layer_.intermediate_size, config_.weight_rows));
  }
  // Stores of z that make a tile whole: one of each consumer warpgroup for each block of weights.
  uint32_t z_parts() const { return kConsumerGroups * gate_up_weight_blocks(); }

  // What both GEMMs need to know of tiles and adapters.
  PrefillGemmParams gemm_params(const LoraSide& side, int64_t v_columns) const {
    PrefillGemmParams params = {};
    params.num_tiles = at<int32_t>(plan_.num_tiles);
    params.max_tiles = sizes_.max_tiles;
    params.z_ready = at<uint32_t>(plan_.z_ready);
    params.z_parts = z_parts();
    // Adapters' data, like x and z, are read again and again, and stay in L2 then. Without an
    // adapter it is slower (benchmarks/results/prefill_experiments.txt).
    params.evict_weights_first = config_.one_tile && has(side);
    const int64_t element = dtype_bytes(layer_.dtype);
    if (has(side)) {
      params.b_ptr = side.b_ptr;
      params.b_slot_bytes = side.b_slot_stride * element;
      params.b_expert_bytes = side.b_shared_outer ? 0 : side.b_expert_stride * element;
      params.b_row_bytes = side.b_row_stride * element;
      params.v_row_bytes = static_cast<uint32_t>(v_columns * element);
      params.rank = side.rank;
    }
    return params;
  }

  void gate_up() const {
    const int64_t hidden = layer_.hidden_size, inner = layer_.intermediate_size;
    PrefillGemmParams params = gemm_params(layer_.gate_up, gate_up_v_columns(layer_.gate_up));
    params.tiles = at<TokenTile>(plan_.gate_up_tiles);
    params.next_item = at<int32_t>(plan_.next_items);
    params.tiles_come_last = !has(layer_.gate_up);
    params.weight_blocks = gate_up_weight_blocks();
    params.k_blocks = static_cast<int32_t>(ceil_div(hidden, kBlockColumns));
    params.x_ptr = layer_.hidden_states_ptr;
    params.x_row_bytes =
        static_cast<uint32_t>(layer_.hidden_states_stride * dtype_bytes(layer_.dtype));
    params.x_columns = static_cast<int32_t>(hidden);
    params.row_token = at<int32_t>(plan_.row_token);
    params.units = at<LoraUnit>(plan_.gate_up_units);
    params.units_capacity = static_cast<int32_t>(sizes_.gate_up_units);
    params.v_ptr = at<char>(plan_.gate_up_v);
    params.v_by_token = layer_.gate_up.a_shared_outer;
    params.bias_ptr = layer_.w13_bias_ptr;
    params.out_columns = static_cast<int32_t>(inner);
    params.layout = layer_.layout;
    params.activation = layer_.activation;
    params.activation_alpha = layer_.activation_alpha;
    params.activation_limit = layer_.activation_limit;
    params.row_weight = layer_.weight_on_input ? at<float>(plan_.row_weight) : nullptr;

    PrefillGemmMaps maps = {};
    maps.weights = gate_up_weight_map(layer_.w13, layer_.layout, layer_.num_local_experts, inner,
                                      hidden, loaded_rows(), params.evict_weights_first);
    maps.out = row_maps(at<char>(plan_.z), layer_.dtype, sizes_.max_rows, inner, 32);
    launch_prefill_gate_up(maps, params, plan_.config_index, layer_.dtype, stream_);
  }

  void down() const {
    const int64_t hidden = layer_.hidden_size, inner = layer_.intermediate_size;
    PrefillGemmParams params = gemm_params(layer_.down, layer_.down.rank);
    params.tiles = at<TokenTile>(plan_.down_tiles);
    params.next_item = at<int32_t>(plan_.next_items) + 1;
    params.weight_blocks = static_cast<int32_t>(ceil_div(hidden, config_.weight_rows));
    params.k_blocks = static_cast<int32_t>(ceil_div(inner, kBlockColumns));
    params.units = at<LoraUnit>(plan_.down_units);
    params.units_capacity = static_cast<int32_t>(sizes_.down_units);
    params.v_ptr = at<char>(plan_.down_v);
    params.bias_ptr = layer_.w2_bias_ptr;
    params.out_columns = static_cast<int32_t>(hidden);

    PrefillGemmMaps maps = {};
    maps.weights = down_weight_map(layer_.w2, layer_.num_local_experts, hidden, inner,
                                   loaded_rows(), params.evict_weights_first);
    maps.tokens = row_maps(at<char>(plan_.z), layer_.dtype, sizes_.max_rows, inner, 64);
    maps.out = row_maps(at<char>(plan_.y), layer_.dtype, sizes_.max_rows, hidden, 64);
    launch_prefill_down(maps, params, plan_.config_index, layer_.dtype, stream_);
  }

  void finalize() const {
    FinalizeParams params = {};
    params.down_ptr = at<char>(plan_.y);
    params.weights = layer_.weights;
    if (layer_.weight_on_input) params.weights.kind = WeightMatrix::Kind::kOne;
    params.expanded_to_permuted_ptr = at<int32_t>(plan_.expanded_to_permuted);
    params.out_ptr = layer_.out_ptr;
    params.out_stride = layer_.out_stride;
    params.num_tokens = layer_.num_tokens;
    params.max_rows = sizes_.max_rows;
    params.hidden_size = layer_.hidden_size;
    params.top_k = layer_.top_k;
    params.routed_scaling_factor = layer_.routed_scaling_factor;
    params.dtype = layer_.dtype;
    launch_finalize(params, stream_);
  }

  LayerParams layer_;
  const PrefillPlan& plan_;
  const FusedPrefillConfig& config_;
  const PrefillSizes sizes_;
  char* const workspace_;
  void* const stream_;
};

}  // namespace

void launch_prefill_gate_up(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                            int config_index, DType dtype, void* stream) {
  const auto launch =
      dtype == DType::kBFloat16 ? launch_prefill_gate_up_bf16 : launch_prefill_gate_up_fp16;
  launch(maps, params, config_index, stream);
}

void launch_prefill_down(const PrefillGemmMaps& maps, const PrefillGemmParams& params,
                         int config_index, DType dtype, void* stream) {
  const auto launch =
      dtype == DType::kBFloat16 ? launch_prefill_down_bf16 : launch_prefill_down_fp16;
  launch(maps, params, config_index, stream);
}

void run_prefill(const LayerParams& layer, const PrefillPlan& plan, void* workspace_ptr,
                 void* stream) {
  for (int64_t first = 0; first < layer.num_tokens; first += plan.chunk_tokens) {
    const int64_t left = layer.num_tokens - first;
    const LayerParams chunk =
        layer_chunk(layer, first, left < plan.chunk_tokens ? left : plan.chunk_tokens);
    PrefillChunk(chunk, plan, workspace_ptr, stream).run();
  }
}

}  // namespace fused_prefill

void launch_fused_prefill(const LayerParams& layer, void* stream, void* workspace_ptr,
                          int64_t limit) {
  fused_prefill::run_prefill(layer, fused_prefill::plan_prefill(layer, limit), workspace_ptr,
                             stream);
}

}  // namespace moelora

// moelora._C: the texts that do not fit an op's schema (kernel tables, why a call takes a path).
// Everything else works without this module.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "../fused_decode/fused_decode_config.h"
#include "../fused_moe_lora/path.h"
#include "../fused_moe_lora/plan.h"
#include "../fused_prefill/fused_prefill.h"
#include "../fused_prefill/prefill_layout.h"
#include "../grouped_gemm/grouped_gemm_config.h"
#include "../moe_sort/moe_sort.h"

namespace {

using namespace moelora;
namespace py = pybind11;

// Sizes and strides of one call, under the names of LayerParams' fields; nothing is dereferenced.
LayerParams layer_of(const py::dict& sizes) {
  LayerParams layer = {};
  const auto get = [&sizes](const char* name) { return sizes[name].cast<int64_t>(); };
  layer.num_tokens = get("num_tokens");
  layer.hidden_size = get("hidden_size");
  layer.intermediate_size = get("intermediate_size");
  layer.top_k = static_cast<int32_t>(get("top_k"));
  layer.num_experts = static_cast<int32_t>(get("num_experts"));
  layer.num_local_experts = static_cast<int32_t>(get("num_local_experts"));
  layer.dtype =
      sizes["dtype"].cast<std::string>() == "float16" ? DType::kFloat16 : DType::kBFloat16;
  layer.hidden_states_stride = get("hidden_states_stride");
  layer.out_stride = layer.hidden_size;
  layer.w13 = {&layer, get("w13_expert_stride"), get("w13_row_stride"), layer.dtype};
  layer.w2 = {&layer, get("w2_expert_stride"), get("w2_row_stride"), layer.dtype};
  layer.weight_on_input = get("weight_on_input") != 0;
  // Any address of 16-byte alignment will do for "there is one".
  alignas(16) static char somewhere[16];
  layer.hidden_states_ptr = layer.w13.ptr = layer.w2.ptr = somewhere;
  if (get("do_finalize") != 0) layer.out_ptr = somewhere;
  if (get("has_delta") != 0) layer.gate_up_delta_ptr = somewhere;
  const auto side = [&](const std::string& name) {
    LoraSide lora;
    const auto field = [&](const char* suffix) { return get((name + suffix).c_str()); };
    lora.rank = static_cast<int32_t>(field("_rank"));
    if (!lora.exists()) return lora;
    lora.num_components = static_cast<int32_t>(field("_components"));
    lora.a_ptr = lora.b_ptr = somewhere;
    lora.a_slot_stride = field("_a_slot_stride");
    lora.a_expert_stride = field("_a_expert_stride");
    lora.a_row_stride = field("_a_row_stride");
    lora.a_shared_outer = field("_a_shared_outer") != 0;
    lora.b_slot_stride = field("_b_slot_stride");
    lora.b_expert_stride = field("_b_expert_stride");
    lora.b_row_stride = field("_b_row_stride");
    lora.b_shared_outer = field("_b_shared_outer") != 0;
    return lora;
  };
  layer.gate_up = side("gate_up");
  layer.down = side("down");
  layer.slots.num_slots = static_cast<int32_t>(get("num_slots"));
  return layer;
}

// The kernel configuration of a path that runs the layer for `tokens` tokens at a time.
std::string with_chunks(const char* config, const LayerParams& layer, int64_t tokens) {
  if (tokens >= layer.num_tokens) return config;
  return std::string(config) + ", chunks of " + std::to_string(tokens) + " tokens";
}

// (path, kernel configuration, reason) of one call on a GPU of compute capability 9.0 or another.
std::tuple<std::string, std::string, std::string> explain(const py::dict& sizes, bool decomposed,
                                                          bool sm90) {
  const LayerParams layer = layer_of(sizes);
  const auto limit = sizes["workspace_limit_bytes"].cast<std::optional<int64_t>>();
  const LayerPath asked = decomposed ? LayerPath::kDecomposed : LayerPath::kAuto;
  const PathChoice choice = choose_path(layer, asked, sm90);
  switch (choice.path) {
    case Path::kFusedDecode:
      return {"fused_decode", fused_decode_config_name(fused_decode_params(layer, nullptr)),
              choice.reason};
    case Path::kFusedPrefill: {
      const auto plan =
          fused_prefill::plan_prefill(layer, limit.value_or(kFusedPrefillWorkspaceLimit));
      const char* config = kFusedPrefillConfigs[plan.config_index].name;
      return {"fused_prefill", with_chunks(config, layer, plan.chunk_tokens), choice.reason};
    }
    case Path::kDecomposed:
      break;
  }
  const int64_t tokens = decomposed_chunk_tokens(layer, true, limit);
  const LayerParams chunk = layer_chunk(layer, 0, tokens);
  const auto& table = sm90 ? kSm90GroupedGemmConfigs : kSm100GroupedGemmConfigs;
  const int64_t rows = chunk.num_pairs() + kTileRows * int64_t{layer.num_local_experts};
  const int index = pick_grouped_gemm_config(table, chunk.expected_rows(), rows);
  const char* config = index < 0 ? "none" : table[index].name;
  return {"decomposed", with_chunks(config, layer, tokens), choice.reason};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernel tables and path explanations of moelora, as text.";
  m.def("explain", &explain, py::arg("sizes"), py::arg("decomposed"), py::arg("sm90"),
        "(path, kernel configuration, reason) for the sizes and strides of one call.");
}

// What can be said of a call from its shapes alone: can this path run it, with which tiles, in how
// much workspace.
#include <utility>

#include "decode_layout.h"

namespace moelora {
namespace fused_decode {
namespace {

// Whether a configuration's lists leave room for a ring, on which their scratch finds room too.
template <class C>
bool lists_fit(const FusedDecodeParams& p, int items) {
  const int pairs = static_cast<int>(p.num_tokens) * p.top_k;
  const bool lora = has_gate_up_lora(p) || has_down_lora(p);
  const SharedLayout layout = shared_layout<C>(pairs, p.num_local_experts, items, lora);
  return layout.stages >= kMinStages && layout.scratch >= layout.weights;
}
template <int... kIndices>
bool lists_fit(const FusedDecodeParams& p, int config_index,
               std::integer_sequence<int, kIndices...>) {
  const int items = workspace_layout(p, config_index).max_items;
  return ((config_index == kIndices && lists_fit<Tiles<kIndices>>(p, items)) || ...);
}

bool is_multiple_of_8(int64_t value) { return value % 8 == 0; }

// A stack the kernel can read by TMA: rows of whole 16 bytes, 16-byte steps between matrices.
bool tma_can_read(const LoraStack& stack) {
  return is_multiple_of_8(stack.row_stride) && is_multiple_of_8(stack.slot_stride) &&
         (stack.shared_outer || is_multiple_of_8(stack.expert_stride)) &&
         reinterpret_cast<uintptr_t>(stack.ptr) % 16 == 0;
}

const char* unsupported_lora(const FusedDecodeParams& p) {
  if (p.slots.num_slots > kMaxSlots) return "more than 65535 adapter slots";
  if (has_gate_up_lora(p)) {
    if (!is_multiple_of_8(p.gate_up_rank)) return "the gate_up rank is not a multiple of 8";
    if (p.gate_up_rank > kMaxRank) return "the gate_up rank is over 128";
    if (!tma_can_read(p.gate_up_a) || !tma_can_read(p.gate_up_b)) {
      return "a gate_up adapter stack has strides that are not multiples of 8";
    }
    if (p.gate_up_b.shared_outer) return "gate_up B is shared by all experts";
    if (p.slots.num_slots > 1 && p.num_local_experts > 1 &&
        (p.gate_up_b.expert_stride <= 0 ||
         p.gate_up_b.slot_stride % p.gate_up_b.expert_stride != 0)) {
      return "gate_up B's slot stride is not a multiple of its expert stride";
    }
  }
  if (has_down_lora(p)) {
    if (!is_multiple_of_8(p.down_rank)) return "the down rank is not a multiple of 8";
    if (p.down_rank > kMaxRank) return "the down rank is over 128";
    if (!tma_can_read(p.down_a) || !tma_can_read(p.down_b)) {
      return "a down adapter stack has strides that are not multiples of 8";
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace fused_decode

const char* fused_decode_unsupported(const FusedDecodeParams& p) {
  using namespace fused_decode;
  constexpr int64_t kMaxElements = int64_t{1} << 31;  // rows are addressed in 32 bits
  if (p.dtype == DType::kFloat32) return "the dtype is float32";
  if (p.num_tokens * p.top_k > kMaxPairs) return "more than 4096 (token, expert) pairs";
  if (p.num_local_experts > kMaxExperts) return "more than 1024 local experts";
  if (p.num_tokens * p.hidden_states_stride >= kMaxElements ||
      p.num_tokens * p.top_k * p.intermediate_size >= kMaxElements) {
    return "hidden_states or the intermediate rows span 2^31 elements or more";
  }
  if (const char* reason = unsupported_lora(p)) return reason;
  if (!lists_fit(p, fused_decode::config_index(p),
                 std::make_integer_sequence<int, kNumFusedDecodeConfigs>{})) {
    return "the routing lists leave too little shared memory";
  }
  return nullptr;
}

int64_t fused_decode_workspace_bytes(const FusedDecodeParams& p) {
  return fused_decode::workspace_layout(p, fused_decode::config_index(p)).bytes;
}

const char* fused_decode_config_name(const FusedDecodeParams& p) {
  return kFusedDecodeConfigs[fused_decode::config_index(p)].name;
}

}  // namespace moelora

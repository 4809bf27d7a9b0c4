#include "fused_prefill.h"

#include "prefill_layout.h"

namespace moelora {
namespace {

bool aligned_16(const void* ptr) { return reinterpret_cast<uintptr_t>(ptr) % 16 == 0; }
bool multiple_of_8(int64_t value) { return value >= 0 && value % 8 == 0; }

// What TMA can address: strides that are positive and below 2^40 bytes.
bool good_weight_stride(int64_t stride, int64_t size) {
  return size == 1 || (stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 38));
}

// Rows of A and of B are read 16 bytes at a time.
bool good_side(const LoraSide& side) {
  return !side.exists() ||
         (side.rank % 8 == 0 && aligned_16(side.a_ptr) && aligned_16(side.b_ptr) &&
          multiple_of_8(side.a_slot_stride) && multiple_of_8(side.a_expert_stride) &&
          multiple_of_8(side.a_row_stride) && multiple_of_8(side.b_slot_stride) &&
          multiple_of_8(side.b_expert_stride) && multiple_of_8(side.b_row_stride));
}

}  // namespace

const char* fused_prefill_unsupported(const LayerParams& layer) {
  if (layer.dtype != DType::kBFloat16 && layer.dtype != DType::kFloat16) {
    return "fused prefill needs bf16 or fp16";
  }
  if (layer.gate_up_delta_ptr != nullptr || layer.down_delta_ptr != nullptr) {
    return "fused prefill does not take deltas computed by the caller";
  }
  if (!layer.finished()) return "fused prefill does not stop before finalize";
  if (layer.w13.dtype != layer.dtype || layer.w2.dtype != layer.dtype) {
    return "fused prefill needs weights of the model's dtype";
  }
  if (layer.hidden_size % 8 != 0 || layer.intermediate_size % 8 != 0) {
    return "fused prefill needs H and I that are multiples of 8";
  }
  if (!multiple_of_8(layer.hidden_states_stride) || !multiple_of_8(layer.out_stride) ||
      layer.hidden_states_stride > INT32_MAX / 2) {
    return "fused prefill needs rows of hidden_states and out on 16-byte boundaries";
  }
  if (!aligned_16(layer.hidden_states_ptr) || !aligned_16(layer.out_ptr) ||
      !aligned_16(layer.w13.ptr) || !aligned_16(layer.w2.ptr)) {
    return "fused prefill needs 16-byte aligned tensors";
  }
  const int64_t experts = layer.num_local_experts;
  if (!good_weight_stride(layer.w13.row_stride, 2 * layer.intermediate_size) ||
      !good_weight_stride(layer.w13.expert_stride, experts) ||
      !good_weight_stride(layer.w2.row_stride, layer.hidden_size) ||
      !good_weight_stride(layer.w2.expert_stride, experts)) {
    return "fused prefill needs weight strides that are positive multiples of 8 elements";
  }
  // The gate-to-up stride of one tensor map dim.
  if (layer.w13.row_stride * layer.intermediate_size >= (int64_t{1} << 38)) {
    return "fused prefill cannot address weights that large";
  }
  if (layer.slots.num_slots > 0 && (!good_side(layer.gate_up) || !good_side(layer.down))) {
    return "fused prefill needs adapter ranks that are multiples of 8, and aligned rows";
  }
  if (layer.num_pairs() > INT32_MAX / 2) return "fused prefill counts rows in 32 bits";
  return nullptr;
}

int64_t fused_prefill_workspace_bytes(const LayerParams& layer, int64_t limit) {
  return fused_prefill::plan_prefill(layer, limit).bytes;
}

}  // namespace moelora

// Strided views of the small per-token inputs (expert ids, router weights, adapter ids), readable
// on host and device. They exist so that every kernel accepts int32 and int64 ids, bf16 and fp32
// weights, and any strides, by the same code.
#pragma once

#include "types.h"

#ifdef __CUDACC__
#define MOELORA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOELORA_HOST_DEVICE inline
#endif

namespace moelora {

// Expert ids [T, K]. `kPacked`: int32 words (id << 16) | bf16 bits of the weight.
struct IdMatrix {
  enum class Kind : int32_t { kInt32, kInt64, kPacked };
  const void* ptr;
  int64_t row_stride, col_stride;  // elements
  Kind kind;
  int32_t num_cols;  // K

  MOELORA_HOST_DEVICE int element_bytes() const { return kind == Kind::kInt64 ? 8 : 4; }
  // Id of the expanded index `pair` = t*K + k. Ids that int32 cannot hold come back as -1: they
  // name no expert.
  MOELORA_HOST_DEVICE int32_t operator()(int64_t pair) const {
    return id_of(load((pair / num_cols) * row_stride + (pair % num_cols) * col_stride));
  }
  // The same in two steps, so that a kernel can ask for other memory before it waits for this.
  struct Element {
    int64_t wide;  // of kInt64
    int32_t word;  // of the others
  };
  MOELORA_HOST_DEVICE Element load(int64_t at) const {
    Element element = {};
    if (kind == Kind::kInt64) {
      element.wide = static_cast<const int64_t*>(ptr)[at];
    } else {
      element.word = static_cast<const int32_t*>(ptr)[at];
    }
    return element;
  }
  MOELORA_HOST_DEVICE int32_t id_of(const Element& element) const {
    if (kind == Kind::kInt64) {
      const int64_t id = element.wide;
      return id < 0 || id > INT32_MAX ? -1 : static_cast<int32_t>(id);
    }
    // Arithmetic shift: -1 survives, and the weight's sign bit stays in the low half.
    return kind == Kind::kPacked ? element.word >> 16 : element.word;
  }
};

// Router weights [T, K]; `kOne` reads nothing and gives 1.
struct WeightMatrix {
  enum class Kind : int32_t { kFloat32, kBFloat16, kPacked, kOne };
  const void* ptr;
  int64_t row_stride, col_stride;  // elements
  Kind kind;
  int32_t num_cols;  // K

  // 0 where there is nothing to read.
  MOELORA_HOST_DEVICE int element_bytes() const {
    if (kind == Kind::kOne) return 0;
    return kind == Kind::kBFloat16 ? 2 : 4;
  }
  MOELORA_HOST_DEVICE float operator()(int64_t pair) const {
    if (kind == Kind::kOne) return 1.0f;
    const int64_t at = (pair / num_cols) * row_stride + (pair % num_cols) * col_stride;
    if (kind == Kind::kFloat32) return static_cast<const float*>(ptr)[at];
    const uint32_t bits = kind == Kind::kBFloat16 ? static_cast<const uint16_t*>(ptr)[at]
                                                  : static_cast<const uint32_t*>(ptr)[at] & 0xffffu;
    return bits_to_float(bits << 16);
  }

 private:
  MOELORA_HOST_DEVICE static float bits_to_float(uint32_t bits) {
    union {
      uint32_t u;
      float f;
    } value{bits};
    return value.f;
  }
};

// Which adapter slot a token uses. A null `adapter_ids_ptr` means slot 0 for every token (L = 1).
struct SlotView {
  const void* adapter_ids_ptr;  // [T]
  int64_t stride;               // elements
  const int32_t* ranks_ptr;     // [L, 2] (gate_up, down), or null: every slot has the full rank
  int32_t num_slots;            // L; 0: no adapters at all
  bool ids_are_int64;

  // Slot of token `t`, or -1: no adapter. A slot that is empty on both sides counts as none.
  MOELORA_HOST_DEVICE int32_t operator()(int64_t t) const {
    int64_t slot = 0;
    if (adapter_ids_ptr != nullptr) {
      slot = ids_are_int64 ? static_cast<const int64_t*>(adapter_ids_ptr)[t * stride]
                           : static_cast<const int32_t*>(adapter_ids_ptr)[t * stride];
    }
    if (slot < 0 || slot >= num_slots) return -1;
    if (ranks_ptr != nullptr && ranks_ptr[2 * slot] <= 0 && ranks_ptr[2 * slot + 1] <= 0) return -1;
    return static_cast<int32_t>(slot);
  }

  // Rank of `slot` for one side (0 gate_up, 1 down), never above `max_rank`.
  MOELORA_HOST_DEVICE int32_t rank(int32_t slot, LoraPart part, int32_t max_rank) const {
    if (ranks_ptr == nullptr) return max_rank;
    const int32_t r = ranks_ptr[2 * slot + static_cast<int32_t>(part)];
    return r < 0 ? 0 : (r < max_rank ? r : max_rank);
  }
};

// Index maps of moe_sort as its consumers read them.
struct RowMaps {
  const int32_t* permuted_to_expanded_ptr;  // [P_max], -1: padding
  const int32_t* tile_expert_ptr;           // [P_max / tile_rows] local expert, -1: unused tile
  const int32_t* tile_row_limit_ptr;  // [P_max / tile_rows] one past the expert's last real row
  int64_t num_tiles;                  // P_max / tile_rows
  int32_t tile_rows;
};

// Weights of a grouped GEMM: everything a kernel needs to know of its weight operand (quantised
// formats slot in here).
struct WeightOperand {
  const void* ptr;                    // [E_loc, N, K], last dim contiguous
  int64_t expert_stride, row_stride;  // elements, multiples of 8
  DType dtype;
};

}  // namespace moelora

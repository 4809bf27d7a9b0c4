// Which kernel a lora_expand runs, from its shapes alone, so that every schedule of the same call
// gives the same bits.
#pragma once

#include <cstdint>

namespace moelora {

struct LoraExpandConfig {
  bool grouped;           // else one block for some columns of one pair
  int columns_per_block;  // of the grouped kernel
};

// Up to here an indexed kernel, which needs no sort, beats grouped windows: an expert's few rows
// leave most of a window to other experts, whose B blocks are then read one after the other.
constexpr int64_t kExpandIndexedMaxPairs = 512;

// half_features: columns that share a rank vector (I for gate_up, H for down).
inline LoraExpandConfig lora_expand_config(int64_t num_pairs, int64_t half_features, bool sorted) {
  if (!sorted || num_pairs <= kExpandIndexedMaxPairs) return {false, 0};
  // Wide blocks look up a window's rows less often; narrow ones keep all SMs busy.
  const int64_t wide_blocks = (num_pairs / 64) * ((half_features + 511) / 512);
  return {true, wide_blocks >= 4 * 132 ? 512 : 256};
}

}  // namespace moelora

// The packed form of one expert choice: (id << 16) | bf16 bits of the weight.
#pragma once

#include <cstring>

#include "../common/views.h"

namespace moelora {

// Round to nearest even; NaN stays NaN, with its sign.
MOELORA_HOST_DEVICE uint32_t bf16_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x0040u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Ids that 15 bits cannot hold name no expert: -1.
MOELORA_HOST_DEVICE int32_t packed_word(int32_t id, float weight) {
  const int32_t held = id >= 0 && id <= INT16_MAX ? id : -1;
  return static_cast<int32_t>(static_cast<uint32_t>(held) << 16 | bf16_bits(weight));
}

}  // namespace moelora

// Grid sizes for kernels that lay their work out along x alone: y and z end at 65535 blocks, x does
// not end before 2^31 - 1.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "checks.h"

namespace moelora {

inline dim3 blocks_for(int64_t items, int64_t items_per_block) {
  const int64_t blocks = (items + items_per_block - 1) / items_per_block;
  check_value(blocks <= INT32_MAX, "the input is too large: one launch would need ", blocks,
              " blocks");
  return dim3(static_cast<unsigned>(blocks));
}

}  // namespace moelora

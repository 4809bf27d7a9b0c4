// Sizes of a launch that need a check or a permission.
#pragma once

#include <cstdint>

#include "launch.h"

namespace moelora {

// A grid along x alone: y and z end at 65535 blocks, x does not end before 2^31 - 1.
inline dim3 blocks_for(int64_t items, int64_t items_per_block) {
  const int64_t blocks = (items + items_per_block - 1) / items_per_block;
  check_value(blocks <= INT32_MAX, "the input is too large: one launch would need ", blocks,
              " blocks");
  return dim3(static_cast<unsigned>(blocks));
}

// More than 48 KiB of shared memory, static included, has to be allowed kernel by kernel.
template <class... KernelArgs>
void allow_shared_bytes(const char* name, void (*kernel)(KernelArgs...), size_t bytes) {
  constexpr size_t kStaticAtMost = 8 * 1024;
  if (bytes <= 48 * 1024 - kStaticAtMost) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             name);
}

}  // namespace moelora

// What the CPU kernels share: the model's dtypes as C++ types with conversions to and from fp32,
// and a dispatch over them.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "types.h"

namespace moelora {

// Calls `body(T{})` with the C++ type of `dtype`; T converts to and from float, rounding to
// nearest.
template <class Body>
void dispatch_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat16:
      return body(c10::Half{});
    case DType::kBFloat16:
      return body(c10::BFloat16{});
  }
}

}  // namespace moelora

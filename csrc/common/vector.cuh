// 16-byte global memory accesses of 8 half-precision values, and conversions to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx.cuh"

namespace moelora {

template <class T>
__device__ __forceinline__ float to_float(T value) {
  return static_cast<float>(value);
}
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float(float value) {
  return __float2half_rn(value);
}

// Eight half-precision values kept as loaded (four registers) until they are used.
__device__ __forceinline__ uint4 load_raw8(const void* ptr) {
  return *static_cast<const uint4*>(ptr);
}
__device__ __forceinline__ void store_raw8(void* ptr, uint4 value) {
  *static_cast<uint4*>(ptr) = value;
}
template <class T>
__device__ __forceinline__ void unpack8(uint4 raw, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ptx::unpack2<T>(words[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}
template <class T>
__device__ __forceinline__ uint4 pack8(const float (&values)[8]) {
  return make_uint4(ptx::pack2<T>(values[0], values[1]), ptx::pack2<T>(values[2], values[3]),
                    ptx::pack2<T>(values[4], values[5]), ptx::pack2<T>(values[6], values[7]));
}

}  // namespace moelora

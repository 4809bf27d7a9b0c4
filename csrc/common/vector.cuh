// 16-byte global memory accesses of 8 half-precision values, and conversions to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

// Eight T in one 16-byte register group.
template <class T>
struct alignas(16) Vec8 {
  T data[8];
};

template <class T>
__device__ __forceinline__ Vec8<T> load_vec8(const T* ptr) {
  return *reinterpret_cast<const Vec8<T>*>(ptr);
}
template <class T>
__device__ __forceinline__ void store_vec8(T* ptr, const Vec8<T>& value) {
  *reinterpret_cast<Vec8<T>*>(ptr) = value;
}

}  // namespace moelora

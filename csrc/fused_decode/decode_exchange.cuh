// How blocks hand each other the rank vectors of direct tiles: in 32-bit words that are their own
// flags. The reset kernel fills them with kUnwritten, which nothing is stored as, and whoever needs
// a word reads it until it is something else; words never tear, so that cp.async past L1 is as good
// a read as any, if what it brought is looked at. A counter takes three more trips to memory (a
// fence, the counter, the values behind it), a microsecond each while the memory is busy. Every
// word is cleared for a call, and may be read again and again, so z, which all blocks read, has
// counters.
#pragma once

#include "../common/ptx.cuh"

namespace moelora::fused_decode {

constexpr uint32_t kUnwritten = ~0u;

// The bits to store of one fp32 value or two 16-bit ones: a NaN of these bits becomes another NaN.
__device__ __forceinline__ uint32_t exchange_bits(uint32_t bits) {
  return bits == kUnwritten ? kUnwritten >> 1 : bits;
}
__device__ __forceinline__ void send(void* to, uint32_t bits) {
  ptx::store_relaxed(static_cast<uint32_t*>(to), exchange_bits(bits));
}
__device__ __forceinline__ void send(void* to, uint2 bits) {
  ptx::store_relaxed(static_cast<uint2*>(to),
                     make_uint2(exchange_bits(bits.x), exchange_bits(bits.y)));
}
__device__ __forceinline__ uint2 float_bits(float2 value) {
  return make_uint2(__float_as_uint(value.x), __float_as_uint(value.y));
}

__device__ __forceinline__ bool is_written(const uint2& words) {
  return words.x != kUnwritten && words.y != kUnwritten;
}
__device__ __forceinline__ bool is_written(const uint4& words) {
  return words.x != kUnwritten && words.y != kUnwritten && words.z != kUnwritten &&
         words.w != kUnwritten;
}

// values[i] = the words at address_of(i) for i < count <= kMost, once all of them are written.
template <int kMost, class Words, class AddressOf>
__device__ __forceinline__ void receive(Words (&values)[kMost], int count, AddressOf&& address_of) {
  bool written;
  do {
    written = true;
#pragma unroll
    for (int i = 0; i < kMost; i++) {
      if (i >= count) continue;
      const void* from = address_of(i);
      values[i] = ptx::load_relaxed(static_cast<const Words*>(from));
    }
#pragma unroll
    for (int i = 0; i < kMost; i++) {
      if (i < count) written = written && is_written(values[i]);
    }
  } while (!written);
}

}  // namespace moelora::fused_decode

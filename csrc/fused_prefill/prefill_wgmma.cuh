// wgmma of Hopper's tensor cores: D[64, N] += A[64, 16] B[N, 16], fp32 accumulation, both operands
// in shared memory with the 128-byte swizzle, 16-bit elements, columns contiguous.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace moelora::sm90 {

// Descriptor of an operand whose rows are 128 bytes and whose groups of 8 rows follow each other
// (1024 bytes); `address` points at a group's first row, or 32 bytes further for each k16 step.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kGroupBytes = uint64_t{1024 >> 4} << 32,
                     kLeadingUnused = uint64_t{1} << 16;
  return uint64_t{(address & 0x3ffff) >> 4} | kLeadingUnused | kGroupBytes | kSwizzle128;
}
constexpr uint64_t kWgmmaKStep = 32 >> 4;  // to the next k16 step

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `kPending` committed groups of this warpgroup are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Accumulators of one thread, element [4 i + h] of D: row 16 * warp + lane / 4 (+ 8 for h = 2, 3),
// column 8 i + 2 * (lane % 4) + h % 2.
template <int N>
struct WgmmaAccumulators {
  float d[N / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
  }
  // Keeps the compiler from moving accesses to the registers into an unfinished wgmma.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }
};

template <class T, int N>
struct Wgmma;

// The instruction names every accumulator register, and its operand list is text: operands of width
// 16 n are the first 8 n of %0..%127, and the two descriptors follow.

#define MOELORA_WGMMA_REGS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOELORA_WGMMA_REGS_2 MOELORA_WGMMA_REGS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOELORA_WGMMA_REGS_3 MOELORA_WGMMA_REGS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOELORA_WGMMA_REGS_4 MOELORA_WGMMA_REGS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MOELORA_WGMMA_REGS_5 MOELORA_WGMMA_REGS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOELORA_WGMMA_REGS_6 MOELORA_WGMMA_REGS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOELORA_WGMMA_REGS_7 MOELORA_WGMMA_REGS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MOELORA_WGMMA_REGS_8 MOELORA_WGMMA_REGS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MOELORA_WGMMA_REGS_9 MOELORA_WGMMA_REGS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MOELORA_WGMMA_REGS_10 MOELORA_WGMMA_REGS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MOELORA_WGMMA_REGS_11 MOELORA_WGMMA_REGS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MOELORA_WGMMA_REGS_12 MOELORA_WGMMA_REGS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MOELORA_WGMMA_REGS_13 MOELORA_WGMMA_REGS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MOELORA_WGMMA_REGS_14 \
  MOELORA_WGMMA_REGS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MOELORA_WGMMA_REGS_15 \
  MOELORA_WGMMA_REGS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MOELORA_WGMMA_REGS_16 \
  MOELORA_WGMMA_REGS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MOELORA_WGMMA_OUTS_1 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MOELORA_WGMMA_OUTS_2                                                           \
  MOELORA_WGMMA_OUTS_1, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), \
      "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MOELORA_WGMMA_OUTS_3                                                             \
  MOELORA_WGMMA_OUTS_2, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
      "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define MOELORA_WGMMA_OUTS_4                                                             \
  MOELORA_WGMMA_OUTS_3, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MOELORA_WGMMA_OUTS_5                                                             \
  MOELORA_WGMMA_OUTS_4, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), \
      "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define MOELORA_WGMMA_OUTS_6                                                             \
  MOELORA_WGMMA_OUTS_5, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), \
      "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define MOELORA_WGMMA_OUTS_7                                                             \
  MOELORA_WGMMA_OUTS_6, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), \
      "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define MOELORA_WGMMA_OUTS_8                                                             \
  MOELORA_WGMMA_OUTS_7, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), \
      "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MOELORA_WGMMA_OUTS_9                                                             \
  MOELORA_WGMMA_OUTS_8, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), \
      "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define MOELORA_WGMMA_OUTS_10                                                            \
  MOELORA_WGMMA_OUTS_9, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
      "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define MOELORA_WGMMA_OUTS_11                                                             \
  MOELORA_WGMMA_OUTS_10, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), \
      "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define MOELORA_WGMMA_OUTS_12                                                             \
  MOELORA_WGMMA_OUTS_11, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), \
      "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define MOELORA_WGMMA_OUTS_13                                                              \
  MOELORA_WGMMA_OUTS_12, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), \
      "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define MOELORA_WGMMA_OUTS_14                                                                  \
  MOELORA_WGMMA_OUTS_13, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), \
      "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define MOELORA_WGMMA_OUTS_15                                                                  \
  MOELORA_WGMMA_OUTS_14, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), \
      "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define MOELORA_WGMMA_OUTS_16                                                                  \
  MOELORA_WGMMA_OUTS_15, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), \
      "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define MOELORA_WGMMA(type, name, n, width, a, b)                                      \
  template <>                                                                          \
  struct Wgmma<type, width> {                                                          \
    static __device__ __forceinline__ void run(float (&d)[width / 2], uint64_t desc_a, \
                                               uint64_t desc_b) {                      \
      asm volatile(                                                                    \
          "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                               \
          "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." name "." name          \
          " {" MOELORA_WGMMA_REGS_##n "}, %" #a ", %" #b ", add, 1, 1, 0, 0;\n}\n"     \
          : MOELORA_WGMMA_OUTS_##n                                                     \
          : "l"(desc_a), "l"(desc_b));                                                 \
    }                                                                                  \
  };
#define MOELORA_WGMMA_BOTH(n, width, a, b)             \
  MOELORA_WGMMA(__nv_bfloat16, "bf16", n, width, a, b) \
  MOELORA_WGMMA(__half, "f16", n, width, a, b)

MOELORA_WGMMA_BOTH(1, 16, 8, 9)
MOELORA_WGMMA_BOTH(2, 32, 16, 17)
MOELORA_WGMMA_BOTH(3, 48, 24, 25)
MOELORA_WGMMA_BOTH(4, 64, 32, 33)
MOELORA_WGMMA_BOTH(5, 80, 40, 41)
MOELORA_WGMMA_BOTH(6, 96, 48, 49)
MOELORA_WGMMA_BOTH(7, 112, 56, 57)
MOELORA_WGMMA_BOTH(8, 128, 64, 65)
MOELORA_WGMMA_BOTH(9, 144, 72, 73)
MOELORA_WGMMA_BOTH(10, 160, 80, 81)
MOELORA_WGMMA_BOTH(11, 176, 88, 89)
MOELORA_WGMMA_BOTH(12, 192, 96, 97)
MOELORA_WGMMA_BOTH(13, 208, 104, 105)
MOELORA_WGMMA_BOTH(14, 224, 112, 113)
MOELORA_WGMMA_BOTH(15, 240, 120, 121)
MOELORA_WGMMA_BOTH(16, 256, 128, 129)

#undef MOELORA_WGMMA_REGS_1
#undef MOELORA_WGMMA_OUTS_1
#undef MOELORA_WGMMA_REGS_2
#undef MOELORA_WGMMA_OUTS_2
#undef MOELORA_WGMMA_REGS_3
#undef MOELORA_WGMMA_OUTS_3
#undef MOELORA_WGMMA_REGS_4
#undef MOELORA_WGMMA_OUTS_4
#undef MOELORA_WGMMA_REGS_5
#undef MOELORA_WGMMA_OUTS_5
#undef MOELORA_WGMMA_REGS_6
#undef MOELORA_WGMMA_OUTS_6
#undef MOELORA_WGMMA_REGS_7
#undef MOELORA_WGMMA_OUTS_7
#undef MOELORA_WGMMA_REGS_8
#undef MOELORA_WGMMA_OUTS_8
#undef MOELORA_WGMMA_REGS_9
#undef MOELORA_WGMMA_OUTS_9
#undef MOELORA_WGMMA_REGS_10
#undef MOELORA_WGMMA_OUTS_10
#undef MOELORA_WGMMA_REGS_11
#undef MOELORA_WGMMA_OUTS_11
#undef MOELORA_WGMMA_REGS_12
#undef MOELORA_WGMMA_OUTS_12
#undef MOELORA_WGMMA_REGS_13
#undef MOELORA_WGMMA_OUTS_13
#undef MOELORA_WGMMA_REGS_14
#undef MOELORA_WGMMA_OUTS_14
#undef MOELORA_WGMMA_REGS_15
#undef MOELORA_WGMMA_OUTS_15
#undef MOELORA_WGMMA_REGS_16
#undef MOELORA_WGMMA_OUTS_16
#undef MOELORA_WGMMA
#undef MOELORA_WGMMA_BOTH

}  // namespace moelora::sm90

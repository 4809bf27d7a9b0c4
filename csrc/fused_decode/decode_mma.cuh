// The consumer's arithmetic: one tile's rows x tokens in fp32 registers, stage by stage. Weights
// are the M operand of mma.sync, tokens N. The four warps of a group split the rows of a tall tile,
// else the columns of each stage; either way all of them read every stage.
#pragma once

#include "decode_schedule.cuh"

namespace moelora::fused_decode {

// kRows of weights a tile, kColumns a stage, kBlocks x 8 tokens.
template <class C, class T, int kRows, int kColumns, int kBlocks>
struct TileSums {
  static constexpr bool kSplitRows = kRows % (16 * kGroupWarps) == 0;
  static constexpr int kFragments = kSplitRows ? kRows / 16 / kGroupWarps : kRows / 16;
  static constexpr int kPitch = token_pitch(kColumns);
  static constexpr int kSumPitch = kRows + 4;  // no two lanes of a store meet in a bank

  float sums[kFragments][kBlocks][4];
  int warp, lane;

  __device__ __forceinline__ TileSums(int warp_in_group, int lane)
      : warp(warp_in_group), lane(lane) {
#pragma unroll
    for (int m = 0; m < kFragments; m++) {
#pragma unroll
      for (int n = 0; n < kBlocks; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ int first_row() const {
    return kSplitRows ? warp * kFragments * 16 : 0;
  }

  // Token fragments of 16 columns at `column` of rows of kRowPitch bytes.
  template <int kRowPitch>
  __device__ __forceinline__ void load_tokens(uint32_t (&b)[kBlocks][2], uint32_t tokens,
                                              int column) const {
    // Where fewer than 8 rows are stored, the missing columns of the product repeat them.
    constexpr int kRowMask = C::kMaxTokens < 8 ? C::kMaxTokens - 1 : 7;
    const uint32_t row = tokens + (lane & kRowMask) * kRowPitch + (lane >> 3 & 1) * 16 + column * 2;
#pragma unroll
    for (int n = 0; n + 1 < kBlocks; n += 2) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, row + (n + (lane >> 4)) * 8 * kRowPitch);
      b[n][0] = r[0], b[n][1] = r[1], b[n + 1][0] = r[2], b[n + 1][1] = r[3];
    }
    if (kBlocks % 2 == 1) {
      ptx::ldmatrix_x2(b[kBlocks - 1][0], b[kBlocks - 1][1], row + (kBlocks - 1) * 8 * kRowPitch);
    }
  }

  // W x of one stage: blocks of kRows x 64 columns in the 128-byte swizzle. Warps that split the
  // columns take 16 of each 64.
  __device__ __forceinline__ void add_stage(uint32_t weights, uint32_t tokens) {
    const int first_chunk = (kSplitRows ? 0 : warp * 2) + (lane >> 4), swizzle = lane & 7;
    const uint32_t row = weights + (first_row() + (lane & 15)) * 128;
    constexpr int kStep = kSplitRows ? 16 : 64;
    // Products of one fragment alone wait for each other, and so take turns at two sums.
    constexpr bool kTwoSums = kFragments * kBlocks == 1;
    float odd[4] = {};
#pragma unroll
    for (int k = 0; k < kColumns; k += kStep) {
      uint32_t b[kBlocks][2];
      load_tokens<kPitch>(b, tokens + (kSplitRows ? 0 : warp * 32), k);
#pragma unroll
      for (int m = 0; m < kFragments; m++) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, row + k / 64 * (kRows * 128) + m * 2048 +
                                ((k % 64 / 8 + first_chunk) ^ swizzle) * 16);
#pragma unroll
        for (int n = 0; n < kBlocks; n++) {
          float (&to)[4] = kTwoSums && k / kStep % 2 == 1 ? odd : sums[m][n];
          ptx::mma_m16n8k16<T>(to, a, b[n][0], b[n][1]);
        }
      }
    }
    if constexpr (kTwoSums) {
#pragma unroll
      for (int i = 0; i < 4; i++) sums[0][0][i] += odd[i];
    }
  }

  // B v of one expand stage for the tokens of `token_mask`: kRows x 32 ranks in the 64-byte
  // swizzle, `ranks` of them real (what lies beyond is never multiplied: it may be NaN). The
  // products go through sums of their own, so that the other tokens keep their bits whatever the
  // slot holds. kGateUp: rows come 8 gate, 8 up; gate's use the first 32 ranks of v, up's the
  // second.
  template <bool kGateUp>
  __device__ __forceinline__ void add_expand(uint32_t weights, uint32_t tokens, int ranks,
                                             typename C::TokenMask token_mask, bool up_rows_first) {
    static_assert(kSplitRows, "each warp has rows of its own");
    const int row = first_row() + (lane & 15);
#pragma unroll
    for (int k = 0; k < kExpandColumns; k += 16) {
      if (k >= ranks) break;
      uint32_t gate[kBlocks][2], up[kGateUp ? kBlocks : 1][2];
      load_tokens<kExpandPitch>(gate, tokens, k);
      if constexpr (kGateUp) load_tokens<kExpandPitch>(up, tokens, kExpandColumns + k);
#pragma unroll
      for (int m = 0; m < kFragments; m++) {
        uint32_t a[4];
        ptx::ldmatrix_x4(
            a, weights + (row + m * 16) * 64 + ((k / 8 + (lane >> 4)) ^ (row >> 1 & 3)) * 16);
        mask_ranks(a, ranks - k);
        // a[0], a[2] are rows 0-7 of the fragment (gate), a[1], a[3] rows 8-15 (up). The sums' rows
        // are the other way round where w13 has up first.
        const uint32_t gate_rows[4] = {up_rows_first ? 0 : a[0], up_rows_first ? a[0] : 0,
                                       up_rows_first ? 0 : a[2], up_rows_first ? a[2] : 0};
        const uint32_t up_rows[4] = {up_rows_first ? a[1] : 0, up_rows_first ? 0 : a[1],
                                     up_rows_first ? a[3] : 0, up_rows_first ? 0 : a[3]};
#pragma unroll
        for (int n = 0; n < kBlocks; n++) {
          const uint32_t wanted = static_cast<uint32_t>(token_mask >> (n * 8));
          if ((wanted & 0xff) == 0) continue;
          float delta[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          if constexpr (kGateUp) {
            ptx::mma_m16n8k16<T>(delta, gate_rows, gate[n][0], gate[n][1]);
            ptx::mma_m16n8k16<T>(delta, up_rows, up[n][0], up[n][1]);
          } else {
            ptx::mma_m16n8k16<T>(delta, a, gate[n][0], gate[n][1]);
          }
#pragma unroll
          for (int i = 0; i < 4; i++) {
            if (wanted >> (2 * (lane & 3) + (i & 1)) & 1) sums[m][n][i] += delta[i];
          }
        }
      }
    }
  }

  // Zeros the elements of an A fragment from column `ranks` on.
  __device__ __forceinline__ void mask_ranks(uint32_t (&a)[4], int ranks) const {
    if (ranks >= 16) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = 2 * (lane & 3) + half * 8;
      const uint32_t keep = column + 1 < ranks ? ~0u : (column < ranks ? 0xffffu : 0u);
      a[2 * half] &= keep;
      a[2 * half + 1] &= keep;
    }
  }

  // Sums to shared memory as [token][row]: one plane, or one of each warp where they split columns.
  __device__ __forceinline__ void store(float* out) const {
    out += (kSplitRows ? 0 : warp * C::kMaxTokens * kSumPitch) + 2 * (lane & 3) * kSumPitch +
           first_row() + (lane >> 2);
    if (2 * (lane & 3) >= C::kMaxTokens) return;
#pragma unroll
    for (int m = 0; m < kFragments; m++) {
#pragma unroll
      for (int n = 0; n < kBlocks; n++) {
        float* at = out + n * 8 * kSumPitch + m * 16;
        at[0] = sums[m][n][0];
        at[kSumPitch] = sums[m][n][1];
        at[8] = sums[m][n][2];
        at[kSumPitch + 8] = sums[m][n][3];
      }
    }
  }
};

// total += weight * sums of one 16-row fragment for the tokens of `mask`; the other tokens' sums
// are of whatever the stage held.
__device__ __forceinline__ void add_weighted(float (&total)[4], const float (&sums)[4],
                                             const float* weights, uint32_t mask, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = 2 * (lane & 3) + (i & 1);
    if (mask >> token & 1) total[i] += weights[token] * sums[i];
  }
}

// Two neighbouring sums of token n, from row `row` on, over the planes of the group's warps.
template <class C, int kRows>
__device__ __forceinline__ float2 read_sums2(const float* sums, int n, int row) {
  constexpr int kPlanes = kRows % (16 * kGroupWarps) == 0 ? 1 : kGroupWarps;
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < kPlanes; w++) {
    const float2 v =
        *reinterpret_cast<const float2*>(sums + (w * C::kMaxTokens + n) * (kRows + 4) + row);
    total.x += v.x;
    total.y += v.y;
  }
  return total;
}

}  // namespace moelora::fused_decode

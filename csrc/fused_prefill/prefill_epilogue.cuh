// From a consumer warpgroup's accumulators to rows of z or y: bias, activation, one rounding, and
// out through swizzled staging by TMA, which clips what lies beyond the tensor's columns.
#pragma once

#include "../activation/activation_math.h"
#include "../common/vector.cuh"
#include "prefill_gemm_params.h"
#include "prefill_ptx.cuh"
#include "prefill_wgmma.cuh"

namespace moelora::fused_prefill {

// One warpgroup's place in the block and its staging.
struct ConsumerGroup {
  uint32_t staging;
  int group, warp, lane;  // warp: 0..3 inside the group
  bool elected;           // the thread that issues the group's stores and waits for them
  int down_buffer = 0;    // the next down buffer to fill
  // gate_up, elected: the tiles of stored items that no other SM knows of yet, in shared memory.
  int32_t* stored_tiles = nullptr;
  int num_stored = 0;

  __device__ __forceinline__ void sync() const { ptx::named_barrier(2 + group, kGroupThreads); }
  // The elected thread of gate_up: its stores so far are complete, and counted.
  __device__ __forceinline__ void publish_stored(uint32_t* z_ready) {
    sm90::bulk_wait_all();
    ptx::fence_release();
    for (int i = 0; i < num_stored; ++i) ptx::add_relaxed(z_ready + stored_tiles[i]);
    num_stored = 0;
  }
  // The tile columns (tokens) of accumulators 4 i, 4 i + 1 are token(i), token(i) + 1; of 4 i + 2
  // and 4 i + 3 too, eight weight rows further.
  __device__ __forceinline__ int token(int i) const { return 8 * i + 2 * (lane & 3); }
};

// Stores `rows` staged rows of kRowWidth bytes: boxes of 64 rows, then of 16.
template <int kRows, int kRowWidth>
__device__ __forceinline__ void store_rows(const RowMaps64And16& maps, uint32_t staging, int column,
                                           int first_row) {
#pragma unroll
  for (int row = 0; row < kRows / 64 * 64; row += 64) {
    sm90::tma_store_2d(&maps.rows64, staging + row * kRowWidth, column, first_row + row);
  }
#pragma unroll
  for (int row = kRows / 64 * 64; row < kRows; row += 16) {
    sm90::tma_store_2d(&maps.rows16, staging + row * kRowWidth, column, first_row + row);
  }
}

template <int N>
__device__ __forceinline__ void add_bias(sm90::WgmmaAccumulators<N>& acc, float first,
                                         float second) {
#pragma unroll
  for (int i = 0; i < N / 8; ++i) {
    acc.d[4 * i] += first;
    acc.d[4 * i + 1] += first;
    acc.d[4 * i + 2] += second;
    acc.d[4 * i + 3] += second;
  }
}

// All three activations as one formula, g sigmoid(g (s1 + s3 g^2)) u with g and u clamped: cheaper
// to hold in registers than three code paths. (silu in the usual layout has its own.)
struct ActivationFormula {
  float s1, s3, limit, up_offset;

  __device__ __forceinline__ ActivationFormula(const PrefillGemmParams& p)
      : s1(1.0f), s3(0.0f), limit(INFINITY), up_offset(0.0f) {
    if (p.activation == ActivationKind::kGeluTanh) {
      s1 = 2 * 0.7978845608028654f;
      s3 = s1 * 0.044715f;
    } else if (p.activation == ActivationKind::kSwigluOai) {
      s1 = p.activation_alpha;
      limit = p.activation_limit;
      up_offset = 1.0f;
    }
  }
  __device__ __forceinline__ float operator()(float gate, float up) const {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    return gate * sigmoid(gate * (s1 + s3 * gate * gate)) * (up + up_offset);
  }
};

// The warpgroup's 32 columns of z for N tokens: a thread holds gate and up of one column, in
// accumulators 4 i, 4 i + 1 and 4 i + 2, 4 i + 3.
template <class T, int N, class Activation>
__device__ __forceinline__ void stage_z(const sm90::WgmmaAccumulators<N>& acc,
                                        const ConsumerGroup& group, const Activation& activation) {
  const int row = group.lane & 15;
  const uint32_t address = group.staging + row * 64 + ((group.warp ^ ((row >> 1) & 3)) << 4);
#pragma unroll
  for (int j = 0; j < N / 16; ++j) {
    const float* a = acc.d + 8 * j;
    sm90::stmatrix_x2_trans(address + j * 16 * 64,
                            ptx::pack2<T>(activation(a[0], a[2]), activation(a[1], a[3])),
                            ptx::pack2<T>(activation(a[4], a[6]), activation(a[5], a[7])));
  }
}

template <class T, int N>
__device__ __forceinline__ void finish_gate_up(sm90::WgmmaAccumulators<N>& acc,
                                               const PrefillGemmMaps& maps,
                                               const PrefillGemmParams& p, const TokenTile& tile,
                                               int z_column, ConsumerGroup& group) {
  if (p.row_weight != nullptr) {
    const float* weight = p.row_weight + tile.first_row;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const float2 w = __ldcg(reinterpret_cast<const float2*>(weight + group.token(i)));
      acc.d[4 * i] *= w.x;
      acc.d[4 * i + 1] *= w.y;
      acc.d[4 * i + 2] *= w.x;
      acc.d[4 * i + 3] *= w.y;
    }
  }
  if (p.bias_ptr != nullptr) {
    const int64_t column = z_column + group.warp * 8 + (group.lane >> 2);
    const bool interleaved = p.layout == GateUpLayout::kInterleaved;
    const T* bias = static_cast<const T*>(p.bias_ptr) + int64_t{tile.expert} * 2 * p.out_columns;
    float first = 0.0f, second = 0.0f;
    if (column < p.out_columns) {
      first = to_float(bias[interleaved ? 2 * column : column]);
      second = to_float(bias[interleaved ? 2 * column + 1 : p.out_columns + column]);
    }
    add_bias<N>(acc, first, second);
  }

  if (group.elected) {
    if (group.num_stored == kStoredItems) group.publish_stored(p.z_ready);
    sm90::bulk_wait_read<0>();
  }
  group.sync();
  if (p.activation == ActivationKind::kSilu && p.layout != GateUpLayout::kUpGate) {
    stage_z<T, N>(acc, group, [](float gate, float up) { return silu(gate) * up; });
  } else {
    const ActivationFormula formula(p);
    const bool up_first = p.layout == GateUpLayout::kUpGate;
    stage_z<T, N>(acc, group, [&](float first, float second) {
      return formula(up_first ? second : first, up_first ? first : second);
    });
  }
  ptx::fence_proxy_async_shared();
  group.sync();
  if (group.elected) {
    if (z_column < p.out_columns) {
      store_rows<N, 64>(maps.out, group.staging, z_column, tile.first_row);
    }
    sm90::bulk_commit();
  }
}

// The warpgroup's 64 columns of y, 64 tokens at a time.
template <class T, class Tile, int N>
__device__ __forceinline__ void finish_down(sm90::WgmmaAccumulators<N>& acc,
                                            const PrefillGemmMaps& maps, const PrefillGemmParams& p,
                                            const TokenTile& tile, int y_column,
                                            ConsumerGroup& group) {
  if (p.bias_ptr != nullptr) {
    const int64_t column = y_column + group.warp * 16 + (group.lane >> 2);
    const T* bias = static_cast<const T*>(p.bias_ptr) + int64_t{tile.expert} * p.out_columns;
    const float first = column < p.out_columns ? to_float(bias[column]) : 0.0f;
    const float second = column + 8 < p.out_columns ? to_float(bias[column + 8]) : 0.0f;
    add_bias<N>(acc, first, second);
  }

  const int matrix = group.lane >> 3;
  const int row = (matrix >> 1) * 8 + (group.lane & 7);
  const int chunk = group.warp * 2 + (matrix & 1);
  const uint32_t place = row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
  for (int first_token = 0; first_token < N; first_token += 64) {
    const uint32_t buffer = group.staging + group.down_buffer * Tile::kDownBufferBytes;
    if (group.elected) sm90::bulk_wait_read<Tile::kDownBuffers - 1>();
    group.sync();
#pragma unroll
    for (int j = first_token / 16; j < (first_token + 64) / 16 && j < N / 16; ++j) {
      const float* a = acc.d + 8 * j;
      sm90::stmatrix_x4_trans(buffer + place + (j * 16 - first_token) * 128,
                              ptx::pack2<T>(a[0], a[1]), ptx::pack2<T>(a[2], a[3]),
                              ptx::pack2<T>(a[4], a[5]), ptx::pack2<T>(a[6], a[7]));
    }
    ptx::fence_proxy_async_shared();
    group.sync();
    if (group.elected) {
      if (y_column < p.out_columns) {
        if (first_token + 64 <= N) {
          store_rows<64, 128>(maps.out, buffer, y_column, tile.first_row + first_token);
        } else {
          store_rows<N % 64, 128>(maps.out, buffer, y_column, tile.first_row + first_token);
        }
      }
      sm90::bulk_commit();
    }
    group.down_buffer = (group.down_buffer + 1) % Tile::kDownBuffers;
  }
}

}  // namespace moelora::fused_prefill

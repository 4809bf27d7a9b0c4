#include "../common/grid.h"
#include "../common/launch.h"
#include "../common/vector.cuh"
#include "prefill_ptx.cuh"
#include "prefill_shrink.h"
#include "prefill_wgmma.cuh"

namespace moelora::fused_prefill {
namespace {

constexpr int kRowBytes = 128;  // 64 columns of K a stage
constexpr int64_t kSms = 132;   // of an H200: for how many blocks a call is cut into

// Rows are the M operand, 64 a warpgroup, and rows of A the N operand.
template <int kWarpgroups, int kColumns_>
struct ShrinkTile {
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kColumns = kColumns_;
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kColumns * kRowBytes;
  // As many blocks an SM as accumulators and a ring of some depth allow.
  static constexpr int kBlocksPerSm =
      kColumns > 128 ? 1 : (kWarpgroups == 1 && kColumns <= 64 ? 4 : 2);
  static constexpr int kFit = 220 * 1024 / kBlocksPerSm / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  // Behind the ring: each row's slot and row of x, the rows of a pass, a word a warp. (All of it
  // dynamic, so that the ring starts where dynamic shared memory does, at a multiple of 1024.)
  static constexpr int kListsAt = kStages * kStageBytes;
  static constexpr int kSharedBytes = kListsAt + 4 * (3 * kRows + kThreads / 32);
  // Blocks of K whose products run on while the next block's loads are waited for, and blocks that
  // are loaded ahead: a short ring loads further ahead instead.
  static constexpr int kRunning = kStages >= 5 ? 1 : 0;
  static constexpr int kAhead = kStages - 1 - kRunning;
  static_assert(kAhead >= 2, "enough loads in flight");
  // fp32 sums [rows][columns] lie over the ring; the pad keeps a warp's stores in banks of their
  // own.
  static constexpr int kSumPitch = kColumns + 8;
  static_assert(kRows * kSumPitch * 4 <= kListsAt, "the sums fit");
};

__device__ bool is_last_block() {
  return blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1 && blockIdx.z == gridDim.z - 1;
}

// What a cluster works on at a time: at most kRows rows of one expert.
struct RowPart {
  int32_t tile, expert, first, count;
};

// Part `index` of them all; count is 0 where the tile has fewer. The first parts of all tiles come
// first: every tile has one, so that blocks with work are dealt out to the SMs evenly.
template <int kRows>
__device__ RowPart row_part(const PrefillShrinkParams& p, int32_t num_tiles, int32_t index) {
  if (p.tiles == nullptr) {
    const int64_t first = int64_t{index} * kRows, left = p.num_tokens - first;
    return {0, 0, static_cast<int32_t>(first), static_cast<int32_t>(left < kRows ? left : kRows)};
  }
  const int32_t part = index / num_tiles, tile_idx = index % num_tiles;
  const int4 v = __ldcg(reinterpret_cast<const int4*>(p.tiles + tile_idx));
  const TokenTile tile = {v.x, v.y, v.z, v.w};
  // As few even parts, in steps of 16 rows, as hold the tile.
  const int32_t used = (tile.rows + kRows - 1) / kRows;
  if (part >= used) return {};
  const int32_t steps = tile.rows / kRowStep;
  const int32_t begin = steps * part / used * kRowStep, end = steps * (part + 1) / used * kRowStep;
  return {tile_idx, tile.expert, tile.first_row + begin, end - begin};
}

// A part's rows times kColumns rows of A (blockIdx.y picks them), one pass for each slot that the
// rows use, in ascending order; a pass gathers the slot's rows only. Blocks along z take turns at
// the passes, the blocks of a cluster share the columns of K.
template <class T, class Tile>
__device__ __forceinline__ void shrink_part(const PrefillShrinkParams& p, const RowPart& rows,
                                            uint8_t* shared) {
  constexpr int kColumns = Tile::kColumns, kStages = Tile::kStages, kAhead = Tile::kAhead;
  constexpr int kLoadRows = Tile::kThreads / 8;  // rows that all threads load at once
  constexpr int kRowLoads = Tile::kRows / kLoadRows;
  constexpr int kColumnLoads = (kColumns + kLoadRows - 1) / kLoadRows;
  int32_t* row_slot = reinterpret_cast<int32_t*>(shared + Tile::kListsAt);
  int32_t* row_of_x = row_slot + Tile::kRows;
  int32_t* listed = row_of_x + Tile::kRows;
  int32_t* warp_value = listed + Tile::kRows;
  const uint32_t base = ptx::shared_address(shared);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;

  if (thread < Tile::kRows) {
    const int32_t row = rows.first + thread;
    int32_t slot = -1, x_row = row;
    if (thread < rows.count) {
      if (p.row_token != nullptr) x_row = __ldcg(p.row_token + row);
      slot = p.row_slot != nullptr ? __ldcg(p.row_slot + row) : p.slots(row);
    }
    row_slot[thread] = slot;
    row_of_x[thread] = x_row;
  }
  if (p.z_ready != nullptr && thread == 0) {
    sm90::wait_for_count(p.z_ready + rows.tile, p.z_parts);
  }
  __syncthreads();

  const int32_t a_rows = p.components * p.rank;
  const int32_t first_column = blockIdx.y * kColumns;
  // This block's share of K.
  const int32_t rank = sm90::cluster_rank(), blocks = sm90::cluster_size();
  const int32_t all_k_blocks = (p.in_features + 63) / 64;
  const int32_t first_k_block = all_k_blocks * rank / blocks;
  const int32_t k_blocks = all_k_blocks * (rank + 1) / blocks - first_k_block;
  const int32_t first_k = first_k_block * 64;
  const int load_row = thread >> 3, chunk = thread & 7;
  const uint32_t place = load_row * kRowBytes + ((chunk ^ (load_row & 7)) << 4);

  int32_t slot = -1;
  for (uint32_t pass = 0;; ++pass) {
    // The smallest slot above the last one.
    const int32_t mine = thread < Tile::kRows ? row_slot[thread] : -1;
    const int32_t least = __reduce_min_sync(~0u, mine > slot ? mine : INT32_MAX);
    if (lane == 0) warp_value[warp] = least;
    __syncthreads();
    int32_t next = INT32_MAX;
    for (int w = 0; w < Tile::kThreads / 32; ++w) next = min(next, warp_value[w]);
    if (next == INT32_MAX) return;
    slot = next;
    if (pass % gridDim.z != blockIdx.z) {
      __syncthreads();  // warp_value has been read
      continue;
    }
    const int32_t slot_rank = p.slots.rank(slot, p.part, p.rank);

    // Its rows, in order.
    const uint32_t votes = __ballot_sync(~0u, mine == slot);
    __syncthreads();  // warp_value has been read, and the last pass is done with `listed`
    if (lane == 0) warp_value[warp] = __popc(votes);
    __syncthreads();
    int32_t count = 0, before = 0;
    for (int w = 0; w < Tile::kThreads / 32; ++w) {
      if (w < warp) before += warp_value[w];
      count += warp_value[w];
    }
    if (mine == slot) listed[before + __popc(votes & ((1u << lane) - 1))] = thread;
    __syncthreads();
    if (slot_rank == 0) continue;
    const bool gate_up = p.part == LoraPart::kGateUp;
    float scale = 1.0f, up_scale = 1.0f;  // scale: of gate, or of down
    if (p.scaling_ptr != nullptr) {
      scale = p.scaling_ptr[3 * slot + (gate_up ? 0 : 2)];
      up_scale = p.scaling_ptr[3 * slot + 1];
    }

    const T* a = static_cast<const T*>(p.a_ptr) + slot * p.a_slot_stride +
                 rows.expert * p.a_expert_stride + (first_column + load_row) * p.a_row_stride +
                 first_k + chunk * 8;
    const T* x[kRowLoads];
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      const int r = load_row + i * kLoadRows;
      const int64_t row = row_of_x[r < count ? listed[r] : 0];
      x[i] = static_cast<const T*>(p.x_ptr) + row * p.x_stride + first_k + chunk * 8;
    }
    // Rows of A beyond the slot's rank, and columns beyond the last, count as zeros.
    uint32_t column_wanted = 0;
#pragma unroll
    for (int i = 0; i < kColumnLoads; ++i) {
      const int32_t column = first_column + load_row + i * kLoadRows;
      if (column < a_rows && column % p.rank < slot_rank) column_wanted |= 1u << i;
    }
    const auto load = [&](int32_t k_block) {
      if (k_block < k_blocks) {
        const uint32_t stage = base + k_block % kStages * Tile::kStageBytes + place;
        const int32_t column = k_block * 64;
        const int bytes = first_k + column + chunk * 8 < p.in_features ? 16 : 0;
#pragma unroll
        for (int i = 0; i < kRowLoads; ++i) {
          if (load_row + i * kLoadRows < count) {
            ptx::cp_async_16(stage + i * kLoadRows * kRowBytes, x[i] + column, bytes);
          }
        }
#pragma unroll
        for (int i = 0; i < kColumnLoads; ++i) {
          if (kColumns % kLoadRows == 0 || load_row < kColumns) {
            ptx::cp_async_16(stage + Tile::kXBytes + i * kLoadRows * kRowBytes,
                             a + i * kLoadRows * p.a_row_stride + column,
                             column_wanted >> i & 1 ? bytes : 0);
          }
        }
      }
      ptx::cp_async_commit();
    };

    const int group = thread >> 7;
    const bool active = group * 64 < count;
    sm90::WgmmaAccumulators<kColumns> acc;
    acc.clear();
    for (int s = 0; s < kAhead; ++s) load(s);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      ptx::cp_async_wait_group<kAhead - 1>();
      ptx::fence_proxy_async_shared();  // wgmma reads by another proxy than cp.async writes
      sm90::wgmma_wait<Tile::kRunning>();
      __syncthreads();
      load(k_block + kAhead);  // into the stage that everyone has just finished with
      if (active) {
        const uint32_t stage = base + k_block % kStages * Tile::kStageBytes;
        const uint64_t x_desc = sm90::wgmma_descriptor(stage + group * 64 * kRowBytes);
        const uint64_t a_desc = sm90::wgmma_descriptor(stage + Tile::kXBytes);
        acc.pin();
        sm90::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sm90::Wgmma<T, kColumns>::run(acc.d, x_desc + k * sm90::kWgmmaKStep,
                                        a_desc + k * sm90::kWgmmaKStep);
        }
        sm90::wgmma_commit();
      }
    }
    sm90::wgmma_wait<0>();
    acc.pin();

    // The blocks' sums are added up in the order of ranks, each block for every blocks-th row.
    __syncthreads();  // the ring is free
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = group * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * half;
      float* row = sums + r * Tile::kSumPitch + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        *reinterpret_cast<float2*>(row + 8 * j) =
            make_float2(acc.d[4 * j + 2 * half], acc.d[4 * j + 2 * half + 1]);
      }
    }
    sm90::cluster_sync();
    // Scale in fp32, round once. Columns of A's only component serve gate and up.
    const int32_t v_columns = gate_up ? 2 * p.rank : p.rank;
    for (int i = thread; i < Tile::kRows * (kColumns / 2); i += Tile::kThreads) {
      const int r = i / (kColumns / 2) * blocks + rank, column_here = i % (kColumns / 2) * 2;
      const int32_t column = first_column + column_here;
      if (r >= count || column >= a_rows) continue;
      const uint32_t at = base + 4 * (r * Tile::kSumPitch + column_here);
      float2 sum = make_float2(0.0f, 0.0f);
      for (int block = 0; block < blocks; ++block) {
        const float2 part = sm90::load_remote_8(sm90::address_of_rank(at, block));
        sum.x += part.x;
        sum.y += part.y;
      }
      T* v = static_cast<T*>(p.v_ptr) + (int64_t{rows.first} + listed[r]) * v_columns;
      for (int32_t to = column; to < v_columns; to += a_rows) {
        const float factor = to < p.rank ? scale : up_scale;
        *reinterpret_cast<uint32_t*>(v + to) = ptx::pack2<T>(sum.x * factor, sum.y * factor);
      }
    }
    sm90::cluster_sync();  // every block's sums have been read
  }
}

// Clusters along x take parts in turn; any number of them is right. Needs 16-byte aligned rows of x
// and A.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    prefill_shrink_kernel(const __grid_constant__ PrefillShrinkParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  // The swizzle counts from 1024-byte lines.
  if ((ptx::shared_address(shared) & 1023) != 0) __trap();
  // With z as x this runs beside the last items of gate_up, and the tile lists are older than that.
  if (p.z_ready == nullptr) ptx::wait_for_previous_kernel();
  // Not before: whoever starts now reads the tile lists.
  ptx::launch_dependents();
  const int32_t num_tiles = p.tiles != nullptr ? __ldcg(p.num_tiles) : 0;
  const int32_t parts = p.tiles != nullptr
                            ? num_tiles * ((p.max_tokens + Tile::kRows - 1) / Tile::kRows)
                            : static_cast<int32_t>(ceil_div(p.num_tokens, Tile::kRows));
  const int32_t blocks = sm90::cluster_size(), clusters = gridDim.x / blocks;
  for (int32_t i = blockIdx.x / blocks; i < parts; i += clusters) {
    const RowPart rows = row_part<Tile::kRows>(p, num_tiles, i);
    if (rows.count <= 0) continue;
    shrink_part<T, Tile>(p, rows, shared);
    __syncthreads();  // its lists have been read
  }
  // So that who waits for this kernel has waited for gate_up too. One block is enough, and others
  // would only hold up the blocks of down.
  if (p.z_ready != nullptr && is_last_block()) ptx::wait_for_previous_kernel();
}

// Few rows make few blocks: then the slots that they use are shared by up to four clusters, and K
// by the blocks of a cluster, until there are about as many blocks as run at once.
struct ShrinkSplits {
  unsigned slots = 1, k = 1;
};

ShrinkSplits splits_of(const PrefillShrinkParams& p, int64_t blocks, int64_t blocks_at_once) {
  constexpr int64_t kMaxSlotSplits = 4, kMaxKSplits = 8, kMinKBlocks = 4;
  ShrinkSplits splits;
  const int64_t slots = p.slots.num_slots < kMaxSlotSplits ? p.slots.num_slots : kMaxSlotSplits;
  while (splits.slots < slots && blocks * (splits.slots + 1) <= 2 * blocks_at_once) ++splits.slots;
  const int64_t k_blocks = ceil_div(p.in_features, 64);
  while (splits.k < kMaxKSplits && k_blocks >= 2 * splits.k * kMinKBlocks &&
         blocks * splits.slots * splits.k * 2 <= blocks_at_once) {
    splits.k *= 2;
  }
  return splits;
}

template <class T, int kWarpgroups, int kColumns>
void launch(const PrefillShrinkParams& p, cudaStream_t stream) {
  using Tile = ShrinkTile<kWarpgroups, kColumns>;
  const auto kernel = prefill_shrink_kernel<T, Tile>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes),
      "prefill_shrink");
  LaunchConfig config;
  // The parts of even groups.
  const int64_t parts = p.num_groups * ceil_div(p.expected_rows, Tile::kRows);
  config.grid.y = (p.components * p.rank + kColumns - 1) / kColumns;
  const ShrinkSplits splits = splits_of(p, parts * config.grid.y, kSms * Tile::kBlocksPerSm);
  config.grid.x = blocks_for(parts * splits.k, 1).x;
  config.grid.z = splits.slots;
  config.cluster = splits.k;
  config.block = dim3(Tile::kThreads);
  config.shared_bytes = Tile::kSharedBytes;
  config.stream = stream;
  config.dependent = true;
  launch_kernel("prefill_shrink", kernel, config, p);
}

template <class T, int kWarpgroups>
void launch_columns(const PrefillShrinkParams& p, cudaStream_t stream) {
  const int32_t columns = p.components * p.rank;
  if (columns <= 16) return launch<T, kWarpgroups, 16>(p, stream);
  if (columns <= 32) return launch<T, kWarpgroups, 32>(p, stream);
  if (columns <= 64) return launch<T, kWarpgroups, 64>(p, stream);
  if (columns <= 128) return launch<T, kWarpgroups, 128>(p, stream);
  launch<T, kWarpgroups, 256>(p, stream);
}

// The taller blocks where the mean says that many groups have over 64 rows: rows of A are read once
// a block.
template <class T>
void launch_rows(const PrefillShrinkParams& p, cudaStream_t stream) {
  if (p.expected_rows > 56) return launch_columns<T, 2>(p, stream);
  launch_columns<T, 1>(p, stream);
}

}  // namespace

void launch_prefill_shrink(const PrefillShrinkParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBFloat16) return launch_rows<__nv_bfloat16>(params, cuda_stream);
  launch_rows<__half>(params, cuda_stream);
}

}  // namespace moelora::fused_prefill

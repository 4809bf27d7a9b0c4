#include "../common/grid.h"
#include "../common/launch.h"
#include "../common/ptx.cuh"
#include "prefill_tiles.h"

namespace moelora::fused_prefill {
namespace {

constexpr int kTilesThreads = 256;
constexpr int kTilesWarps = kTilesThreads / 32;
constexpr int kExpertsPerThread = kMaxExperts / kTilesThreads;

// Sum of `value` over the threads before this one, and over all of them. All threads call it.
struct BlockScan {
  int32_t before, total;

  __device__ explicit BlockScan(int32_t value) {
    __shared__ int32_t warp_sums[kTilesWarps];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int32_t sum = value;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += other;
    }
    __syncthreads();  // an earlier scan's sums have been read
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    before = sum - value;
    total = 0;
    for (int w = 0; w < kTilesWarps; ++w) {
      if (w < warp) before += warp_sums[w];
      total += warp_sums[w];
    }
  }
};

// Which tile a block does: the expert's padded rows are split evenly, in steps of 16, over as few
// tiles as hold them. Where that leaves some of a cluster's tiles without rows, they repeat others:
// both write the same.
struct TileChoice {
  int32_t expert, first_row, rows;
};

// One thread looks at kExpertsPerThread neighbouring experts. Returns the number of tiles of all.
__device__ int32_t choose_tile(const PrefillTilesParams& p, int32_t tile_idx, TileChoice* choice) {
  const int first_expert = threadIdx.x * kExpertsPerThread;
  int32_t count[kExpertsPerThread], sum = 0;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = first_expert + i;
    const int32_t rows =
        e < p.num_local_experts ? p.expert_offsets[e + 1] - p.expert_offsets[e] : 0;
    const int32_t most = p.cluster * p.max_tokens;
    count[i] = (rows + most - 1) / most * p.cluster;
    sum += count[i];
  }
  const BlockScan scan(sum);
  int32_t before = scan.before;
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    if (tile_idx >= before && tile_idx < before + count[i]) {
      const int e = first_expert + i;
      const int32_t offset = p.expert_offsets[e];
      const int64_t steps = (p.expert_offsets[e + 1] - offset) / kRowStep;
      const int32_t k = tile_idx - before;
      const int32_t begin = static_cast<int32_t>(steps * k / count[i]);
      const int32_t end = max(static_cast<int32_t>(steps * (k + 1) / count[i]), begin + 1);
      *choice = {e, offset + begin * kRowStep, (end - begin) * kRowStep};
    }
    before += count[i];
  }
  return scan.total;
}

// A slot's rows in a tile, for one side: thread i of a block holds run i, or an empty one.
struct SlotRun {
  int32_t slot, rank;
  int32_t begin, end;  // rows of the tile
};

// Lists the units of one side, for components first..last of each run, and returns how many there
// are.
__device__ int32_t list_units(LoraUnit* units, const SlotRun& run, int first, int last) {
  const int32_t steps = (run.rank + kRankStep - 1) / kRankStep;
  const BlockScan scan((last - first + 1) * steps);
  LoraUnit* unit = units + scan.before;
  for (int component = first; component <= last; ++component) {
    for (int32_t rank = 0; rank < run.rank; rank += kRankStep, ++unit) {
      const int32_t left = run.rank - rank;
      unit->slot = run.slot;
      unit->component = static_cast<int16_t>(component);
      unit->ranks = static_cast<int16_t>(left < kRankStep ? left : kRankStep);
      unit->first_rank = rank;
      unit->begin = static_cast<int16_t>(run.begin);
      unit->end = static_cast<int16_t>(run.end);
    }
  }
  return scan.total;
}

// One block writes one tile: its record, its rows' tokens, slots and weights, and its units. Every
// block repeats the scan over the experts, which costs less than a kernel of its own. Rows of an
// expert come sorted by slot, so that a slot's rows in a tile are one run. Needs max_tokens <=
// kTilesThreads.
__global__ void __launch_bounds__(kTilesThreads) prefill_tiles_kernel(const PrefillTilesParams p) {
  __shared__ TileChoice choice;
  __shared__ int32_t slots[kTilesThreads];
  __shared__ int32_t run_begin[kTilesThreads], run_end[kTilesThreads];
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  const int32_t tile_idx = blockIdx.x;
  const int32_t num_tiles = choose_tile(p, tile_idx, &choice);
  if (tile_idx == 0 && threadIdx.x == 0) {
    *p.num_tiles = num_tiles;
    p.next_items[0] = p.next_items[1] = 0;
  }
  if (tile_idx >= num_tiles) return;
  __syncthreads();

  const int i = threadIdx.x;
  int32_t slot = -1;
  if (i < choice.rows) {
    const int32_t row = choice.first_row + i;
    const int32_t pair = p.permuted_to_expanded[row];
    const int32_t token = pair < 0 ? 0 : pair / p.top_k;
    p.row_token[row] = token;
    if (p.row_weight != nullptr) p.row_weight[row] = pair < 0 ? 0.0f : p.weights(pair);
    if (p.row_slot != nullptr) {
      if (pair >= 0) slot = p.slots(token);
      p.row_slot[row] = slot;
    }
  }

  int32_t gate_up_count = 0, down_count = 0;
  if (p.row_slot != nullptr) {
    slots[i] = slot;
    __syncthreads();
    const bool first = slot >= 0 && (i == 0 || slots[i - 1] != slot);
    const bool last = slot >= 0 && (i + 1 == choice.rows || slots[i + 1] != slot);
    const BlockScan runs(first);
    // Runs up to here, this row's own included.
    const int32_t run = runs.before + first - 1;
    if (first) run_begin[run] = i;
    if (last) run_end[run] = i + 1;
    __syncthreads();
    SlotRun gate_up = {}, down = {};
    bool one_step_for_both = false;  // gate and up share A x and its scale
    if (i < runs.total) {
      gate_up = {slots[run_begin[i]], 0, run_begin[i], run_end[i]};
      down = gate_up;
      gate_up.rank = p.slots.rank(gate_up.slot, LoraPart::kGateUp, p.gate_up_rank);
      down.rank = p.slots.rank(down.slot, LoraPart::kDown, p.down_rank);
      const float* scaling = p.scaling_ptr;
      const int32_t at = 3 * gate_up.slot;
      one_step_for_both =
          p.gate_up_shares_a && (scaling == nullptr || scaling[at] == scaling[at + 1]);
    }
    LoraUnit* gate_up_units = p.gate_up_units + int64_t{tile_idx} * p.gate_up_units_capacity;
    LoraUnit* down_units = p.down_units + int64_t{tile_idx} * p.down_units_capacity;
    gate_up_count =
        list_units(gate_up_units, gate_up, one_step_for_both ? kBothComponents : kGateComponent,
                   one_step_for_both ? kBothComponents : kUpComponent);
    down_count = list_units(down_units, down, kBothComponents, kBothComponents);
  }
  if (i == 0) {
    p.z_ready[tile_idx] = 0;
    p.gate_up_tiles[tile_idx] = {choice.expert, choice.first_row, choice.rows, gate_up_count};
    p.down_tiles[tile_idx] = {choice.expert, choice.first_row, choice.rows, down_count};
  }
}

}  // namespace

void launch_prefill_tiles(const PrefillTilesParams& params, void* stream) {
  LaunchConfig config;
  config.grid = blocks_for(params.max_tiles, 1);
  config.block = dim3(kTilesThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.dependent = true;
  launch_kernel("prefill_tiles", prefill_tiles_kernel, config, params);
}

}  // namespace moelora::fused_prefill

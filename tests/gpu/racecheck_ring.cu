// Shows what compute-sanitizer's racecheck makes of a ring in shared memory that is ordered by
// mbarriers written in PTX: it reports races between the copies of one warp and the reads of
// another although each waits for the other's arrival, with cp.async.mbarrier.arrive and with a
// plain arrive alike. The fused kernels' rings are of this kind, so its reports on them say nothing
// (seen with compute-sanitizer of CUDA 13.0 on an H200).
//
//   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a tests/gpu/racecheck_ring.cu -o ring
//
//   compute-sanitizer --tool racecheck ./ring
#include <cstdio>

#include "../../csrc/common/ptx.cuh"

using namespace moelora;

constexpr int kRounds = 16, kStages = 2, kStageBytes = 32 * 16;

// One block of two warps: warp 0 copies rounds of 32 x 16 bytes into the ring, warp 1 adds the
// words of each 16 bytes up.
template <bool kAsyncArrival>
__global__ void ring_kernel(const uint4* in, uint32_t* out) {
  __shared__ __align__(16) uint8_t ring[kStages * kStageBytes];
  __shared__ __align__(8) uint64_t barriers[2 * kStages];
  const uint32_t stages = ptx::shared_address(ring), full = ptx::shared_address(barriers);
  const uint32_t empty = full + 8 * kStages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) {
      ptx::mbarrier_init(full + 8 * s, 32);
      ptx::mbarrier_init(empty + 8 * s, 1);
    }
  }
  __syncthreads();
  for (int round = 0; round < kRounds; round++) {
    const int s = round % kStages, phase = round / kStages & 1;
    const uint32_t mine = stages + s * kStageBytes + lane * 16;
    if (warp == 0) {
      ptx::mbarrier_wait(empty + 8 * s, phase ^ 1);
      ptx::cp_async_16(mine, in + round * 32 + lane, 16);
      if (kAsyncArrival) {
        ptx::cp_async_arrive(full + 8 * s);
      } else {
        ptx::cp_async_commit();
        ptx::cp_async_wait_group<0>();
        ptx::mbarrier_arrive(full + 8 * s);
      }
    } else {
      ptx::mbarrier_wait(full + 8 * s, phase);
      uint32_t words[4];
      ptx::ldmatrix_x4(words, mine);
      out[round * 32 + lane] = words[0] + words[1] + words[2] + words[3];
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
    }
  }
}

template <bool kAsyncArrival>
int run(const char* name, const uint4* in, uint32_t* out) {
  uint32_t sums[kRounds * 32];
  cudaMemset(out, 0xff, sizeof(sums));
  ring_kernel<kAsyncArrival><<<1, 64>>>(in, out);
  const cudaError_t error = cudaMemcpy(sums, out, sizeof(sums), cudaMemcpyDeviceToHost);
  int wrong = 0;
  for (uint32_t sum : sums) wrong += sum != 0x04040404u;
  std::printf("%s: %d of %d sums wrong, %s\n", name, wrong, kRounds * 32,
              cudaGetErrorString(error));
  return wrong > 0 || error != cudaSuccess;
}

int main() {
  uint4* in;
  uint32_t* out;
  cudaMalloc(&in, kRounds * kStageBytes);
  cudaMalloc(&out, kRounds * 32 * sizeof(uint32_t));
  cudaMemset(in, 1, kRounds * kStageBytes);
  return run<true>("asynchronous arrival", in, out) + run<false>("plain arrival", in, out);
}

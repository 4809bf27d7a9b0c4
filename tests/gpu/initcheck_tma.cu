// Shows that compute-sanitizer's initcheck does not see what TMA writes: one block stores a tile
// into fresh memory by a tensor copy, a second kernel reads it. The values are right, and every
// read is reported as of memory never written.
//
//   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a tests/gpu/initcheck_tma.cu -o tma
//
//   compute-sanitizer --tool initcheck ./tma
//
// moelora's GEMMs store their outputs so; the reports of sanitize.sh that name a kernel which reads
// such rows are these.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "../../csrc/fused_prefill/prefill_ptx.cuh"

using namespace moelora;

namespace {

constexpr int kRows = 32, kColumns = 32, kElements = kRows * kColumns;

void check(bool good, const char* what) {
  if (good) return;
  std::printf("%s failed\n", what);
  std::exit(1);
}

__global__ void store_by_tma(const __grid_constant__ CUtensorMap map) {
  __shared__ __align__(128) float tile[kElements];
  for (int i = threadIdx.x; i < kElements; i += blockDim.x) tile[i] = static_cast<float>(i);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    sm90::tma_store_2d(&map, ptx::shared_address(tile), 0, 0);
    sm90::bulk_commit();
    sm90::bulk_wait_all();
  }
}

__global__ void store_by_threads(float* out) {
  for (int i = threadIdx.x; i < kElements; i += blockDim.x) out[i] = static_cast<float>(i);
}

__global__ void count_wrong(const float* values, int* wrong) {
  for (int i = threadIdx.x; i < kElements; i += blockDim.x) {
    if (values[i] != static_cast<float>(i)) atomicAdd(wrong, 1);
  }
}

CUtensorMap map_of(float* ptr) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found) == cudaSuccess,
        "cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {kColumns, kRows}, strides[] = {kColumns * sizeof(float)};
  const cuuint32_t box[] = {kColumns, kRows}, steps[] = {1, 1};
  CUtensorMap map;
  check(reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)(
            &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, ptr, sizes, strides, box, steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
            CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
        "encoding a tensor map");
  return map;
}

void run(const char* name, bool by_tma) {
  float* values;
  int* wrong;
  check(cudaMalloc(&values, kElements * sizeof(float)) == cudaSuccess, "cudaMalloc");
  check(cudaMalloc(&wrong, sizeof(int)) == cudaSuccess, "cudaMalloc");
  check(cudaMemset(wrong, 0, sizeof(int)) == cudaSuccess, "cudaMemset");
  if (by_tma) {
    store_by_tma<<<1, 128>>>(map_of(values));
  } else {
    store_by_threads<<<1, 128>>>(values);
  }
  count_wrong<<<1, 128>>>(values, wrong);
  int count = -1;
  check(cudaMemcpy(&count, wrong, sizeof(int), cudaMemcpyDeviceToHost) == cudaSuccess, "the run");
  std::printf("stored %s: %d of %d values wrong\n", name, count, kElements);
  std::fflush(stdout);
}

}  // namespace

int main() {
  run("by threads", false);
  run("by TMA", true);
  return 0;
}

#include <algorithm>

#include "../common/launch.h"
#include "moe_sort_kernel.cuh"

namespace moelora {
namespace {

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// `words` of dynamic shared memory; above 48 KiB a kernel has to be told first. Dependent, the op's
// first kernel too: each waits before it reads or writes anything.
template <class Kernel, class... Args>
void launch_sort_kernel(Kernel kernel, unsigned blocks, int64_t threads, int64_t words,
                        void* stream, const Args&... args) {
  LaunchConfig config;
  config.grid = dim3(blocks);
  config.block = dim3(static_cast<unsigned>(threads));
  config.shared_bytes = words * sizeof(int32_t);
  config.stream = static_cast<cudaStream_t>(stream);
  config.dependent = true;
  if (config.shared_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.shared_bytes)),
               "moe_sort");
  }
  launch_kernel("moe_sort", kernel, config, args...);
}

void launch_small(const MoeSortParams& params, void* stream) {
  const int num_digits = num_slot_digits(params);
  int num_bins = params.num_local_experts;
  if (num_digits > 0)
    num_bins = std::max(num_bins, SlotPass{params, nullptr, nullptr, 0}.num_bins());
  const int64_t threads =
      round_up(std::max<int64_t>(num_bins, (params.num_pairs + 1) / kOneBlockRounds), 64);
  const int64_t sort_words = SortShared::words(num_bins, static_cast<int>(threads));
  const int64_t order_words = num_digits > 0 ? 2 * (params.num_pairs / params.ids.num_cols) : 0;
  launch_sort_kernel(moe_sort_small_kernel, 1, threads, sort_words + order_words, stream, params,
                     num_digits, sort_words);
}

// One pass of many items, in two launches.
template <class Pass>
void launch_pass(const Pass& pass, void* stream) {
  const int64_t num_items = pass.num_items();
  const int64_t items_per_chunk =
      round_up((num_items + kSortMaxChunks - 1) / kSortMaxChunks, kSortThreads);
  const unsigned num_chunks = (num_items + items_per_chunk - 1) / items_per_chunk;
  int32_t* const table = static_cast<int32_t*>(pass.params.workspace_ptr);
  launch_sort_kernel(sort_count_kernel<Pass>, num_chunks, kSortThreads, 0, stream, pass,
                     items_per_chunk, table);
  launch_sort_kernel(sort_place_kernel<Pass>, num_chunks, kSortThreads,
                     SortShared::words(pass.num_bins(), kSortThreads), stream, pass,
                     items_per_chunk, static_cast<const int32_t*>(table));
}

}  // namespace

void launch_moe_sort(const MoeSortParams& params, void* stream) {
  if (params.num_pairs <= kOneBlockItems) return launch_small(params, stream);
  // Workspace: the table of counts, then two orders of the tokens.
  const int64_t num_tokens = params.num_pairs / params.ids.num_cols;
  const int64_t table_bytes =
      moe_sort_workspace_bytes(0, params.num_local_experts, params.slots.num_slots);
  int32_t* const orders = static_cast<int32_t*>(params.workspace_ptr) + table_bytes / 4;
  const int32_t* order = nullptr;
  for (int digit = 0; digit < num_slot_digits(params); ++digit) {
    int32_t* const sorted = orders + digit % 2 * num_tokens;
    const SlotPass pass{params, order, sorted, digit * kSortBits};
    if (num_tokens <= kOneBlockItems) {
      launch_sort_kernel(slot_sort_kernel, 1, kSortThreads,
                         SortShared::words(pass.num_bins(), kSortThreads), stream, pass);
    } else {
      launch_pass(pass, stream);
    }
    order = sorted;
  }
  launch_pass(PairPass{params, order}, stream);
}

}  // namespace moelora

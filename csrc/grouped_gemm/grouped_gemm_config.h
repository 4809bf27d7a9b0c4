// All tile knowledge of the grouped GEMM: the tables, and the pure functions that pick from them.
#pragma once

#include <cstdint>

namespace moelora {

// One kernel: feature_tile x token_tile x k_tile of (weights, tokens, K), on `cluster` neighbouring
// blocks along the features. Pipeline stages fill what shared memory is left.
struct GroupedGemmConfig {
  const char* name;
  int32_t token_tile, feature_tile, k_tile, cluster;
  bool cooperative;           // sm90: both consumer warpgroups share a tile, else they take turns
  int64_t max_expected_rows;  // used for experts of up to this many rows on average
};

// Both tables have the same token tiles and limits: moe_sort pads by them before any device is
// known. What counts is how often the weights of an expert pass from L2 to the SMs, n_tiles *
// (feature_tile + token_tile), so a tile should hold nearly every expert of the mean it serves.
constexpr int kNumGroupedGemmConfigs = 5;

constexpr GroupedGemmConfig kSm90GroupedGemmConfigs[kNumGroupedGemmConfigs] = {
    // Decode: bound by reading weights. 12 stages of 16 KB of weights; taking turns hides the
    // epilogue of one tile behind the loads of the next.
    {"sm90_128x16x64_pingpong", 16, 128, 64, 1, false, 9},
    {"sm90_128x32x64_pingpong", 32, 128, 64, 1, false, 20},
    // From here on tokens weigh in: 256 features a tile halve how often they are read.
    {"sm90_256x64x64_cooperative", 64, 256, 64, 1, true, 44},
    {"sm90_256x128x64_cooperative", 128, 256, 64, 1, true, 100},
    {"sm90_256x160x64_cooperative", 160, 256, 64, 1, true, INT64_MAX},
    // Not taken: 128x256 (the bytes per flop of 256x128, with twice the padding); clusters of 2
    // (1.5 to 4 % at 512 rows an expert in our prototype, a loss when bound by memory).
};

constexpr GroupedGemmConfig kSm100GroupedGemmConfigs[kNumGroupedGemmConfigs] = {
    {"sm100_128x16x64_1sm", 16, 128, 64, 1, false, 9},
    {"sm100_128x32x64_1sm", 32, 128, 64, 1, false, 20},
    {"sm100_128x64x64_1sm", 64, 128, 64, 1, false, 44},
    // A pair of SMs works on one tile and each loads half of the tokens.
    {"sm100_256x128x64_2sm", 128, 256, 64, 2, false, 100},
    {"sm100_256x160x64_2sm", 160, 256, 64, 2, false, INT64_MAX},
};

// Index of the config for experts of `expected_rows` rows on average.
constexpr int grouped_gemm_config_index(int64_t expected_rows) {
  int index = 0;
  while (expected_rows > kSm90GroupedGemmConfigs[index].max_expected_rows) ++index;
  return index;
}

// The tile_rows to give to moe_sort for a GEMM over experts of `expected_rows` rows on average.
constexpr int32_t grouped_gemm_tile_rows(int64_t expected_rows) {
  return kSm90GroupedGemmConfigs[grouped_gemm_config_index(expected_rows)].token_tile;
}

// Index of the largest config that suits `expected_rows` and whose token tile divides `tile_rows`;
// -1 where none does (tile_rows is not a multiple of 16).
constexpr int grouped_gemm_config_index(int64_t expected_rows, int32_t tile_rows) {
  int index = grouped_gemm_config_index(expected_rows);
  while (index >= 0 && tile_rows % kSm90GroupedGemmConfigs[index].token_tile != 0) --index;
  return index;
}

}  // namespace moelora

// All tile knowledge of the grouped GEMM: the tables, and the pure function that picks from them.
#pragma once

#include <cstdint>

namespace moelora {

// One kernel: tiles of feature_tile x token_tile outputs, k_tile deep, on `cluster` neighbouring
// blocks along the features. As many pipeline stages as shared memory holds.
struct GroupedGemmConfig {
  const char* name;
  int32_t token_tile, feature_tile, k_tile, cluster;
  bool cooperative;           // sm90: both consumer warpgroups share a tile, else they take turns
  int64_t max_expected_rows;  // used for experts of up to this many rows on average
};

// The token tile should hold nearly every expert of the mean it serves: what counts is how many
// bytes pass from L2 to the SMs, n_tiles * (feature_tile + token_tile) for each step of K.
constexpr int kNumGroupedGemmConfigs = 5;

constexpr GroupedGemmConfig kSm90GroupedGemmConfigs[kNumGroupedGemmConfigs] = {
    // Decode: bound by reading weights. Many stages of 16 KB of weights; taking turns hides the
    // epilogue of one tile behind the loads of the next.
    {"sm90_128x16x64_pingpong", 16, 128, 64, 1, false, 9},
    {"sm90_128x32x64_pingpong", 32, 128, 64, 1, false, 20},
    // From here on tokens weigh in: with 256 features a tile they are read half as often.
    {"sm90_256x64x64_cooperative", 64, 256, 64, 1, true, 44},
    {"sm90_256x128x64_cooperative", 128, 256, 64, 1, true, 100},
    {"sm90_256x192x64_cooperative", 192, 256, 64, 1, true, INT64_MAX},
    // Not taken: 128x256 (the bytes per flop of 256x128, with twice the padding); clusters of 2
    // (1.5 to 4 % at 512 rows an expert in our prototype, a loss when bound by memory).
};

constexpr GroupedGemmConfig kSm100GroupedGemmConfigs[kNumGroupedGemmConfigs] = {
    {"sm100_128x16x64_1sm", 16, 128, 64, 1, false, 9},
    {"sm100_128x32x64_1sm", 32, 128, 64, 1, false, 20},
    {"sm100_128x64x64_1sm", 64, 128, 64, 1, false, 44},
    // A pair of SMs works on one tile, each loading half of the tokens.
    {"sm100_256x128x64_2sm", 128, 256, 64, 2, false, 100},
    {"sm100_256x192x64_2sm", 192, 256, 64, 2, false, INT64_MAX},
};

// Largest row number that a kernel can address: it packs a row and an offset inside the token tile
// into one int32.
constexpr int64_t max_addressable_rows(const GroupedGemmConfig& config) {
  return INT32_MAX / config.token_tile - 2;
}

// Index of the config of `configs` for experts of `expected_rows` rows on average, `max_rows` rows
// in all; -1 where no kernel can address that many.
constexpr int pick_grouped_gemm_config(const GroupedGemmConfig (&configs)[kNumGroupedGemmConfigs],
                                       int64_t expected_rows, int64_t max_rows) {
  int index = 0;
  while (expected_rows > configs[index].max_expected_rows) ++index;
  while (index >= 0 && max_rows > max_addressable_rows(configs[index])) --index;
  return index;
}

}  // namespace moelora

// Tile shapes of the prefill GEMMs, and the pure functions that pick from shapes.
#pragma once

#include <cstdint>

namespace moelora {

// A GEMM item is a block of `weight_rows` times one token tile: at most `max_tokens` rows of one
// expert, in steps of 16. The ring holds `stages` blocks of 64 columns of both. The blocks of a
// cluster (one or two) do as many token tiles of one expert with the same weights, of which each
// loads its share for all. `one_tile`: meant for experts whose rows fit one tile, so that weights
// are read once.
struct FusedPrefillConfig {
  const char* name;
  int32_t weight_rows;
  int32_t max_tokens;
  int32_t stages;
  int32_t cluster;
  bool one_tile;
};

// Figures: µs a layer on one H200, bursts, no adapter (benchmarks/results/prefill_configs.txt); S1
// and S3 as in performance.md. Experts of more rows than a tile holds take two tiles, and so read
// their weights from L2 twice.
constexpr FusedPrefillConfig kFusedPrefillConfigs[] = {
    // Weights are read once and set the pace, so depth in flight counts: S1 T=512 316, with 192
    // tokens 318, with 256 330; S3 T=2048 716, 725 and 749.
    {"tokens144_stages6", 128, 144, 6, 1, true},
    // For about 128 rows an expert: S1 T=2048 381, with 144 tokens 386, with 256 394; S3 T=4096
    // 800, 844 and 828.
    {"tokens192_stages5", 128, 192, 5, 1, true},
    // Tensor cores, L2 and power set the pace, so bytes per flop count: S1 T=3072 453, with 192
    // tokens 504; T=6144 797, in pairs 822.
    {"tokens256_stages4", 128, 256, 4, 1, false},
    // Fewer bytes from L2 per flop, where an expert's rows fill pairs of tiles well: S1 T=4096 560
    // against 608, T=16384 1957 against 1978, S3 T=8192 1120 against 1247; and S1 T=8192 1025, each
    // block on its own 1045.
    {"rows256_tokens144_pairs", 256, 144, 4, 2, false},
};
constexpr int kNumFusedPrefillConfigs = 4;

constexpr int kPairsConfig = 3;
static_assert(kFusedPrefillConfigs[kPairsConfig].cluster == 2);

// Whether experts of about this many rows fill pairs of tiles to three quarters or more; some have
// a sixteenth more than the mean.
constexpr bool rows_fill_pairs(int64_t expected_rows) {
  const FusedPrefillConfig& config = kFusedPrefillConfigs[kPairsConfig];
  const int64_t pair_rows = config.cluster * config.max_tokens;
  const int64_t pairs = (expected_rows + expected_rows / 16 + pair_rows - 1) / pair_rows;
  return 4 * expected_rows >= 3 * pairs * pair_rows;
}

// By mean rows an expert: the narrowest tile that few experts exceed, where one is enough.
constexpr int fused_prefill_config_index(int64_t expected_rows) {
  if (expected_rows < 112) return 0;
  if (expected_rows < 176) return 1;
  return rows_fill_pairs(expected_rows) ? kPairsConfig : 2;
}

// Calls of up to this many tokens are never cut into chunks: weights would be read again too often.
constexpr int64_t kMinPrefillChunk = 2048;

}  // namespace moelora

// Tile shapes of the prefill GEMMs, and the pure functions that pick from shapes.
#pragma once

#include <cstdint>

namespace moelora {

// A GEMM item is a block of `weight_rows` times one token tile: at most `max_tokens` rows of one
// expert, in steps of 16. The ring holds `stages` blocks of 64 columns of both.
struct FusedPrefillConfig {
  const char* name;
  int32_t weight_rows;
  int32_t max_tokens;
  int32_t stages;
};

// Figures: µs a layer on one H200, bursts, no adapter (benchmarks/results/prefill_configs.txt); S1
// and S3 as in performance.md. Experts of more rows than a tile holds take two tiles, and so read
// their weights from L2 twice.
constexpr FusedPrefillConfig kFusedPrefillConfigs[] = {
    // Weights are read once and set the pace, so depth in flight counts: S1 T=512 316, with 192
    // tokens 318, with 256 330; S3 T=2048 716, 725 and 749.
    {"tokens144_stages6", 128, 144, 6},
    // For about 128 rows an expert: S1 T=2048 381, with 144 tokens 386, with 256 394; S3 T=4096
    // 800, 844 and 828.
    {"tokens192_stages5", 128, 192, 5},
    // Tensor cores and L2 set the pace, so bytes per flop count: S1 T=4096 597, with 192 tokens
    // 624, with 256 rows 600.
    {"tokens256_stages4", 128, 256, 4},
    // As few bytes per flop, from weights more than from gathered tokens, and tiles that 512 rows
    // fill better: S1 T=8192 1029 against 1049; but T=16384 2020 against 1972.
    {"rows256_tokens144_stages4", 256, 144, 4},
};
constexpr int kNumFusedPrefillConfigs = 4;

// By mean rows an expert: the narrowest tile that few experts exceed, where one is enough.
constexpr int fused_prefill_config_index(int64_t expected_rows) {
  if (expected_rows < 112) return 0;
  if (expected_rows < 176) return 1;
  return expected_rows >= 448 && expected_rows < 768 ? 3 : 2;
}

// Calls of up to this many tokens are never cut into chunks: weights would be read again too often.
constexpr int64_t kMinPrefillChunk = 2048;

}  // namespace moelora

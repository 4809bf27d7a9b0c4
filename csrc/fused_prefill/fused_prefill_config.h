// Tile shapes of the prefill GEMMs, and the pure functions that pick from shapes.
#pragma once

#include <cstdint>

namespace moelora {

// A GEMM item is 128 weight rows times one token tile: at most `max_tokens` rows of one expert, in
// steps of 16. The ring holds `stages` blocks of 64 columns of both.
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
    // Weights are read once and set the pace, so depth in flight counts: S1 T=512 329 against 343
    // with 256 tokens, S3 T=2048 733 against 761.
    {"tokens144_stages6", 128, 144, 6},
    // For about 128 rows an expert: S3 T=4096 819, with 144 tokens 876, with 256 851; S1 T=2048
    // 390,
    // 395 and 408; T=2560 425, 527 and 442.
    {"tokens192_stages5", 128, 192, 5},
    // Tensor cores and L2 set the pace, so bytes per flop count: S1 T=8192 1070 against 1097 with
    // 192 tokens and 1149 with 144; S3 T=6144 991, 1153 and 1318.
    {"tokens256_stages4", 128, 256, 4},
    {"rows256_tokens144_stages4", 256, 144, 4},
};
constexpr int kNumFusedPrefillConfigs = 4;

// By mean rows an expert: the narrowest tile that few experts exceed.
constexpr int fused_prefill_config_index(int64_t expected_rows) {
  if (expected_rows < 112) return 0;
  return expected_rows < 176 ? 1 : 2;
}

// Calls of up to this many tokens are never cut into chunks: weights would be read again too often.
constexpr int64_t kMinPrefillChunk = 2048;

}  // namespace moelora

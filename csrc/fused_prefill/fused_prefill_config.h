// Tile shapes of the prefill GEMMs, and the pure functions that pick from shapes.
#pragma once

#include <cstdint>

namespace moelora {

// A GEMM item is 128 weight rows times one token tile: at most `max_tokens` rows of one expert, in
// steps of 16. The ring holds `stages` blocks of 64 columns of both.
struct FusedPrefillConfig {
  const char* name;
  int32_t max_tokens;
  int32_t stages;
};

// Figures: µs a layer of the prototype on one H200, bursts, no adapter
// (shared/prototypes/hopper_prefill/FINDINGS.md); S1 and S3 as in performance.md.
constexpr FusedPrefillConfig kFusedPrefillConfigs[] = {
    // Weights are read once and set the pace, so depth in flight counts: S1 T=512 318 against 326,
    // S3 T=2048 729 against 747 with the other row.
    {"tokens144_stages6", 144, 6},
    // Tensor cores set the pace, so bytes per flop count: S1 T=8192 1046 (the first version, at
    // most
    // 128 tokens a tile, took 335 more in gate_up alone).
    {"tokens256_stages4", 256, 4},
};
constexpr int kNumFusedPrefillConfigs = 2;

// Up to 160 rows an expert mostly fit one or two tiles of 144 (S1 T=2048, 128 rows: 389 against
// 395; S3 T=4096, 128 rows: 815 against 822).
constexpr int fused_prefill_config_index(int64_t expected_rows) {
  return expected_rows < 160 ? 0 : 1;
}

// Calls of up to this many tokens are never cut into chunks: weights would be read again too often.
constexpr int64_t kMinPrefillChunk = 2048;

}  // namespace moelora

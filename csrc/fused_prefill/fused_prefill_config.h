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

// Figures: µs a layer on one H200, bursts, no adapter; S1 and S3 as in performance.md. Those with a
// p are the prototype's (shared/prototypes/hopper_prefill/FINDINGS.md), the others this code's.
constexpr FusedPrefillConfig kFusedPrefillConfigs[] = {
    // Weights are read once and set the pace, so depth in flight counts: S1 T=512 328 against 342
    // with the other row, S3 T=2048 p729 against p747.
    {"tokens144_stages6", 144, 6},
    // Tensor cores and L2 set the pace, so bytes per flop count: S1 T=8192 1054 against 1142.
    {"tokens256_stages4", 256, 4},
};
constexpr int kNumFusedPrefillConfigs = 2;

// Experts of more than 144 rows take two of the narrow tiles, and so read their weights from L2
// twice. Where items are short, a deep ring that keeps loading through their epilogues makes up for
// the few experts that this hits on either side of 128 rows: S1 T=2048 (H = 2048) 393 against 406.
// Where they are long it does not: S3 T=4096 (128 rows too, H = 7168) 868 against 844. Means under
// 112 rows split next to no expert. (Between 2048 and 7168 nothing is measured.)
constexpr int fused_prefill_config_index(int64_t expected_rows, int64_t hidden_size) {
  return expected_rows < (hidden_size < 4096 ? 160 : 112) ? 0 : 1;
}

// Calls of up to this many tokens are never cut into chunks: weights would be read again too often.
constexpr int64_t kMinPrefillChunk = 2048;

}  // namespace moelora

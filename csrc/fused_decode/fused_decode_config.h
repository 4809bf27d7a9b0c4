// Tile shapes of the fused decode kernel, and the pure function that picks one from shapes.
#pragma once

#include <cstdint>

namespace moelora {

// A ring stage holds rows x columns of weights and up to max_tokens token rows of as many columns.
struct FusedDecodeConfig {
  const char* name;
  int32_t gate_up_rows, gate_up_columns;  // of w13; half of the rows are gate, half up
  int32_t down_rows, down_columns;        // of w2
  int32_t max_tokens;                     // tokens a tile; longer lists are cut
  // For at most max_tokens tokens: a down tile covers all (or a piece) of the experts with one
  // column a token, so that it ends in `out`: no y, no second kernel.
  bool direct;
  // Of weights that a block asks for at once: enough for the read bandwidth, not more. Direct tiles
  // with adapters take less, because what blocks wait for of each other queues behind it.
  int32_t bytes_in_flight, bytes_in_flight_with_lora;
};

// Figures: µs a layer on one H200, side by side in one run (benchmarks/results/decode_tuning.txt,
// ninth session); S1, S2 and S3 as in performance.md, with an adapter of rank 16 unless it says
// none.
constexpr FusedDecodeConfig kFusedDecodeConfigs[] = {
    // Small tiles to fill 132 SMs, and direct. In flight 48 / 64 / 80 KB: S1 T=1 23.8 / 24.4 /
    // 25.1, none 22.0 / 21.4 / 21.5.
    {"rows32_direct", 32, 256, 16, 256, 4, true, 64 << 10, 48 << 10},
    // Runs of 256 bytes a weight row: S1 T=16 182.8, S3 T=4 79.4; 128 rows of 128 bytes 183.7 and
    // 89.5, 64 rows of 512 bytes 182.6 and 80.3. In flight 48 / 64 / 80 / 96 KB: S3 T=4 83.9 / 80.9
    // / 80.5 / 81.8.
    {"rows64_tokens16", 64, 128, 64, 128, 16, false, 80 << 10, 80 << 10},
    // Lists over 16 tokens cut in two read their weights twice. S1 T=256 292.1, S2 82.2; with runs
    // of 128 bytes 295.2 and 83.1, with 64 rows 292.2 and 84.2.
    {"rows128_tokens32", 128, 128, 128, 128, 32, false, 96 << 10, 96 << 10},
    // And the fused prefill path reads them at less than the full rate: S1 T=320 297, 32 tokens
    // (as they were) 311, prefill 344; T=512 327, 406 and 351. Runs of 256 bytes leave too few
    // stages (128 rows) or read the tokens too often (64: T=384 324 against 312).
    {"rows128_tokens48", 128, 64, 128, 64, 48, false, 96 << 10, 96 << 10},
    // Not taken: a memset node instead of the reset kernel (1.5-2 slower everywhere); building the
    // lists before the reset is waited for, or once with no tokens before the wait, to warm the
    // instruction cache (no difference).
};
constexpr int kNumFusedDecodeConfigs = sizeof(kFusedDecodeConfigs) / sizeof(FusedDecodeConfig);

constexpr int kDirectConfig = 0;

// Pairs that one warp can list (decode_warp_lists.cuh); direct configurations have no other lists.
constexpr int kMaxWarpPairs = 32;

// Elements of weights that a call's local pairs read on average up to which its tiles are direct.
// 38 million: S1 T=1 23.9, else 27.0; S2 T=4 24.6 and 26.2. 44 million: S3 T=1 34.0 and 32.5; 50
// million: 32.9 and 31.3 (Qwen3.5-35B T=2).
constexpr int64_t kMaxDirectWeights = 40'000'000;

// num_pairs: T * top_k. expected_rows: rows an expert gets on average. local_weights: elements of
// weights that the local pairs read on average.
constexpr int fused_decode_config_index(int64_t num_tokens, int64_t num_pairs,
                                        int64_t expected_rows, int64_t local_weights) {
  if (num_pairs <= kMaxWarpPairs && num_tokens <= kFusedDecodeConfigs[kDirectConfig].max_tokens &&
      local_weights <= kMaxDirectWeights) {
    return kDirectConfig;
  }
  if (expected_rows <= 8) return 1;
  return expected_rows <= 16 ? 2 : 3;
}

}  // namespace moelora

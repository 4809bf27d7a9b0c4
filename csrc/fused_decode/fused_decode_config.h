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
  // Of weights that a block asks for at once: enough for the read bandwidth, not more.
  int32_t bytes_in_flight;
};

// Figures: µs a layer on one H200, side by side in one run (benchmarks/results/decode_tuning.txt);
// S1, S2 and S3 as in performance.md. Stages are 16 KB: 32 KB ones were 1-3 % slower in the
// prototype.
constexpr FusedDecodeConfig kFusedDecodeConfigs[] = {
    // One or two tokens of at most 32 pairs: few experts, so small tiles to fill 132 SMs, and
    // direct.
    // S1 T=1: 25.9; 26.8 with 512 columns a down stage, 26.9 with 128 a gate_up stage.
    {"rows32_direct", 32, 256, 16, 256, 2, true, 48 << 10},
    // Few experts, but more tokens than a direct tile is good for.
    // S3 T=4: 88.2, with an adapter 92.0; 128 rows: 93.1, 95.7.
    {"rows64_tokens16", 64, 128, 64, 128, 16, false, 48 << 10},
    // S1 T=4: 75.7, with an adapter 80.7; 64 rows: 77.9, 82.1.
    // S1 T=64: 282.8; 64 rows: 292.6.
    {"rows128_tokens16", 128, 64, 128, 64, 16, false, 80 << 10},
    // Lists over 16 tokens cut in two read their weights twice: S1 T=256 289 against 348
    // (prototype).
    {"rows128_tokens32", 128, 64, 128, 64, 32, false, 64 << 10},
    // Not taken: a memset node instead of the reset kernel (1.5-2 slower everywhere); building the
    // lists before the reset is waited for, or once with no tokens before the wait, to warm the
    // instruction cache (no difference); issuing 2, 3 or 4 stages together (no difference).
};
constexpr int kNumFusedDecodeConfigs = sizeof(kFusedDecodeConfigs) / sizeof(FusedDecodeConfig);

constexpr int kDirectConfig = 0;

// Pairs that one warp can list (decode_warp_lists.cuh); direct configurations have no other lists.
constexpr int kMaxWarpPairs = 32;

// num_pairs: T * top_k. local_pairs: (token, expert) pairs that are local on average.
// expected_rows: rows an expert gets on average.
constexpr int fused_decode_config_index(int64_t num_tokens, int64_t num_pairs, int64_t local_pairs,
                                        int64_t expected_rows) {
  if (num_tokens <= kFusedDecodeConfigs[kDirectConfig].max_tokens && num_pairs <= kMaxWarpPairs) {
    return kDirectConfig;
  }
  if (num_tokens <= 8 && local_pairs < 16) return 1;
  return expected_rows <= 8 ? 2 : 3;
}

}  // namespace moelora

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
// S1, S2 and S3 as in performance.md; none / rank 16. Measured before the lists became 2 µs shorter
// everywhere; comparisons hold. Stages are 16 KB: 32 KB ones were 1-3 % slower in the prototype.
constexpr FusedDecodeConfig kFusedDecodeConfigs[] = {
    // Up to four tokens of at most 32 pairs: few experts, so small tiles to fill 132 SMs, and
    // direct. S1 T=1: 24.1 / 30.8 (22.3 / 24.9 by now); with 32 KB in flight 25.7 / 31.1, with the
    // ring 25.4 / 35.6.
    {"rows32_direct", 32, 256, 16, 256, 4, true, 48 << 10},
    // Few tiles: S3 T=4: - / 88.0, 128 rows - / 95.5; S2 T=16: 52.1 / 55.5, 128 rows 53.1 / 56.8;
    // S1 T=4: 72.3 / 76.3, 128 rows 72.4 / 76.8. With the ring in flight S3 T=4: - / 92.1.
    {"rows64_tokens16", 64, 128, 64, 128, 16, false, 48 << 10},
    // S1 T=16: 183.7 / 191.4, 64 rows 186.5 / 192.9; with 64 KB in flight 185.4 / 191.4, with the
    // ring 185.0 / 192.5. S3 T=64: - / 554.9, with 48 KB in flight - / 563.5.
    {"rows128_tokens16", 128, 64, 128, 64, 16, false, 80 << 10},
    // Lists over 16 tokens cut in two read their weights twice: S1 T=256 289 against 348
    // (prototype).
    {"rows128_tokens32", 128, 64, 128, 64, 32, false, 64 << 10},
    // And the fused prefill path reads them at less than the full rate: S1 T=320 292 / 304, 32
    // tokens 296 / 311, prefill 312 / 344; T=512 314 / 334, 376 / 406 and 318 / 351.
    {"rows128_tokens48", 128, 64, 128, 64, 48, false, 64 << 10},
    // Not taken: a memset node instead of the reset kernel (1.5-2 slower everywhere); building the
    // lists before the reset is waited for, or once with no tokens before the wait, to warm the
    // instruction cache (no difference); issuing 2, 3 or 4 stages together (no difference).
};
constexpr int kNumFusedDecodeConfigs = sizeof(kFusedDecodeConfigs) / sizeof(FusedDecodeConfig);

constexpr int kDirectConfig = 0;

// Pairs that one warp can list (decode_warp_lists.cuh); direct configurations have no other lists.
constexpr int kMaxWarpPairs = 32;

// Tokens that are always direct, and elements of weights up to which three or four are as well. S2
// T=4, 38 million: 21.2 / 25.1, else 22.7 / 25.9; S3 T=4, 176 million: 88.9 / 97.8, else 82.7
// / 84.8.
constexpr int64_t kAlwaysDirectTokens = 2, kMaxDirectWeights = 40'000'000;

// num_pairs: T * top_k. local_pairs: (token, expert) pairs that are local on average.
// expected_rows: rows an expert gets on average.
constexpr int fused_decode_config_index(int64_t num_tokens, int64_t num_pairs, int64_t local_pairs,
                                        int64_t expected_rows, int64_t hidden_size,
                                        int64_t intermediate_size) {
  if (num_pairs <= kMaxWarpPairs && num_tokens <= kFusedDecodeConfigs[kDirectConfig].max_tokens) {
    const int64_t weights = 3 * local_pairs * hidden_size * intermediate_size;
    if (num_tokens <= kAlwaysDirectTokens || weights <= kMaxDirectWeights) return kDirectConfig;
  }
  if (expected_rows > 16) return 4;
  if (expected_rows > 8) return 3;
  // At most about three gate_up tiles of 128 rows an SM: smaller ones balance better.
  return local_pairs * (2 * intermediate_size / 128) <= 384 ? 1 : 2;
}

}  // namespace moelora

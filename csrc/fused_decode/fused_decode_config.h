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
};

// Figures: µs of the prototype on one H200 (shared/prototypes/hopper_decode/FINDINGS.md), S1 and S3
// as in performance.md. Stages are 16 KB: 32 KB ones were 1-3 % slower.
constexpr FusedDecodeConfig kFusedDecodeConfigs[] = {
    // One or two tokens: few experts, so small tiles to fill 132 SMs (S1 T=1: 26.6 against 29.1),
    // and direct (23.5).
    {"rows32_direct", 32, 256, 16, 256, 8, true},
    // S1 T=4: 72.2 against 74.5 with 64 rows.
    {"rows128_direct", 128, 64, 16, 256, 8, true},
    // S1 T=16: 187 against 195 with 64 rows.
    {"rows128_tokens16", 128, 64, 128, 64, 16, false},
    // S1 T=256: 289 against 348 with 16 tokens a tile, which reads weights of long lists twice.
    {"rows128_tokens32", 128, 64, 128, 64, 32, false},
};
constexpr int kNumFusedDecodeConfigs = sizeof(kFusedDecodeConfigs) / sizeof(FusedDecodeConfig);

constexpr int fused_decode_config_index(int64_t num_tokens) {
  if (num_tokens <= 2) return 0;
  if (num_tokens <= 8) return 1;
  return num_tokens <= 16 ? 2 : 3;
}

}  // namespace moelora

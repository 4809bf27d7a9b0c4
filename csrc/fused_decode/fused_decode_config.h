// Tile shapes of the fused decode kernel, and the pure function that picks one from shapes.
#pragma once

#include <cstdint>

namespace moelora {

// A ring stage holds gate_up_rows x stage_columns weights (or down_rows x the columns that make the
// same bytes) and up to max_tokens token rows of as many columns.
struct FusedDecodeConfig {
  const char* name;
  int32_t gate_up_rows;   // rows of w13 a tile: half gate, half up
  int32_t down_rows;      // rows of w2 a tile
  int32_t stage_columns;  // of w13
  int32_t max_tokens;     // tokens a tile; longer lists are cut
};

// Figures: µs of the prototype on one H200 (shared/prototypes/hopper_decode/FINDINGS.md), S1 and S3
// as in performance.md. All stages are 16 KB: 32 KB stages were 1-3 % slower.
constexpr FusedDecodeConfig kFusedDecodeConfigs[] = {
    // One or two tokens: few experts, so small tiles to fill 132 SMs (S1 T=1: 26.6 against 29.1).
    {"rows32_tokens8", 32, 64, 256, 8},
    // S1 T=4: 72.2 against 74.5 with 64 rows.
    {"rows128_tokens8", 128, 128, 64, 8},
    // S1 T=16: 187 against 195 with 64 rows.
    {"rows128_tokens16", 128, 128, 64, 16},
    // S1 T=256: 289 against 348 with 16 tokens a tile, which reads weights of long lists twice.
    {"rows128_tokens32", 128, 128, 64, 32},
};
constexpr int kNumFusedDecodeConfigs = 4;

constexpr int fused_decode_config_index(int64_t num_tokens) {
  if (num_tokens <= 2) return 0;
  if (num_tokens <= 8) return 1;
  return num_tokens <= 16 ? 2 : 3;
}

}  // namespace moelora

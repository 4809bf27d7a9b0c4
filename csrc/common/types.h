// Plain types that every layer shares: no torch, no CUDA runtime, so that kernels, checks and CPU
// code can include them.
#pragma once

#include <cstdint>

namespace moelora {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16 };

inline int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The integer codes of the schemas; moelora/ops.py holds the same numbers by name.
enum class RoutingMethod : int32_t {
  kSoftmax = 0,
  kRenormalize = 1,
  kRenormalizeNaive = 2,
  kDeepseekV3 = 3,
  kLlama4 = 4,
  kTopk = 5,
  kSigmoid = 6,
};
enum class ActivationKind : int32_t { kSilu = 0, kGeluTanh = 1, kSwigluOai = 2 };
enum class GateUpLayout : int32_t { kGateUp = 0, kUpGate = 1, kInterleaved = 2 };
enum class LoraPart : int32_t { kGateUp = 0, kDown = 1 };

constexpr int kMaxTopK = 32;
constexpr int kMaxExperts = 1024;
constexpr int kMaxRank = 256;

}  // namespace moelora

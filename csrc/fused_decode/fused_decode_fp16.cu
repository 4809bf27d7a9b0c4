#include "fused_decode_launch.cuh"

namespace moelora::fused_decode {
template struct Launcher<__half>;
}  // namespace moelora::fused_decode

#include "fused_decode_launch.cuh"

namespace moelora::fused_decode {
template struct Launcher<__nv_bfloat16>;
}  // namespace moelora::fused_decode

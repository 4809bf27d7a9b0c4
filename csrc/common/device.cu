#include <atomic>

#include "device.h"
#include "launch.h"

namespace moelora {
namespace {

constexpr int kMaxDevices = 64;
std::atomic<bool> g_supported[kMaxDevices];

}  // namespace

// MOELORA_ARCHS is the build's arch list, "9.0a;10.0a;10.3a". Code for an 'a' arch runs on that
// very chip only.
void require_supported_device(int device_index) {
  const bool cacheable = device_index >= 0 && device_index < kMaxDevices;
  if (cacheable && g_supported[device_index].load(std::memory_order_relaxed)) return;
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index),
             "device query");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index),
             "device query");
  const std::string arch = std::to_string(major) + "." + std::to_string(minor) + "a";
  const std::string built = ";" MOELORA_ARCHS ";";
  check_value(built.find(";" + arch + ";") != std::string::npos, "this GPU has compute capability ",
              major, ".", minor, ", and this moelora build holds kernels for ", MOELORA_ARCHS,
              " only");
  if (cacheable) g_supported[device_index].store(true, std::memory_order_relaxed);
}

}  // namespace moelora

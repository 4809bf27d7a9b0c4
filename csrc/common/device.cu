#include <atomic>

#include "device.h"
#include "launch.h"

namespace moelora {
namespace {

constexpr int kMaxDevices = 64;
// Compute capability * 10 of the devices found to be supported, 0: not looked at yet.
std::atomic<int> g_supported[kMaxDevices];

int compute_capability(int device_index) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index),
             "device query");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index),
             "device query");
  return 10 * major + minor;
}

}  // namespace

// MOELORA_ARCHS is the build's arch list, "9.0a;10.0a;10.3a". Code for an 'a' arch runs on that
// very chip only.
void require_supported_device(int device_index) {
  const bool cacheable = device_index >= 0 && device_index < kMaxDevices;
  if (cacheable && g_supported[device_index].load(std::memory_order_relaxed) != 0) return;
  const int capability = compute_capability(device_index);
  const std::string arch =
      std::to_string(capability / 10) + "." + std::to_string(capability % 10) + "a";
  const std::string built = ";" MOELORA_ARCHS ";";
  check_value(built.find(";" + arch + ";") != std::string::npos, "this GPU has compute capability ",
              capability / 10, ".", capability % 10, ", and this moelora build holds kernels for ",
              MOELORA_ARCHS, " only");
  if (cacheable) g_supported[device_index].store(capability, std::memory_order_relaxed);
}

bool is_sm90(int device_index) {
  const bool cacheable = device_index >= 0 && device_index < kMaxDevices;
  const int known = cacheable ? g_supported[device_index].load(std::memory_order_relaxed) : 0;
  return (known != 0 ? known : compute_capability(device_index)) == 90;
}

}  // namespace moelora

#pragma once

namespace moelora {

// Throws where this build holds no machine code for the GPU, naming the GPU's arch and the ones
// built in. Cheap after the first call for a device.
void require_supported_device(int device_index);

// Whether the GPU is of compute capability 9.0 (Hopper), for kernels that exist for it alone.
bool is_sm90(int device_index);

}  // namespace moelora

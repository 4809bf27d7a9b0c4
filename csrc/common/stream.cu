#include "launch.h"
#include "stream.h"

namespace moelora {

void record_event(void* event, void* stream) {
  check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)),
             "event record");
}

void wait_event(void* stream, void* event) {
  check_cuda(
      cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0),
      "stream wait");
}

}  // namespace moelora

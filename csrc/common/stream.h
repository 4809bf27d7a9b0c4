// Stream order by raw handles (cudaStream_t, cudaEvent_t); the objects are made and owned by
// Python.
#pragma once

namespace moelora {

void record_event(void* event, void* stream);
void wait_event(void* stream, void* event);

}  // namespace moelora

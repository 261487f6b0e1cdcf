#include "backend.h"
#include "device_guard.cuh"
#include "ragged_gather.cuh"

namespace megatron_replay::cuda {

void ragged_gather(const RaggedRows& rows, const Queue& queue) {
    if (rows.rows == 0) return;
    DeviceGuard guard(queue.device);
    launch_ragged_gather(rows, queue.stream<cudaStream_t>());
}

void ragged_scatter(const RaggedRows& rows, const Queue& queue) {
    if (rows.rows == 0) return;
    DeviceGuard guard(queue.device);
    launch_ragged_scatter(rows, queue.stream<cudaStream_t>());
}

}  // namespace megatron_replay::cuda

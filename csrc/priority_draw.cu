#include "backend.h"
#include "device_guard.cuh"
#include "priority_draw.cuh"

namespace megatron_replay::cuda {

const char* architectures() { return MR_CUDA_ARCHS; }

int device_count() {
    int count = 0;
    MR_CUDA(cudaGetDeviceCount(&count));
    return count;
}

void priority_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, void* workspace, const Queue& queue) {
    DeviceGuard guard(queue.device);
    launch_priority_draw(window, key, n, slot, key_out, drawn, workspace, queue.stream<cudaStream_t>());
}

void repeated_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, const Queue& queue) {
    DeviceGuard guard(queue.device);
    launch_repeated_draw(window, key, n, slot, key_out, drawn, queue.stream<cudaStream_t>());
}

void log_weights(Priority priority, const float* advantage, const float* group_std, int64_t count,
                 double alpha, double eps, double* out, const Queue& queue) {
    if (count == 0) return;
    DeviceGuard guard(queue.device);
    MR_LAUNCH(megatron_replay::log_weights, blocks_for(count, kDrawThreads), kDrawThreads,
              queue.stream<cudaStream_t>(), priority, advantage, group_std, count, alpha, eps, out);
}

}  // namespace megatron_replay::cuda

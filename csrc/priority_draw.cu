#include "priority_draw.cuh"

#include <algorithm>

#include "backend.h"
#include "check.h"

namespace megatron_replay::cuda {
namespace {

// Makes a device current for the length of a scope.
class DeviceGuard {
   public:
    explicit DeviceGuard(int device) {
        MR_CUDA(cudaGetDevice(&before_));
        if (before_ != device) MR_CUDA(cudaSetDevice(device));
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

   private:
    int before_ = 0;
};

}  // namespace

const char* architectures() { return MR_CUDA_ARCHS; }

int device_count() {
    int count = 0;
    MR_CUDA(cudaGetDeviceCount(&count));
    return count;
}

void priority_keys(const double* weight, const int64_t* uid, double* out, int64_t count, DrawKey key,
                   uintptr_t stream, int device) {
    if (count == 0) return;
    constexpr int kThreads = 256;
    constexpr int64_t kMaxBlocks = 4096;
    const auto blocks = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
    DeviceGuard guard(device);
    megatron_replay::priority_keys<<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        weight, uid, out, count, key);
    MR_CUDA(cudaGetLastError());
}

}  // namespace megatron_replay::cuda

// Makes a device current for the length of a scope.
#pragma once
#include "check.h"

namespace megatron_replay::cuda {

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

}  // namespace megatron_replay::cuda

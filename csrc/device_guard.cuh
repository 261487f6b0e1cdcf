// Makes a device current for the length of a scope.
#pragma once
#include "check.h"

namespace megatron_replay::cuda {

class DeviceGuard {
   public:
    explicit DeviceGuard(int device) {
        MR_CUDA(cudaGetDevice(&before_));
        changed_ = before_ != device;
        if (changed_) MR_CUDA(cudaSetDevice(device));
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

   private:
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace megatron_replay::cuda

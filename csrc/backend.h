// The boundary between bindings.cpp (g++) and the CUDA object (nvcc), which may be absent.
#pragma once
#include <cstdint>

#include "priority_draw.cuh"

namespace megatron_replay::cuda {

// Architectures the object was compiled for, "" where there is none.
const char* architectures();
// These throw CudaError; without the CUDA object they say that it is missing.
int device_count();
void priority_keys(const double* weight, const int64_t* uid, double* out, int64_t count, DrawKey key,
                   uintptr_t stream, int device);

}  // namespace megatron_replay::cuda

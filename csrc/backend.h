// The boundary between bindings.cpp and the two backends: threads of the CPU, and the CUDA objects (nvcc),
// which may be absent. Addresses are of memory that the caller has checked; nothing here keeps any of it.
#pragma once
#include <cstdint>

#include "priority_key.h"
#include "ragged_copy.h"

namespace megatron_replay {

namespace cpu {

void priority_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, int threads);
void repeated_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, int threads);
void log_weights(Priority priority, const float* advantage, const float* group_std, int64_t count,
                 double alpha, double eps, double* out);
void ragged_gather(const RaggedRows& rows, int threads);
void ragged_scatter(const RaggedRows& rows, int threads);
void take_records(const Records& records, const int64_t* slot, int64_t count, int64_t* taken, int64_t* start,
                  int32_t* cu);

}  // namespace cpu

// Functions of this part throw CudaError; without the CUDA objects they say that those are missing.
namespace cuda {

// Where work goes: a device, and a stream of it.
struct Queue {
    int device;
    uintptr_t handle;

    template <class Stream>
    Stream stream() const {
        return reinterpret_cast<Stream>(handle);
    }
};

// Architectures the objects were compiled for, "" where there are none.
const char* architectures();
int device_count();
void priority_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, void* workspace, const Queue& queue);
void repeated_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, const Queue& queue);
void log_weights(Priority priority, const float* advantage, const float* group_std, int64_t count,
                 double alpha, double eps, double* out, const Queue& queue);
void ragged_gather(const RaggedRows& rows, const Queue& queue);
void ragged_scatter(const RaggedRows& rows, const Queue& queue);

}  // namespace cuda
}  // namespace megatron_replay

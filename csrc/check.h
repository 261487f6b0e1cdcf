// Host-side checks. A failed one throws with the condition and the values; bindings turn it into Python.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace megatron_replay {

// Raised as megatron_replay._C.CudaError.
struct CudaError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class... Values>
std::string joined(const Values&... values) {
    std::ostringstream out;
    (out << ... << values);
    return out.str();
}

}  // namespace megatron_replay

// MR_CHECK(n >= 0, "count must be at least 0, got ", n): std::invalid_argument, a ValueError in Python.
#define MR_CHECK(condition, ...)                                                                      \
    do {                                                                                              \
        if (!(condition))                                                                             \
            throw std::invalid_argument(megatron_replay::joined(__VA_ARGS__, " (", #condition, ")")); \
    } while (0)

#ifdef __CUDACC__
#include <cuda_runtime.h>

namespace megatron_replay {

// What to look for, where the runtime's own words mislead: it calls a missing driver an insufficient one.
inline const char* hint(cudaError_t status) {
    if (status == cudaErrorInsufficientDriver) return " (no NVIDIA driver is loaded, or it is too old)";
    return status == cudaErrorNoDevice ? " (a driver is loaded, and it shows no GPU)" : "";
}

}  // namespace megatron_replay

#define MR_CUDA(call)                                                                                        \
    do {                                                                                                     \
        const cudaError_t status = (call);                                                                   \
        if (status != cudaSuccess)                                                                           \
            throw megatron_replay::CudaError(megatron_replay::joined(cudaGetErrorName(status), ": ",         \
                                                                     cudaGetErrorString(status), " in ",     \
                                                                     #call, megatron_replay::hint(status))); \
    } while (0)
#endif

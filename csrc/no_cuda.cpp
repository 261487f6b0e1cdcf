// Takes the place of the CUDA object in a build without nvcc.
#include "backend.h"
#include "check.h"

namespace megatron_replay::cuda {
namespace {

[[noreturn]] void missing() {
    throw CudaError("megatron_replay._C was built without CUDA; install nvcc and build it again");
}

}  // namespace

const char* architectures() { return ""; }
int device_count() { missing(); }
void priority_keys(const double*, const int64_t*, double*, int64_t, DrawKey, uintptr_t, int) { missing(); }

}  // namespace megatron_replay::cuda

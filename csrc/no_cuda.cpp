// Takes the place of the CUDA objects in a build without nvcc.
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
void priority_draw(const DrawWindow&, const DrawKey&, int64_t, int64_t*, double*, int64_t*, void*,
                   const Queue&) {
    missing();
}
void repeated_draw(const DrawWindow&, const DrawKey&, int64_t, int64_t*, double*, int64_t*, const Queue&) {
    missing();
}
void log_weights(Priority, const float*, const float*, int64_t, double, double, double*, const Queue&) {
    missing();
}
void ragged_gather(const RaggedRows&, const Queue&) { missing(); }
void ragged_scatter(const RaggedRows&, const Queue&) { missing(); }

}  // namespace megatron_replay::cuda

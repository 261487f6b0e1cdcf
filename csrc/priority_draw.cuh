// Keys of the priority draw: log w + Gumbel(philox(seed, stream; uid, step, repeat)).
// One expression for host and device; the definition is megatron_replay/ops/priority_draw_reference.py.
#pragma once
#include <cmath>
#include <cstdint>

#include "philox.h"

namespace megatron_replay {

// What a draw is keyed by, beside the rollout.
struct DrawKey {
    uint64_t seed;
    uint32_t stream, step, repeat;
};

// -inf for a weight that is 0, negative, NaN or infinite: such a rollout is never drawn.
MR_HOST_DEVICE double priority_key(double weight, int64_t uid, DrawKey key) {
    if (!(weight > 0.0) || weight > 1.7976931348623157e308) return -INFINITY;
    const double u = uniform(key.seed, key.stream, uid, key.step, key.repeat);
    return log(weight) - log(-log(u));
}

#ifdef __CUDACC__
__global__ void priority_keys(const double* __restrict__ weight, const int64_t* __restrict__ uid,
                              double* __restrict__ out, int64_t count, DrawKey key) {
    const int64_t stride = int64_t{gridDim.x} * blockDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride)
        out[i] = priority_key(weight[i], uid[i], key);
}
#endif

}  // namespace megatron_replay

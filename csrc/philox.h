// Philox4x32-10 (Salmon et al., SC 2011), one definition for host and device.
// Bit for bit the generator of megatron_replay/ops/philox.py.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define MR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MR_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace megatron_replay {

struct Words4 {
    uint32_t x, y, z, w;
};

MR_HOST_DEVICE Words4 philox4x32(Words4 counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * counter.x;
        const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter.z;
        counter = {uint32_t(p1 >> 32) ^ counter.y ^ key0, uint32_t(p1), uint32_t(p0 >> 32) ^ counter.w ^ key1,
                   uint32_t(p0)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// Four words keyed by (seed, stream) and counted by (a, b, c).
MR_HOST_DEVICE Words4 random_words(uint64_t seed, uint32_t stream, int64_t a, uint32_t b, uint32_t c) {
    const uint64_t bits = static_cast<uint64_t>(a);
    return philox4x32({uint32_t(bits), uint32_t(bits >> 32), b, c}, uint32_t(seed),
                      uint32_t(seed >> 32) ^ stream);
}

// A number in (0, 1) with the first 53 bits of the words.
MR_HOST_DEVICE double uniform(Words4 words) {
    const double k = double(words.x) * 0x1p21 + double(words.y >> 11);  // exact
    const double u = (k + 0.5) * 0x1p-53;
    return u < 1.0 ? u : 1.0 - 0x1p-53;  // the largest k alone rounds to 1
}

}  // namespace megatron_replay

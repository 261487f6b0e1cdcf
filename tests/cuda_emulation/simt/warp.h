// Barriers and warp intrinsics. The line of a call is part of it: the threads that meet must have come to the
// same one.
#pragma once
#include <cstdint>
#include <cstring>

#include "block.h"

namespace simt {

template <class T>
uint64_t bits_of(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a lane shows at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T>
T value_from(unsigned lane) {
    const uint64_t bits = value_of(lane);
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace simt

inline void __syncthreads(int line = __builtin_LINE()) { simt::wait_for_block("__syncthreads", line); }

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, int line = __builtin_LINE()) {
    simt::wait_for_lanes("__syncwarp", line, mask, 0);
}

// The warp is cut into parts of `width` lanes; a lane beyond the own part gives the own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    simt::wait_for_lanes("__shfl_sync", line, mask, simt::bits_of(value));
    const unsigned part = simt::lane() & ~unsigned(width - 1);
    return simt::value_from<T>(part + (unsigned(source) & unsigned(width - 1)));
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    simt::wait_for_lanes("__shfl_up_sync", line, mask, simt::bits_of(value));
    const unsigned lane = simt::lane(), place = lane & unsigned(width - 1);
    return place < delta ? value : simt::value_from<T>(lane - delta);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    simt::wait_for_lanes("__shfl_down_sync", line, mask, simt::bits_of(value));
    const unsigned lane = simt::lane(), place = lane & unsigned(width - 1);
    return place + delta >= unsigned(width) ? value : simt::value_from<T>(lane + delta);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
    simt::wait_for_lanes("__shfl_xor_sync", line, mask, simt::bits_of(value));
    const unsigned lane = simt::lane(), source = lane ^ unsigned(bits), part = lane & ~unsigned(width - 1);
    return source >= part + unsigned(width) ? value : simt::value_from<T>(source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    simt::wait_for_lanes("__ballot_sync", line, mask, predicate != 0);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if ((mask >> lane & 1) && simt::value_of(lane) != 0) ballot |= 1u << lane;
    return ballot;
}

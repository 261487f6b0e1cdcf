// Lanes that meet, or fail to.
#pragma once
#include "array.h"

__global__ void warp_values(int* out) {
    const unsigned all = 0xFFFFFFFFu;
    const int lane = threadIdx.x & 31;
    int sum = lane;
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(all, sum, d);
    int scan = lane;
    for (unsigned d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(all, scan, d);
        if (lane >= int(d)) scan += other;
    }
    const int next = __shfl_down_sync(all, lane, 1), part = __shfl_sync(all, lane, 9, 8);
    const unsigned odd = __ballot_sync(all, lane & 1);
    const bool right = sum == 496 && scan == lane * (lane + 1) / 2 && next == (lane == 31 ? 31 : lane + 1) &&
                       part == (lane & ~7) + 1 && odd == 0xAAAAAAAAu;
    out[threadIdx.x] = right;
}

// Halves of a warp that go their own ways.
__global__ void half_warps(int* out) {
    const int lane = threadIdx.x & 31;
    int value = lane;
    if (lane < 16)
        for (int d = 8; d > 0; d >>= 1) value += __shfl_xor_sync(0x0000FFFFu, value, d);
    else
        for (int d = 8; d > 0; d >>= 1) value += __shfl_xor_sync(0xFFFF0000u, value, d);
    out[threadIdx.x] = value == (lane < 16 ? 120 : 376);
}

template <bool kBarrier>
__global__ void neighbours(int* out) {
    __shared__ int row[kThreads];
    row[threadIdx.x] = int(threadIdx.x);
    if (kBarrier) __syncwarp();
    out[threadIdx.x] = row[threadIdx.x ^ 1u] == int(threadIdx.x ^ 1u);
}

__global__ void lanes_that_do_not_come(int* out) {
    int value = 1;
    if (threadIdx.x < 16) value = __shfl_down_sync(0xFFFFFFFFu, value, 8);
    __syncthreads();
    out[threadIdx.x] = value;
}

__global__ void lanes_that_have_exited(int* out) {
    if (threadIdx.x == 7) return;
    __syncwarp();
    out[threadIdx.x] = 1;
}

__global__ void lane_outside_its_mask(int* out) {
    __syncwarp(0x0000FFFFu);
    out[threadIdx.x] = 1;
}

__global__ void read_outside_the_mask(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0x0000FFFFu, 1, 16);
}

__global__ void lanes_that_are_not_there(int* out) { out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1, 1); }

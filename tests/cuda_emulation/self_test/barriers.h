// Threads of a block that meet, or fail to.
#pragma once
#include "array.h"

template <bool kBarrier>
__global__ void reverse(const int* in, int* out) {
    __shared__ int row[kThreads];
    row[threadIdx.x] = in[threadIdx.x];
    if (kBarrier) __syncthreads();
    out[threadIdx.x] = row[kThreads - 1 - threadIdx.x];
}

template <bool kBarrier>
void run_reverse() {
    Array<int> in(kThreads), out(kThreads, -1);
    for (int i = 0; i < kThreads; ++i) in[i] = i;
    MR_LAUNCH(reverse<kBarrier>, 1, kThreads, nullptr, in, out);
    out.expect("out", [](long long i) { return kThreads - 1 - i; });
}

// A second round that overwrites what the first may still read.
template <bool kBarrier>
__global__ void rotate(int* row, int rounds) {
    __shared__ int next[kThreads];
    int own = row[threadIdx.x];
    for (int round = 0; round < rounds; ++round) {
        next[(threadIdx.x + 1) % kThreads] = own;
        __syncthreads();
        own = next[threadIdx.x];
        if (kBarrier) __syncthreads();
    }
    row[threadIdx.x] = own;
}

template <bool kBarrier>
void run_rotate() {
    Array<int> row(kThreads);
    for (int i = 0; i < kThreads; ++i) row[i] = i;
    MR_LAUNCH(rotate<kBarrier>, 1, kThreads, nullptr, row, 3);
    row.expect("row", [](long long i) { return (i + kThreads - 3) % kThreads; });
}

__global__ void half_a_barrier(int* out) {
    if (threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void barrier_behind_exit(int* out, unsigned count) {
    if (threadIdx.x >= count) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void barriers_of_two_branches(int* out) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

void run_barrier_behind_exit() {
    Array<int> out(kThreads);
    MR_LAUNCH(barrier_behind_exit, 1, kThreads, nullptr, out, 40u);
    out.expect("out", [](long long i) { return i < 40; });
}

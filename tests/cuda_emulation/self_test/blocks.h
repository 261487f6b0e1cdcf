// Blocks, threads and launches beside each other, which race or do not.
#pragma once
#include "array.h"

__global__ void plain_increment(int* count) { *count = *count + 1; }

__global__ void atomic_increment(int* count) { atomicAdd(count, 1); }

template <void (*kIncrement)(int*)>
void run_increment() {
    Array<int> count(1);
    MR_LAUNCH(kIncrement, 2, kThreads, nullptr, count);
    count.expect("count", [](long long) { return 2 * kThreads; });
}

// Blocks that meet in one place of global memory, with barriers of their own, or keep apart.
template <bool kApart>
__global__ void blocks(int* out) {
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, 1);
    __syncthreads();
    if (threadIdx.x == 0) out[kApart ? blockIdx.x : 0] = sum;
    __syncthreads();
}

template <bool kApart>
void run_blocks() {
    Array<int> out(4, -1);
    MR_LAUNCH(blocks<kApart>, 4, kThreads, nullptr, out);
    out.expect("out", [](long long i) { return kApart || i == 0 ? kThreads : -1; });
}

__global__ void shift(const int* in, int* out, int count) {
    const int i = blockIdx.x * kThreads + threadIdx.x;
    out[i] = in[(i + 1) % count] + 1;
}

// Each launch reads what other blocks of the one before have written.
void run_launches() {
    constexpr int kBlocks = 3, kCount = kBlocks * kThreads;
    Array<int> a(kCount), b(kCount, -1);
    for (int launch = 0; launch < 6; ++launch) {
        int* const in = launch % 2 ? b : a;
        int* const out = launch % 2 ? a : b;
        MR_LAUNCH(shift, kBlocks, kThreads, nullptr, in, out, kCount);
    }
    a.expect("a", [](long long) { return 6; });
}

__global__ void indices(unsigned* out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 100 + thread;
}

void run_indices() {
    Array<unsigned> out(12 * 60);
    MR_LAUNCH(indices, dim3(2, 3, 2), dim3(3, 4, 5), nullptr, out);
    out.expect("out", [](long long i) { return i / 60 * 100 + i % 60; });
}

__global__ void atomics(int* most, unsigned* least, unsigned long long* sum, float* part, unsigned* bits,
                        int* owner) {
    atomicMax(most, int(threadIdx.x));
    atomicMin(least, threadIdx.x);
    atomicAdd(sum, 1ull << 40);
    atomicAdd(part, 0.5f);
    atomicOr(bits, 1u << threadIdx.x % 32);
    if (atomicCAS(owner, -1, int(threadIdx.x)) == -1) atomicExch(owner, 1000);
}

void run_atomics() {
    Array<int> most(1), owner(1, -1);
    Array<unsigned> least(1, 99), bits(1);
    Array<unsigned long long> sum(1);
    Array<float> part(1);
    MR_LAUNCH(atomics, 1, kThreads, nullptr, most, least, sum, part, bits, owner);
    most.expect("most", [](long long) { return kThreads - 1; });
    least.expect("least", [](long long) { return 0; });
    sum.expect("sum", [](long long) { return (1ull << 40) * kThreads; });
    part.expect("part", [](long long) { return kThreads / 2; });
    bits.expect("bits", [](long long) { return 0xFFFFFFFFu; });
    owner.expect("owner", [](long long) { return 1000; });
}

// Right where blocks run one after another.
__global__ void blocks_in_order(int* ticket, int* out) {
    if (threadIdx.x == 0) out[blockIdx.x] = atomicAdd(ticket, 1);
}

void run_blocks_in_order() {
    Array<int> ticket(1), out(9);
    MR_LAUNCH(blocks_in_order, 9, kThreads, nullptr, ticket, out);
    out.expect("out", [](long long i) { return i; });
}

void run_empty_grid() {
    Array<int> out(1);
    MR_LAUNCH(atomic_increment, 0, kThreads, nullptr, out);
}

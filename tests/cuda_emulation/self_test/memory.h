// Memory that is not there, not aligned or not yet written.
#pragma once
#include "array.h"

__global__ void uninitialised_shared(float* out) {
    __shared__ float row[kThreads];
    if (threadIdx.x < 32) row[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x];
}

template <int kCount>
__global__ void uninitialised_shared_of_a_template(float* out) {
    __shared__ float row[kCount];
    if (threadIdx.x < 32) row[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = row[threadIdx.x];
}

// Out of line, so that the size of the row is not known here.
__device__ __attribute__((noinline)) void store(int* row, unsigned at) { row[at] = 1; }

__global__ void beyond_shared(int* out) {
    __shared__ int row[kThreads - 1];
    store(row, threadIdx.x);
    out[threadIdx.x] = 1;
}

template <int kCount>
__global__ void beyond_shared_of_a_template(int* out) {
    __shared__ int row[kCount];
    row[threadIdx.x] = 1;
    out[threadIdx.x] = row[threadIdx.x];
}

__global__ void beyond_global(int* out) { out[threadIdx.x + 1] = 1; }

__global__ void before_global(int* out) { out[int(threadIdx.x) - 1] = 1; }

__global__ void set_vector(int* out, int first) { *reinterpret_cast<int4*>(out + first) = {1, 1, 1, 1}; }

template <int kFirst>
void run_set_vector() {
    Array<int> out(8);
    MR_LAUNCH(set_vector, 1, 1, nullptr, out, kFirst);
    out.expect("out", [](long long i) { return i >= kFirst && i < kFirst + 4; });
}

__global__ void signed_overflow(int* out) { out[threadIdx.x] = 0x7FFFFFFF + out[threadIdx.x]; }

// Right where shared memory begins as zeros.
template <void (*kKernel)(float*)>
void run_uninitialised() {
    Array<float> out(kThreads);
    MR_LAUNCH(kKernel, 1, kThreads, nullptr, out);
    out.expect("out", [](long long i) { return i < 32; });
}

void run_overflow() {
    Array<int> out(kThreads, 1);
    MR_LAUNCH(signed_overflow, 1, kThreads, nullptr, out);
    out.expect("out", [](long long) { return -0x7FFFFFFF - 1; });
}

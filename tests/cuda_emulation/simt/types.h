// CUDA's built-in types, with its alignments.
#pragma once

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) int2 {
    int x, y;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) int4 {
    int x, y, z, w;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(16) longlong2 {
    long long x, y;
};

using cudaStream_t = void*;

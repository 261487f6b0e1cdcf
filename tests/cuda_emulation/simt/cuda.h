// The CUDA of the kernels in csrc/, for g++. To be included before them.
// Left out: dynamic shared memory, cooperative groups, fences, and streams other than one in order.
#pragma once
#include "atomic.h"
#include "launch.h"
#include "shared_memory.h"
#include "warp.h"

#define MR_SIMT

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#define threadIdx (simt::thread_index())
#define blockIdx (simt::block_index())
#define blockDim (simt::block_size())
#define gridDim (simt::grid_size())

// A statement; the stream is the one there is.
#define MR_LAUNCH(kernel, grid, block, stream, ...)                              \
    do {                                                                         \
        static_cast<void>(stream);                                               \
        simt::launch(#kernel, (kernel), dim3(grid), dim3(block), ##__VA_ARGS__); \
    } while (0)

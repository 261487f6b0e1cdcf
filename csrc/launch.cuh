// How a kernel is launched: by nvcc's syntax with a check, or by the emulator of tests/cuda_emulation.
#pragma once
#ifdef MR_SIMT
// the emulator has defined MR_LAUNCH and cudaStream_t
#else
#include "check.h"
#define MR_LAUNCH(kernel, grid, block, stream, ...)            \
    do {                                                       \
        kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__); \
        MR_CUDA(cudaGetLastError());                           \
    } while (0)
#endif

#include <cstdint>

namespace megatron_replay {

// Blocks for `count` items at `each` a block: at least one, and few enough that a loop over the grid is used.
inline unsigned blocks_for(int64_t count, int64_t each) {
    constexpr int64_t kMost = 2048;
    const int64_t blocks = (count + each - 1) / each;
    return unsigned(blocks < 1 ? 1 : blocks < kMost ? blocks : kMost);
}

}  // namespace megatron_replay

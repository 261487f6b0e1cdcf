// The block that runs: what its threads ask about it, and how it is run.
#pragma once
#include <cstddef>
#include <cstdint>

#include "random.h"
#include "types.h"

namespace simt {

struct Launch {
    const char* kernel;
    dim3 grid, block;
    void (*body)(void*);
    void* arguments;
};

// For the running thread.
uint3 thread_index();
uint3 block_index();
dim3 block_size();
dim3 grid_size();
unsigned lane();
void wait_for_block(const char* call, int line);
// Waits for the lanes of the mask and shows `value` to them.
void wait_for_lanes(const char* call, int line, unsigned mask, uint64_t value);
// What a lane of the thread's last mask has shown.
uint64_t value_of(unsigned lane);

// Runs a block to its end. `before` is how many threads of the launch have run; the block's own release
// `ended` last.
void run_block(const Launch& launch, uint3 index, size_t before, Random& random, char& ended);
// "kernel k, block (x, y, z): " while one runs, else "".
const char* where();

}  // namespace simt

// A launch: the blocks of a grid, one after another in an order drawn by the seed.
#pragma once
#include <cstdint>

#include "block.h"

namespace simt {

// Decides the order of blocks and threads from here on, and the bytes that shared memory begins with.
void set_seed(uint64_t seed);

void run_grid(const Launch& launch);

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            const Arguments&... arguments) {
    // each thread copies the parameters
    auto call = [&] { kernel(arguments...); };
    run_grid({name, grid, block, [](void* p) { (*static_cast<decltype(call)*>(p))(); }, &call});
}

}  // namespace simt

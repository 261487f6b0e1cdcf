#include "launch.h"

#include <pthread.h>

#include <numeric>
#include <utility>
#include <vector>

#include "block.h"
#include "happens_before.h"
#include "random.h"
#include "report.h"
#include "shared_memory.h"

namespace simt {
namespace {

constexpr unsigned kMostThreads = 1024;

Random order(0);

// Has shared memory of its own. The stack is small: sanitizers look at all of it.
template <class Body>
void run_on_new_thread(Body body) {
    pthread_attr_t attributes;
    pthread_t thread;
    const auto call = [](void* p) -> void* {
        (*static_cast<Body*>(p))();
        return nullptr;
    };
    if (pthread_attr_init(&attributes) != 0 || pthread_attr_setstacksize(&attributes, 256 * 1024) != 0 ||
        pthread_create(&thread, &attributes, call, &body) != 0)
        fail("no host thread for a block");
    pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
}

}  // namespace

void set_seed(uint64_t seed) { order = Random(seed); }

void run_grid(const Launch& launch) {
    const size_t blocks = size_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    const size_t threads = size_t{launch.block.x} * launch.block.y * launch.block.z;
    if (blocks == 0 || threads == 0 || threads > kMostThreads)
        fail("kernel %s: a grid of %zu blocks of %zu threads cannot be launched", launch.kernel, blocks,
             threads);
    std::vector<size_t> turns(blocks);
    std::iota(turns.begin(), turns.end(), 0);
    for (size_t i = blocks; i > 1; --i) std::swap(turns[i - 1], turns[order.below(i)]);
    static char ended;
    for (size_t i = 0; i < blocks; ++i) {
        const unsigned turn = unsigned(turns[i]);
        const uint3 index{turn % launch.grid.x, turn / launch.grid.x % launch.grid.y,
                          turn / launch.grid.x / launch.grid.y};
        run_on_new_thread([&] {
            // NaN, a large number or -1, whatever the type
            constexpr unsigned char kPoison[] = {0xFF, 0xA5, 0x7B};
            poison_shared_memory(kPoison[order.below(3)]);
            run_block(launch, index, i * threads, order, ended);
        });
    }
    acquire(ended);
}

}  // namespace simt

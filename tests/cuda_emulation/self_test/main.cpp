// Small kernels with one fault each, and right ones that come close to a fault. Does the emulator tell them
// apart?
//     self_test NAME SEED
// runs those whose names begin so, and says "ok: how many", "wrong: ...", or what the emulator or a sanitizer
// says.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "barriers.h"
#include "blocks.h"
#include "memory.h"
#include "warps.h"

namespace {

struct Entry {
    const char* name;
    void (*run)();
};

constexpr Entry kEntries[] = {
    {"right/barrier", run_reverse<true>},
    {"right/two_barriers", run_rotate<true>},
    {"right/warp_values", run_ones<warp_values>},
    {"right/half_warps", run_ones<half_warps>},
    {"right/syncwarp", run_ones<neighbours<true>>},
    {"right/aligned", run_set_vector<4>},
    {"right/atomic_increment", run_increment<atomic_increment>},
    {"right/atomics", run_atomics},
    {"right/blocks_apart", run_blocks<true>},
    {"right/launches", run_launches},
    {"right/indices", run_indices},
    {"missing_barrier", run_reverse<false>},
    {"missing_second_barrier", run_rotate<false>},
    {"missing_syncwarp", run_ones<neighbours<false>>},
    {"half_a_barrier", run_ones<half_a_barrier>},
    {"barrier_behind_exit", run_barrier_behind_exit},
    {"barriers_of_two_branches", run_ones<barriers_of_two_branches>},
    {"lanes_that_do_not_come", run_ones<lanes_that_do_not_come>},
    {"lanes_that_have_exited", run_ones<lanes_that_have_exited>},
    {"lane_outside_its_mask", run_ones<lane_outside_its_mask>},
    {"read_outside_the_mask", run_ones<read_outside_the_mask, 32>},
    {"lanes_that_are_not_there", run_ones<lanes_that_are_not_there, 20>},
    {"uninitialised_shared/plain", run_uninitialised<uninitialised_shared>},
    {"uninitialised_shared/template", run_uninitialised<uninitialised_shared_of_a_template<kThreads>>},
    {"beyond_shared/plain", run_ones<beyond_shared>},
    {"beyond_shared/template", run_ones<beyond_shared_of_a_template<kThreads - 1>>},
    {"beyond_global", run_ones<beyond_global>},
    {"before_global", run_ones<before_global>},
    {"misaligned", run_set_vector<1>},
    {"signed_overflow", run_overflow},
    {"plain_increment", run_increment<plain_increment>},
    {"blocks_that_meet", run_blocks<false>},
    {"blocks_in_order", run_blocks_in_order},
    {"empty_grid", run_empty_grid},
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: self_test NAME SEED\n");
        return 64;
    }
    simt::set_seed(strtoull(argv[2], nullptr, 10));
    int runs = 0;
    for (const Entry& entry : kEntries) {
        if (strncmp(entry.name, argv[1], strlen(argv[1])) != 0) continue;
        entry.run();
        ++runs;
    }
    printf("ok: %d\n", runs);
    return 0;
}

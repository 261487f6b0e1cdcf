#include "block.h"

#include <cstdio>
#include <memory>
#include <vector>

#include "report.h"
#include "scheduler.h"

namespace simt {
namespace {

struct Block {
    const Launch* launch = nullptr;
    uint3 index{};
    std::vector<Thread> threads;
    Thread* running = nullptr;
    char* begun = nullptr;  // keys of its threads' first and last moment
    char* ended = nullptr;
};
Block current;

Fiber& fiber(size_t i) {
    static std::vector<std::unique_ptr<Fiber>> fibers;
    while (fibers.size() <= i) fibers.push_back(std::make_unique<Fiber>());
    return *fibers[i];
}

void run_thread() {
    current.running->fiber->arrive();
    acquire(*current.begun);
    current.launch->body(current.launch->arguments);
    release(*current.ended);
    current.running->state = State::kExited;
    current.running->fiber->leave_for_good();
}

void resume(Thread& thread) {
    current.running = &thread;
    thread.fiber->resume();
    current.running = nullptr;
}

void wait(State state, Place place) {
    current.running->state = state;
    current.running->place = place;
    current.running->fiber->leave();
}

}  // namespace

uint3 thread_index() {
    const dim3 size = block_size();
    const unsigned i = current.running->number;
    return {i % size.x, i / size.x % size.y, i / size.x / size.y};
}

uint3 block_index() { return current.index; }

dim3 block_size() { return current.launch->block; }

dim3 grid_size() { return current.launch->grid; }

unsigned lane() { return current.running->number % kWarp; }

void wait_for_block(const char* call, int line) { wait(State::kAtBarrier, {call, line}); }

void wait_for_lanes(const char* call, int line, unsigned mask, uint64_t value) {
    Thread& self = *current.running;
    const size_t first = self.number - lane(), threads = current.threads.size();
    if (!(mask >> lane() & 1))
        fail("thread %u calls %s in line %d, and its lane is not in the mask 0x%08x", self.number, call, line,
             mask);
    if (threads - first < kWarp && mask >> (threads - first) != 0)
        fail(
            "thread %u calls %s in line %d, and the mask 0x%08x names lanes that a block of %zu threads "
            "lacks",
            self.number, call, line, mask, threads);
    self.mask = mask;
    self.shown = value;
    wait(State::kInWarp, {call, line});
}

uint64_t value_of(unsigned lane) {
    const Thread& self = *current.running;
    if (!(self.mask >> lane & 1))
        fail("thread %u reads lane %u at %s in line %d, which is not in the mask 0x%08x", self.number, lane,
             self.place.call, self.place.line, self.mask);
    return self.seen[lane];
}

void run_block(const Launch& launch, uint3 index, size_t before, Random& random, char& ended) {
    current.launch = &launch;
    current.index = index;
    current.threads.resize(launch.block.x * launch.block.y * launch.block.z);
    // after all that the host did, and after no other block of the launch
    Keys begun(1);
    release(begun[0]);
    current.begun = &begun[0];
    current.ended = &ended;
    for (size_t i = 0; i < current.threads.size(); ++i) {
        Fiber& own = fiber(before % kFibersApart + i);
        own.prepare(run_thread);
        current.threads[i] = {};
        current.threads[i].fiber = &own;
        current.threads[i].number = unsigned(i);
    }
    Scheduler(current.threads, random).run(resume);
    current.launch = nullptr;
}

const char* where() {
    static char text[256];
    text[0] = '\0';
    if (current.launch != nullptr)
        snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u): ", current.launch->kernel,
                 current.index.x, current.index.y, current.index.z);
    return text;
}

}  // namespace simt

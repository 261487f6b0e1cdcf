#include "scheduler.h"

#include <algorithm>

#include "report.h"

namespace simt {
namespace {

bool lower(const Thread* a, const Thread* b) { return a->priority < b->priority; }

}  // namespace

Scheduler::Scheduler(std::vector<Thread>& threads, Random& random)
    : threads_(threads), random_(random), keys_(1 + (threads.size() + kWarp - 1) / kWarp) {
    constexpr uint64_t kStretches[] = {8, 64, 512, 4096};
    stretch_ = kStretches[random_.below(4)];
    for (Thread& thread : threads_) ready_.push_back(&thread);
    shuffle();
}

void Scheduler::run(void (*resume)(Thread&)) {
    while (!ready_.empty()) {
        if (random_.below(stretch_) == 0) shuffle();
        std::pop_heap(ready_.begin(), ready_.end(), lower);
        Thread& thread = *ready_.back();
        ready_.pop_back();
        resume(thread);
        if (thread.state == State::kInWarp)
            meet_in_warp(thread);
        else if (thread.state == State::kAtBarrier && ++at_barrier_ == threads_.size())
            open_barrier();
    }
    for (const Thread& thread : threads_)
        if (thread.state != State::kExited) explain();
}

void Scheduler::shuffle() {
    uint64_t warp = 0;
    for (Thread& thread : threads_) {
        if (thread.number % kWarp == 0) warp = random_.below(1 << 20) << 20;
        thread.priority = warp + random_.below(1 << 20);
    }
    std::make_heap(ready_.begin(), ready_.end(), lower);
}

void Scheduler::wake(Thread& thread) {
    thread.state = State::kReady;
    ready_.push_back(&thread);
    std::push_heap(ready_.begin(), ready_.end(), lower);
}

// All of the group have come: what any of them did is before what any of them does next.
void Scheduler::let_meet(char& key) {
    for (Thread* thread : group_) {
        switch_context(thread->fiber->context());
        release(key);
    }
    for (Thread* thread : group_) {
        switch_context(thread->fiber->context());
        acquire(key);
    }
    switch_context(nullptr);
    for (Thread* thread : group_) wake(*thread);
    group_.clear();
}

void Scheduler::open_barrier() {
    for (Thread& thread : threads_) {
        if (!(thread.place == threads_[0].place))
            fail("one __syncthreads on two lines: %s, %s", threads_[0].stand().c_str(),
                 thread.stand().c_str());
        group_.push_back(&thread);
    }
    at_barrier_ = 0;
    let_meet(keys_[0]);
}

Thread& Scheduler::lane_of(const Thread& thread, unsigned lane) {
    return threads_[thread.number / kWarp * kWarp + lane];
}

// Lets the lanes of the mask go on if this thread was the last of them to come.
void Scheduler::meet_in_warp(const Thread& last) {
    for (unsigned l = 0; l < kWarp; ++l)
        if ((last.mask >> l & 1) && !lane_of(last, l).meets(last)) return;
    uint64_t shown[kWarp] = {};
    for (unsigned l = 0; l < kWarp; ++l) {
        if (!(last.mask >> l & 1)) continue;
        group_.push_back(&lane_of(last, l));
        shown[l] = group_.back()->shown;
    }
    for (Thread* thread : group_) std::copy(shown, shown + kWarp, thread->seen);
    let_meet(keys_[1 + last.number / kWarp]);
}

// Nobody can go on, and not all have exited.
void Scheduler::explain() {
    for (const Thread& thread : threads_)
        for (unsigned l = 0; l < kWarp; ++l)
            if (thread.state == State::kInWarp && (thread.mask >> l & 1) && !lane_of(thread, l).meets(thread))
                fail("deadlock: %s for the lanes of mask 0x%08x, and %s", thread.stand().c_str(), thread.mask,
                     lane_of(thread, l).stand().c_str());
    const auto in = [&](State state) {
        return std::find_if(threads_.begin(), threads_.end(),
                            [=](const Thread& t) { return t.state == state; });
    };
    fail("__syncthreads reached by %zu of %zu threads: %s, %s", at_barrier_, threads_.size(),
         in(State::kAtBarrier)->stand().c_str(), in(State::kExited)->stand().c_str());
}

}  // namespace simt

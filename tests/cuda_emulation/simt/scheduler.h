// Runs the threads of one block to their end.
#pragma once
#include <cstddef>
#include <vector>

#include "happens_before.h"
#include "random.h"
#include "thread.h"

namespace simt {

// The ready thread of the highest priority runs until it must wait. Priorities are random, warp by warp, and
// drawn anew now and then, so that some threads run far ahead of the rest: as far as barriers let them.
class Scheduler {
   public:
    Scheduler(std::vector<Thread>& threads, Random& random);

    // `resume` runs a thread until it waits or exits. Ends the process where the threads do what CUDA leaves
    // undefined: a barrier that some do not reach, a lane that does not come.
    void run(void (*resume)(Thread&));

   private:
    void shuffle();
    void wake(Thread& thread);
    void let_meet(char& key);
    void open_barrier();
    void meet_in_warp(const Thread& last);
    Thread& lane_of(const Thread& thread, unsigned lane);
    [[noreturn]] void explain();

    std::vector<Thread>& threads_;
    Random& random_;
    std::vector<Thread*> ready_;  // a heap by priority
    std::vector<Thread*> group_;  // those that meet
    uint64_t stretch_;            // threads resumed between two shuffles, on average
    size_t at_barrier_ = 0;
    Keys keys_;  // the block's barrier, and each warp
};

}  // namespace simt

// A stack of its own to run a function on: how one CUDA thread is held up at a barrier and goes on behind it.
#pragma once
#include <cstddef>

namespace simt {

class Fiber {
   public:
    Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // The next resume() calls `entry`, which begins with arrive(), ends in leave_for_good() and never
    // returns.
    void prepare(void (*entry)());
    // Runs the fiber until it leaves. Called outside of every fiber.
    void resume();
    // Called inside: goes back to whoever resumed the fiber.
    void leave() { switch_out(&own_fake_); }
    // The same for the last time, so that AddressSanitizer gives up what it keeps for the fiber.
    void leave_for_good() { switch_out(nullptr); }
    // Called inside, before anything else.
    void arrive();
    void* context() const { return context_; }

   private:
    void switch_out(void** keep);

    char* stack_;
    void* own_top_ = nullptr;  // stack pointers while the other side runs
    void* outer_top_ = nullptr;
    void* own_fake_ = nullptr;  // AddressSanitizer's fake stacks
    void* outer_fake_ = nullptr;
    const void* outer_stack_ = nullptr;
    size_t outer_bytes_ = 0;
    void* context_;  // ThreadSanitizer's thread; a stack belongs to one for good
};

}  // namespace simt

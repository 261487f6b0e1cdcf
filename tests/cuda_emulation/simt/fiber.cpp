#include "fiber.h"

#include <sys/mman.h>

#include "happens_before.h"
#include "report.h"
#ifdef SIMT_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#error "the emulator switches stacks on x86-64 only"
#endif

// Saves the registers that a function must keep, exchanges the stack pointer, restores them.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
    .text
    .globl simt_switch
    .type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size simt_switch, .-simt_switch
)");

namespace simt {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr int kSavedRegisters = 6;

}  // namespace

Fiber::Fiber() : context_(new_context()) {
    void* const memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) fail("no memory for a stack");
    stack_ = static_cast<char*>(memory) + kGuardBytes;
}

void Fiber::prepare(void (*entry)()) {
    own_fake_ = nullptr;
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes) - 2;
    // the address that a function finds above its frame lies 8 bytes off a multiple of 16
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
    own_top_ = top;
}

void Fiber::resume() {
    switch_context(context_);
#ifdef SIMT_ASAN
    __sanitizer_start_switch_fiber(&outer_fake_, stack_, kStackBytes);
#endif
    simt_switch(&outer_top_, own_top_);
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(outer_fake_, nullptr, nullptr);
#endif
    switch_context(nullptr);
}

void Fiber::arrive() {
#ifdef SIMT_ASAN
    __sanitizer_finish_switch_fiber(own_fake_, &outer_stack_, &outer_bytes_);
#endif
}

void Fiber::switch_out([[maybe_unused]] void** keep) {
#ifdef SIMT_ASAN
    __sanitizer_start_switch_fiber(keep, outer_stack_, outer_bytes_);
#endif
    simt_switch(&own_top_, outer_top_);
    arrive();
}

}  // namespace simt

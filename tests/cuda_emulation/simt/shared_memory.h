// Shared memory: static variables that a block finds filled with nonsense.
#pragma once

// A block runs on a host thread of its own, so what is local to that thread is its shared memory, and its
// address says nothing about other blocks'. AddressSanitizer guards no such variable: under it they are plain
// statics with red zones, and blocks find what the one before left. In templates g++ leaves out the red zones
// too, and the bounds check of UndefinedBehaviorSanitizer remains.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

namespace simt {

// Fills the calling host thread's shared memory.
void poison_shared_memory(unsigned char byte);

}  // namespace simt

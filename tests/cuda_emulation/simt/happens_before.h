// What ThreadSanitizer is told. Every CUDA thread is a thread of its own to it, and only what CUDA orders is
// ordered: one launch before the next, the threads that meet at a barrier, the lanes that meet in a warp. So
// it sees a race between two blocks although they run one after another. Without SIMT_TSAN all of this is
// empty.
#pragma once
#include <cstddef>
#include <memory>

namespace simt {

#ifdef SIMT_TSAN

// Threads of one launch that run this far apart, or a multiple of it, may share a fiber: a race between these
// two goes unseen. Blocks of at most so many threads that run one after the other share none. Many times more
// would be many times slower.
constexpr size_t kFibersApart = 512;

void* new_context();
// What follows is the doing of that context, or of the host thread for nullptr.
void switch_context(void* context);
// Everything that the context did so far goes into the key; what is in the key comes before all that it does
// next.
void release(char& key);
void acquire(char& key);

#else

constexpr size_t kFibersApart = 1;

inline void* new_context() { return nullptr; }
inline void switch_context(void*) {}
inline void release(char&) {}
inline void acquire(char&) {}

#endif

// Keys on the heap: freed memory forgets what it ordered, so no block inherits the order of an earlier one.
class Keys {
   public:
    explicit Keys(size_t count) : keys_(new char[count]) {}
    char& operator[](size_t i) { return keys_[i]; }

   private:
    std::unique_ptr<char[]> keys_;
};

}  // namespace simt

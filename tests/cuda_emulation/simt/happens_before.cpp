#include "happens_before.h"

#ifdef SIMT_TSAN
#include <sanitizer/tsan_interface.h>

namespace simt {
namespace {

void* inside = nullptr;  // the context that runs, unless it is the host's
void* host = nullptr;

}  // namespace

void* new_context() { return __tsan_create_fiber(0); }

void switch_context(void* context) {
    // a block has a host thread of its own
    if (inside == nullptr) host = __tsan_get_current_fiber();
    inside = context;
    __tsan_switch_to_fiber(context ? context : host, __tsan_switch_to_fiber_no_sync);
}

void release(char& key) { __tsan_release(&key); }

void acquire(char& key) { __tsan_acquire(&key); }

}  // namespace simt
#endif

#include "report.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>

#include "block.h"

namespace simt {

void fail(const char* format, ...) {
    fprintf(stderr, "simt: %s", where());
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    fflush(nullptr);
    // no clean-up: the threads that still wait have no end
    _exit(kFailed);
}

}  // namespace simt

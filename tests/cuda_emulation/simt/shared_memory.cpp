#include "shared_memory.h"

#include <link.h>

namespace simt {

void poison_shared_memory(unsigned char byte) {
    // The program's own thread-local segment: the emulator has no other variable there.
    dl_iterate_phdr(
        [](dl_phdr_info* program, size_t, void* value) {
            for (int i = 0; i < program->dlpi_phnum; ++i) {
                if (program->dlpi_phdr[i].p_type != PT_TLS) continue;
                // one by one: a sanitizer takes a memset for an access of the kernel's
                volatile unsigned char* const memory = static_cast<unsigned char*>(program->dlpi_tls_data);
                for (size_t at = 0; memory != nullptr && at < program->dlpi_phdr[i].p_memsz; ++at)
                    memory[at] = *static_cast<unsigned char*>(value);
            }
            // the program is the first in the list; the rest are libraries
            return 1;
        },
        &byte);
}

}  // namespace simt

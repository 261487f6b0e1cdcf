// How the emulator ends a run whose kernel does what CUDA leaves undefined.
#pragma once

namespace simt {

constexpr int kFailed = 3;

// Prints "simt: <where>: <message>" to stderr, where a launch runs, and ends the process with kFailed.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace simt

// What the self-test's kernels work on.
#pragma once
#include <cstdio>
#include <cstdlib>

#include "simt/cuda.h"

constexpr int kThreads = 64;

[[noreturn]] inline void wrong(const char* what, long long at, double got) {
    printf("wrong: %s[%lld] is %g\n", what, at, got);
    fflush(stdout);
    _Exit(1);
}

// Memory on the heap, so that AddressSanitizer knows its end. malloc aligns it to 16.
template <class T>
class Array {
   public:
    explicit Array(long long count, T value = T()) : count_(count), data_(new T[size_t(count)]) {
        for (long long i = 0; i < count; ++i) data_[i] = value;
    }
    ~Array() { delete[] data_; }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    operator T*() const { return data_; }

    template <class Expected>
    void expect(const char* name, Expected expected) const {
        for (long long i = 0; i < count_; ++i)
            if (!(data_[i] == T(expected(i)))) wrong(name, i, double(data_[i]));
    }

   private:
    long long count_;
    T* data_;
};

// One block of a kernel that must leave ones.
template <void (*kKernel)(int*), int kCount = kThreads>
void run_ones() {
    Array<int> out(kCount);
    MR_LAUNCH(kKernel, 1, kCount, nullptr, out);
    out.expect("out", [](long long) { return 1; });
}

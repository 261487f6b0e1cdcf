// Memory of a kernel with red zones on both sides, at any alignment.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

class Guarded {
   public:
    // `bytes` of memory whose address is `offset` modulo 16.
    Guarded(size_t bytes, size_t offset)
        : bytes_(bytes),
          front_(kZone + offset),
          memory_(static_cast<unsigned char*>(malloc(front_ + bytes + kZone))) {
        memset(memory_, kMark, front_ + bytes + kZone);
        guard(true);
    }
    ~Guarded() {
        guard(false);
        free(memory_);
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    size_t bytes() const { return bytes_; }
    unsigned char* data() { return memory_ + front_; }
    template <class T>
    T* as() {
        return reinterpret_cast<T*>(data());
    }

    // Whether nothing was written to the red zones.
    bool intact() {
        guard(false);
        bool same = true;
        for (size_t i = 0; i < front_; ++i) same &= memory_[i] == kMark;
        for (size_t i = 0; i < kZone; ++i) same &= data()[bytes_ + i] == kMark;
        guard(true);
        return same;
    }

   private:
    static constexpr size_t kZone = 64;
    static constexpr unsigned char kMark = 0xC5;

    // AddressSanitizer then sees reads there too, but for up to 7 bytes in front.
    void guard([[maybe_unused]] bool on) {
#ifdef __SANITIZE_ADDRESS__
        const auto set = on ? __asan_poison_memory_region : __asan_unpoison_memory_region;
        set(memory_, front_);
        set(data() + bytes_, kZone);
#endif
    }

    size_t bytes_, front_;
    unsigned char* memory_;
};

// The numbers that shuffle a run: a sequence that the seed alone decides (splitmix64, Steele et al., OOPSLA
// 2014).
#pragma once
#include <cstdint>

namespace simt {

class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed) {}

    // In [0, bound); bound is far below 2^64, so the modulo's bias does not matter.
    uint64_t below(uint64_t bound) { return next() % bound; }

   private:
    uint64_t next() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }

    uint64_t state_;
};

}  // namespace simt

// What a draw on a device writes beside its result: one piece of memory that the caller brings.
#pragma once
#include <cstdint>

#include "priority_key.h"

namespace megatron_replay {

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kDigits = 6;  // 6 x 11 bits cover a key's 64

// Where the select stands before a digit is looked at: the winners are all keys above `prefix` in the digits
// so far, and `need` of those that equal it.
struct SelectState {
    uint64_t prefix;
    uint32_t need;    // still to be found among the equal ones
    uint32_t equal;   // how many equal ones there are
    uint32_t drawn;   // min(n, drawable rollouts)
    uint32_t unused;  // pads to 24 bytes
};

// Everything a draw writes beside its result; `draw_workspace_bytes` of device memory, aligned to 8.
struct DrawWorkspace {
    SelectState* state;   // [kDigits + 1]
    Winner* winners;      // [n], by turns with
    Winner* merged;       // [n]
    uint64_t* ranks;      // [count]
    uint32_t* histogram;  // [kDigits, kBins]
    uint32_t* taken;      // [1]
};

inline int64_t draw_workspace_bytes(int64_t count, int64_t n) {
    return int64_t(sizeof(SelectState)) * (kDigits + 1) + 2 * n * int64_t(sizeof(Winner)) +
           count * int64_t(sizeof(uint64_t)) + (kDigits * kBins + 1) * int64_t(sizeof(uint32_t));
}

inline DrawWorkspace draw_workspace(void* memory, int64_t count, int64_t n) {
    DrawWorkspace w;
    w.state = static_cast<SelectState*>(memory);
    w.winners = reinterpret_cast<Winner*>(w.state + kDigits + 1);
    w.merged = w.winners + n;
    w.ranks = reinterpret_cast<uint64_t*>(w.merged + n);
    w.histogram = reinterpret_cast<uint32_t*>(w.ranks + count);
    w.taken = w.histogram + kDigits * kBins;
    return w;
}

}  // namespace megatron_replay

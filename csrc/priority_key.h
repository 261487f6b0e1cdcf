// What a stored rollout is drawn by: key = log w + Gumbel(philox(seed, stream; uid, step, repeat)).
// One expression for host and device, so that all draw the same rows. The definition in torch is
// megatron_replay/ops/priority_draw_reference.py.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "philox.h"
#include "portable_log.h"

namespace megatron_replay {

// The live part of a ring of slots, oldest first: rollout i is in slot (head + i) mod slots, 0 <= i < count.
struct DrawWindow {
    const double* log_weight;  // [slots]
    const int64_t* uid;        // [slots]
    int64_t slots, head, count;

    MR_HOST_DEVICE int64_t slot(int64_t i) const {
        const int64_t at = head + i;
        return at < slots ? at : at - slots;
    }
};

// What a draw is keyed by, beside the rollout.
struct DrawKey {
    uint64_t seed;
    uint32_t stream, step, repeat;
};

enum class Priority : int { kAbsAdvantage = 0, kGroupStd = 1, kUniform = 2 };

// Everything but a finite log-weight: a weight that is 0, negative, infinite or NaN. Never drawn.
MR_HOST_DEVICE bool drawable(double log_weight) { return log_weight >= -DBL_MAX && log_weight <= DBL_MAX; }

// log of (|advantage| + eps)^alpha, of the group's std, or of 1; -inf where that cannot be drawn.
MR_HOST_DEVICE double log_weight_of(Priority priority, float advantage, float group_std, double alpha,
                                    double eps) {
    if (priority == Priority::kUniform) return 0.0;
    const bool by_std = priority == Priority::kGroupStd;
    const double base = by_std ? double(group_std) : fabs(double(advantage)) + eps;
    if (!(base > 0.0 && base <= DBL_MAX)) return -INFINITY;
    return by_std ? portable_log(base) : alpha * portable_log(base);
}

// log_weight must be drawable.
MR_HOST_DEVICE double priority_key(double log_weight, int64_t uid, DrawKey key) {
    const double u = uniform(random_words(key.seed, key.stream, uid, key.step, key.repeat));
    return log_weight - portable_log(-portable_log(u));
}

// Keys as integers of the same order; 0 is below every key, and stands for a rollout that cannot be drawn.
MR_HOST_DEVICE uint64_t ordered(double key) {
    uint64_t bits;
    memcpy(&bits, &key, sizeof bits);
    constexpr uint64_t kSign = uint64_t{1} << 63;
    return bits & kSign ? ~bits : bits | kSign;
}

MR_HOST_DEVICE double key_of(uint64_t rank) {
    constexpr uint64_t kSign = uint64_t{1} << 63;
    const uint64_t bits = rank & kSign ? rank ^ kSign : ~rank;
    double key;
    memcpy(&key, &bits, sizeof key);
    return key;
}

// A drawn rollout. Draws are ordered by key, descending; among equal keys the smaller uid is first.
struct Winner {
    uint64_t rank;  // ordered(key)
    int64_t uid, slot;
};

MR_HOST_DEVICE bool before(const Winner& a, const Winner& b) {
    if (a.rank != b.rank) return a.rank > b.rank;
    return a.uid != b.uid ? a.uid < b.uid : a.slot < b.slot;
}

}  // namespace megatron_replay

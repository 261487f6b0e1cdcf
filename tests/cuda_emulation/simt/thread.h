// A CUDA thread of the running block: its fiber and what it waits for.
#pragma once
#include <cstdint>
#include <string>

#include "fiber.h"

namespace simt {

constexpr unsigned kWarp = 32;

// Where a thread waits. Threads meet only at the same call on the same line.
struct Place {
    const char* call;
    int line;

    bool operator==(const Place& other) const { return call == other.call && line == other.line; }
};

enum class State { kReady, kAtBarrier, kInWarp, kExited };

struct Thread {
    Fiber* fiber;
    unsigned number;  // in its block, x fastest
    State state;
    Place place;
    unsigned mask;         // of the lanes it waits for
    uint64_t shown;        // its value for them
    uint64_t seen[kWarp];  // theirs
    uint64_t priority;

    // Whether both wait for each other's lanes at one place.
    bool meets(const Thread& other) const {
        return state == State::kInWarp && other.state == State::kInWarp && mask == other.mask &&
               place == other.place;
    }

    std::string stand() const {
        const std::string name = "thread " + std::to_string(number);
        if (state == State::kExited) return name + " has exited";
        return name + " waits at " + place.call + " in line " + std::to_string(place.line);
    }
};

}  // namespace simt

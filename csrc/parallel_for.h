// A loop over ranges on a few threads, which live for the length of the call.
#pragma once
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace megatron_replay {

// body(first, last, thread) over consecutive ranges of [0, count); no more threads than pieces of `grain`.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
    const int64_t pieces = std::min<int64_t>(std::max(threads, 1), (count + grain - 1) / grain);
    if (pieces <= 1) return body(int64_t{0}, count, 0);
    std::vector<std::thread> others;
    for (int64_t t = 1; t < pieces; ++t)
        others.emplace_back([&, t] { body(count * t / pieces, count * (t + 1) / pieces, int(t)); });
    body(int64_t{0}, count / pieces, 0);
    for (std::thread& other : others) other.join();
}

}  // namespace megatron_replay

// A loop over ranges on a few threads, which live for the length of the call.
#pragma once
#include <algorithm>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace megatron_replay {

// body(first, last, thread) over consecutive ranges of [0, count); no more threads than pieces of `grain`. The first
// exception of a body is thrown again once all have ended. Where a thread cannot start, the caller does its part.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
    const int64_t pieces = std::min<int64_t>(std::max(threads, 1), (count + grain - 1) / grain);
    if (pieces <= 1) return body(int64_t{0}, count, 0);
    std::vector<std::exception_ptr> failed(pieces);
    const auto piece = [&](int64_t t) noexcept {
        try {
            body(count * t / pieces, count * (t + 1) / pieces, int(t));
        } catch (...) {
            failed[t] = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(pieces);
    for (int64_t t = 1; t < pieces; ++t) {
        try {
            others.emplace_back(piece, t);
        } catch (const std::system_error&) {
            piece(t);
        }
    }
    piece(0);
    for (std::thread& other : others) other.join();
    for (const std::exception_ptr& failure : failed)
        if (failure) std::rethrow_exception(failure);
}

}  // namespace megatron_replay

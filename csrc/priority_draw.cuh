// The n largest keys of a window, by a radix select over their 64-bit order and a merge sort of the winners.
// Every step is a launch of its own: nothing waits for the device, nothing is allocated, a graph can hold it
// all.
#pragma once
#include "draw_workspace.h"
#include "launch.cuh"
#include "priority_key.h"

namespace megatron_replay {

constexpr int kDrawThreads = 256;
constexpr int kRun = 1024;  // winners that one block sorts

// Bits below a digit: 53, 42, 31, 20, 9, 0. The last digit has the 9 bits that are left.
__device__ __forceinline__ int digit_shift(int digit) {
    const int shift = 64 - kDigitBits * (digit + 1);
    return shift > 0 ? shift : 0;
}

__device__ __forceinline__ uint32_t digit_of(uint64_t rank, int digit) {
    const int bits = digit + 1 < kDigits ? kDigitBits : 64 - kDigitBits * (kDigits - 1);
    return uint32_t(rank >> digit_shift(digit)) & ((1u << bits) - 1u);
}

__device__ __forceinline__ void clear(uint32_t* shared_bins) {
    for (int b = threadIdx.x; b < kBins; b += kDrawThreads) shared_bins[b] = 0;
    __syncthreads();
}

__device__ __forceinline__ void add_to(uint32_t* global_bins, const uint32_t* shared_bins) {
    __syncthreads();
    for (int b = threadIdx.x; b < kBins; b += kDrawThreads)
        if (shared_bins[b] != 0) atomicAdd(&global_bins[b], shared_bins[b]);
}

constexpr int kCounters = kDigits * kBins + 1;  // histograms and `taken`

__global__ void __launch_bounds__(kDrawThreads)
    start_draw(uint32_t* __restrict__ counters, SelectState* states, uint32_t n) {
    const int thread = blockIdx.x * kDrawThreads + threadIdx.x;
    for (int i = thread; i < kCounters; i += gridDim.x * kDrawThreads) counters[i] = 0;
    if (thread == 0) states[0] = {0, n, 0, 0, 0};
}

// ranks[i] = the ordered key of rollout i, and the histogram of the first digit.
__global__ void __launch_bounds__(kDrawThreads)
    rank_keys(DrawWindow window, DrawKey key, uint64_t* __restrict__ ranks,
              uint32_t* __restrict__ histogram) {
    __shared__ uint32_t bins[kBins];
    clear(bins);
    const int64_t stride = int64_t{gridDim.x} * kDrawThreads;
    for (int64_t i = int64_t{blockIdx.x} * kDrawThreads + threadIdx.x; i < window.count; i += stride) {
        const int64_t slot = window.slot(i);
        const double log_weight = window.log_weight[slot];
        uint64_t rank = 0;
        if (drawable(log_weight)) {
            rank = ordered(priority_key(log_weight, window.uid[slot], key));
            atomicAdd(&bins[digit_of(rank, 0)], 1u);
        }
        ranks[i] = rank;
    }
    add_to(histogram, bins);
}

// The state after `digit`, from the state before it and the digit's histogram: the bin, counted from the
// largest, in which the need-th key lies. All threads of all blocks find the same.
__device__ __forceinline__ SelectState narrowed(SelectState state, int digit,
                                                const uint32_t* __restrict__ histogram) {
    constexpr int kEach = kBins / kDrawThreads, kWarps = kDrawThreads / 32;
    __shared__ uint32_t warp_sums[kWarps];
    __shared__ SelectState found;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // thread t has the t-th block of bins from the top
    const int top = kBins - 1 - int(threadIdx.x) * kEach;
    uint32_t sum = 0;
    for (int j = 0; j < kEach; ++j) sum += histogram[top - j];
    uint32_t upto = sum;  // of all bins from the top down to this thread's last
    for (int d = 1; d < 32; d <<= 1) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) warp_sums[warp] = upto;
    if (threadIdx.x == 0) found = {0, 0, 0, 0, 0};
    __syncthreads();
    uint32_t total = 0;
    for (int w = 0; w < kWarps; ++w) {
        if (w < warp) upto += warp_sums[w];
        total += warp_sums[w];
    }
    const uint32_t need = state.need < total ? state.need : total;
    uint32_t above = upto - sum;
    if (above < need && need <= upto) {
        int bin = top;
        while (above + histogram[bin] < need) above += histogram[bin--];
        found.prefix = state.prefix | (uint64_t(bin) << digit_shift(digit));
        found.need = need - above;
        found.equal = histogram[bin];
        found.drawn = digit == 0 ? need : state.drawn;
    }
    __syncthreads();
    return found;
}

// Takes one more digit into the state and counts the next one among the keys that are still equal.
__global__ void __launch_bounds__(kDrawThreads)
    narrow(SelectState* states, int digit, const uint64_t* __restrict__ ranks, int64_t count,
           uint32_t* __restrict__ histogram) {
    __shared__ uint32_t bins[kBins];
    const SelectState state = narrowed(states[digit], digit, histogram + digit * kBins);
    if (blockIdx.x == 0 && threadIdx.x == 0) states[digit + 1] = state;
    clear(bins);
    const int shift = digit_shift(digit);
    const int64_t stride = int64_t{gridDim.x} * kDrawThreads;
    for (int64_t i = int64_t{blockIdx.x} * kDrawThreads + threadIdx.x; i < count; i += stride) {
        const uint64_t rank = ranks[i];
        if (rank >> shift == state.prefix >> shift)
            atomicAdd(&bins[digit_of(rank, digit + 1)], 1u);
    }
    add_to(histogram + (digit + 1) * kBins, bins);
}

// Puts the winners together, in no order: all keys above the last one, and `need` of those that equal it.
__global__ void __launch_bounds__(kDrawThreads, 4)
    collect(SelectState* states, DrawWindow window, const uint64_t* __restrict__ ranks,
            const uint32_t* __restrict__ histogram, Winner* __restrict__ winners,
            uint32_t* __restrict__ taken, int64_t* __restrict__ drawn) {
    const SelectState state = narrowed(states[kDigits - 1], kDigits - 1, histogram + (kDigits - 1) * kBins);
    if (blockIdx.x == 0 && threadIdx.x == 0) *drawn = state.drawn;
    if (state.drawn == 0) return;
    const int64_t stride = int64_t{gridDim.x} * kDrawThreads;
    for (int64_t i = int64_t{blockIdx.x} * kDrawThreads + threadIdx.x; i < window.count; i += stride) {
        const uint64_t rank = ranks[i];
        if (rank < state.prefix) continue;
        const int64_t slot = window.slot(i);
        const Winner winner{rank, window.uid[slot], slot};
        if (rank == state.prefix && state.equal > state.need) {
            // equal keys across the edge of the draw: about once in 2^53 / count^2 draws
            uint32_t earlier = 0;
            for (int64_t j = 0; j < window.count; ++j) {
                const int64_t at = window.slot(j);
                if (ranks[j] == rank && before({rank, window.uid[at], at}, winner)) ++earlier;
            }
            if (earlier >= state.need) continue;
        }
        winners[atomicAdd(taken, 1u)] = winner;
    }
}

// Sorts runs of kRun winners, one a block (bitonic, the missing ones of the last run behind all others).
__global__ void __launch_bounds__(kDrawThreads)
    sort_runs(Winner* __restrict__ winners, const int64_t* drawn) {
    __shared__ Winner run[kRun];
    const int64_t first = int64_t{blockIdx.x} * kRun, count = *drawn;
    if (first >= count) return;
    for (int i = threadIdx.x; i < kRun; i += kDrawThreads)
        run[i] = first + i < count ? winners[first + i] : Winner{0, 0, first + i};
    __syncthreads();
    for (int size = 2; size <= kRun; size <<= 1)
        for (int apart = size >> 1; apart > 0; apart >>= 1) {
            for (int pair = threadIdx.x; pair < kRun / 2; pair += kDrawThreads) {
                const int low = 2 * pair - (pair & (apart - 1)), high = low + apart;
                const bool descending = (low & size) == 0;
                if (before(run[high], run[low]) == descending) {
                    const Winner swapped = run[low];
                    run[low] = run[high];
                    run[high] = swapped;
                }
            }
            __syncthreads();
        }
    for (int i = threadIdx.x; i < kRun && first + i < count; i += kDrawThreads) winners[first + i] = run[i];
}

// Merges neighbouring sorted runs of `width`: a winner's place is its own rank and its rank in the other run.
__global__ void __launch_bounds__(kDrawThreads)
    merge_runs(const Winner* __restrict__ runs, Winner* __restrict__ merged, int64_t width,
               const int64_t* drawn) {
    const int64_t count = *drawn, stride = int64_t{gridDim.x} * kDrawThreads;
    for (int64_t i = int64_t{blockIdx.x} * kDrawThreads + threadIdx.x; i < count; i += stride) {
        const int64_t own = i / width * width, pair = i / (2 * width) * (2 * width);
        const int64_t other = own == pair ? pair + width : pair;
        int64_t low = other < count ? other : count;
        int64_t high = other + width < count ? other + width : count;
        const int64_t begin = low;
        const Winner winner = runs[i];
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (before(runs[middle], winner))
                low = middle + 1;
            else
                high = middle;
        }
        merged[pair + (i - own) + (low - begin)] = winner;
    }
}

__global__ void __launch_bounds__(kDrawThreads) emit(const Winner* __restrict__ winners, const int64_t* drawn,
                                                     int64_t* __restrict__ slot, double* __restrict__ key) {
    const int64_t count = *drawn, stride = int64_t{gridDim.x} * kDrawThreads;
    for (int64_t i = int64_t{blockIdx.x} * kDrawThreads + threadIdx.x; i < count; i += stride) {
        slot[i] = winners[i].slot;
        key[i] = key_of(winners[i].rank);
    }
}

// Draw j, one a block: the largest key of repeat j.
__global__ void __launch_bounds__(kDrawThreads)
    draw_repeats(DrawWindow window, DrawKey key, int64_t n, int64_t* __restrict__ slots,
                 double* __restrict__ keys, int64_t* __restrict__ drawn) {
    constexpr int kWarps = kDrawThreads / 32;
    __shared__ Winner warp_best[kWarps];
    for (int64_t repeat = blockIdx.x; repeat < n; repeat += gridDim.x) {
        key.repeat = uint32_t(repeat);
        Winner best{0, INT64_MAX, INT64_MAX};
        for (int64_t i = threadIdx.x; i < window.count; i += kDrawThreads) {
            const int64_t slot = window.slot(i), uid = window.uid[slot];
            const double log_weight = window.log_weight[slot];
            if (!drawable(log_weight)) continue;
            const Winner candidate{ordered(priority_key(log_weight, uid, key)), uid, slot};
            if (before(candidate, best)) best = candidate;
        }
        for (int d = 16; d > 0; d >>= 1) {
            const Winner other{__shfl_xor_sync(0xFFFFFFFFu, best.rank, d),
                               __shfl_xor_sync(0xFFFFFFFFu, best.uid, d),
                               __shfl_xor_sync(0xFFFFFFFFu, best.slot, d)};
            if (before(other, best)) best = other;
        }
        if ((threadIdx.x & 31) == 0) warp_best[threadIdx.x >> 5] = best;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int w = 1; w < kWarps; ++w)
                if (before(warp_best[w], best)) best = warp_best[w];
            if (best.rank != 0) {
                slots[repeat] = best.slot;
                keys[repeat] = key_of(best.rank);
            }
            if (repeat == 0) *drawn = best.rank != 0 ? n : 0;
        }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(kDrawThreads)
    log_weights(Priority priority, const float* __restrict__ advantage, const float* __restrict__ group_std,
                int64_t count, double alpha, double eps, double* __restrict__ out) {
    const int64_t stride = int64_t{gridDim.x} * kDrawThreads;
    for (int64_t i = int64_t{blockIdx.x} * kDrawThreads + threadIdx.x; i < count; i += stride)
        out[i] = log_weight_of(priority, advantage[i], group_std[i], alpha, eps);
}

// The min(n, drawable) largest keys of the window, in order: slot [n], key [n], *drawn = how many.
// n must be at most window.count, and that below 2^31.
inline void launch_priority_draw(DrawWindow window, DrawKey key, int64_t n, int64_t* slot, double* key_out,
                                 int64_t* drawn, void* memory, cudaStream_t stream) {
    const DrawWorkspace w = draw_workspace(memory, window.count, n);
    const unsigned grid = blocks_for(window.count, kDrawThreads), winners_grid = blocks_for(n, kDrawThreads);
    MR_LAUNCH(start_draw, blocks_for(kCounters, kDrawThreads), kDrawThreads, stream, w.histogram, w.state,
              uint32_t(n));
    MR_LAUNCH(rank_keys, grid, kDrawThreads, stream, window, key, w.ranks, w.histogram);
    for (int digit = 0; digit + 1 < kDigits; ++digit)
        MR_LAUNCH(narrow, grid, kDrawThreads, stream, w.state, digit, w.ranks, window.count, w.histogram);
    MR_LAUNCH(collect, grid, kDrawThreads, stream, w.state, window, w.ranks, w.histogram, w.winners, w.taken,
              drawn);
    Winner *from = w.winners, *to = w.merged;
    // as many blocks as runs: a block of a run that nobody needs ends at once
    MR_LAUNCH(sort_runs, unsigned(n < kRun ? 1 : (n + kRun - 1) / kRun), kDrawThreads, stream, from, drawn);
    for (int64_t width = kRun; width < n; width *= 2) {
        MR_LAUNCH(merge_runs, winners_grid, kDrawThreads, stream, from, to, width, drawn);
        Winner* const swapped = from;
        from = to;
        to = swapped;
    }
    MR_LAUNCH(emit, winners_grid, kDrawThreads, stream, from, drawn, slot, key_out);
}

// n independent draws: slot [n], key [n], *drawn = n, or 0 where nothing can be drawn.
inline void launch_repeated_draw(DrawWindow window, DrawKey key, int64_t n, int64_t* slot, double* key_out,
                                 int64_t* drawn, cudaStream_t stream) {
    MR_LAUNCH(draw_repeats, blocks_for(n, 1), kDrawThreads, stream, window, key, n, slot, key_out, drawn);
}

}  // namespace megatron_replay

// The n largest keys of a window on a CPU. A key takes two logarithms; most rollouts are ruled out by an
// upper bound of theirs that takes none, and is computed for many rollouts at once.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "backend.h"
#include "parallel_for.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// one copy for each width of vectors, chosen when the module is loaded
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MR_VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MR_VECTORIZED
#endif

namespace megatron_replay::cpu {
namespace {

constexpr int64_t kGrain = 1 << 14;  // rollouts for which a thread is worth starting
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kAll = std::numeric_limits<float>::infinity();

// word[i] = the first random word of rollout i.
void first_words_plain(const int64_t* uid, int64_t count, const DrawKey& key, uint32_t* word) {
    for (int64_t i = 0; i < count; ++i)
        word[i] = random_words(key.seed, key.stream, uid[i], key.step, key.repeat).x;
}

#if defined(__x86_64__)
// The same, four rollouts at once, one in each 64-bit lane: the multiplication reads the low halves alone, so
// that what the exclusive ors leave in the high ones does no harm. Compilers do not find this by themselves.
__attribute__((target("avx2"))) void first_words_avx2(const int64_t* uid, int64_t count, const DrawKey& key,
                                                      uint32_t* word) {
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
    const __m256i low_halves = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    __m256i keys0[10], keys1[10];
    uint32_t key0 = uint32_t(key.seed), key1 = uint32_t(key.seed >> 32) ^ key.stream;
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        keys0[round] = _mm256_set1_epi64x(key0);
        keys1[round] = _mm256_set1_epi64x(key1);
    }
    const int64_t whole = count / 4 * 4;
    for (int64_t i = 0; i < whole; i += 4) {
        __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(uid + i)),
                y = _mm256_srli_epi64(x, 32);
        __m256i z = _mm256_set1_epi64x(key.step), w = _mm256_set1_epi64x(key.repeat);
        for (int round = 0; round < 10; ++round) {
            const __m256i p0 = _mm256_mul_epu32(x, m0), p1 = _mm256_mul_epu32(z, m1);
            x = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), y), keys0[round]);
            z = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), w), keys1[round]);
            y = p1;
            w = p0;
        }
        const __m256i packed = _mm256_permutevar8x32_epi32(x, low_halves);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(word + i), _mm256_castsi256_si128(packed));
    }
    first_words_plain(uid + whole, count - whole, key, word + whole);
}
#endif

void first_words(const int64_t* uid, int64_t count, const DrawKey& key, uint32_t* word) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return first_words_avx2(uid, count, key, word);
#endif
    first_words_plain(uid, count, key, word);
}

// bound[i] >= key of rollout i, within 0.07 of it for a large key; kNever where it cannot be drawn.
//
// key = log w - log(-log u), and -log u >= 1 - u >= v 2^-24 with v the first 24 bits of 1 - u. The bits of
// the float v read as an integer are 2^23 (127 + e + f) for v = 2^e (1 + f), and e + f <= log2 v: a logarithm
// from below for free.
MR_VECTORIZED void bounds_from(const double* log_weight, const uint32_t* word, int64_t count, float* bound) {
    constexpr float kLog2 = 0.693147182f;
    constexpr float kSlack = 1e-3f;  // above all roundings here, which are relative to at most 2^11
    for (int64_t i = 0; i < count; ++i) {
        const float v = float(int32_t(~word[i] >> 8));
        int32_t bits;
        memcpy(&bits, &v, sizeof bits);
        const float gumbel = (127.0f + 24.0f - float(bits) * 0x1p-23f) * kLog2;
        // beyond 2^10 the bound is loose, never low: below it is raised, above the slack grows with it
        const double raised = log_weight[i] < -1024.0 ? -1024.0 : log_weight[i];
        const float weight = float(raised > 1024.0 ? raised * (1 + 1e-6) : raised);
        bound[i] = drawable(log_weight[i]) ? std::min(weight + gumbel + kSlack, FLT_MAX) : kNever;
    }
}

void key_bounds(const double* log_weight, const int64_t* uid, int64_t count, const DrawKey& key,
                float* bound) {
    constexpr int64_t kBlock = 1024;
    uint32_t word[kBlock];
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t size = std::min(kBlock, count - first);
        first_words(uid + first, size, key, word);
        bounds_from(log_weight + first, word, size, bound + first);
    }
}

// Bounds as 14-bit integers of the same order: 64 KiB of counts, steps of 1/32 of the bound's size.
constexpr int kBoundBins = 1 << 14;

int bin_of(float bound) {
    int32_t bits;
    memcpy(&bits, &bound, sizeof bits);
    const uint32_t order = bits < 0 ? ~uint32_t(bits) : uint32_t(bits) | 0x80000000u;
    return int(order >> 18);
}

// The two straight parts of a ring window: body(first rollout, first slot, rollouts).
template <class Body>
void for_parts(const DrawWindow& window, int64_t first, int64_t last, const Body& body) {
    const int64_t turn =
        std::clamp(window.slots - window.head, first, last);  // the first rollout after the wrap
    if (first < turn) body(first, window.head + first, turn - first);
    if (turn < last) body(turn, window.head + turn - window.slots, last - turn);
}

void bounds_of(const DrawWindow& window, const DrawKey& key, int64_t first, int64_t last, float* bound) {
    for_parts(window, first, last, [&](int64_t at, int64_t slot, int64_t count) {
        key_bounds(window.log_weight + slot, window.uid + slot, count, key, bound + at);
    });
}

// key[i] of a log-weight that can be drawn.
MR_VECTORIZED void keys_from(const double* log_weight, const int64_t* uid, int64_t count, DrawKey key,
                             double* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = priority_key(log_weight[i], uid[i], key);
}

// Appends the rollouts i of `chosen`, with their keys.
void add_winners(const DrawWindow& window, const DrawKey& key, const std::vector<int64_t>& chosen,
                 std::vector<Winner>& winners) {
    constexpr size_t kBlock = 256;
    double log_weight[kBlock], keys[kBlock];
    int64_t uid[kBlock];
    winners.reserve(winners.size() + chosen.size());
    for (size_t first = 0; first < chosen.size(); first += kBlock) {
        const size_t size = std::min(kBlock, chosen.size() - first);
        for (size_t i = 0; i < size; ++i) {
            const int64_t slot = window.slot(chosen[first + i]);
            log_weight[i] = window.log_weight[slot];
            uid[i] = window.uid[slot];
        }
        keys_from(log_weight, uid, int64_t(size), key, keys);
        for (size_t i = 0; i < size; ++i)
            winners.push_back({ordered(keys[i]), uid[i], window.slot(chosen[first + i])});
    }
}

// Rollouts with low <= bound < high, in order.
std::vector<int64_t> within(const float* bound, int64_t count, float low, float high) {
    std::vector<int64_t> found;
    constexpr int64_t kBlock = 64;
    int64_t hit[kBlock];
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t last = std::min(first + kBlock, count);
        int hits = 0;
        for (int64_t i = first; i < last; ++i) {
            hit[hits] = i;  // no branch: which bounds are within is random
            hits += (bound[i] >= low) & (bound[i] < high);
        }
        found.insert(found.end(), hit, hit + hits);
    }
    return found;
}

// A float that no bound of a key so large is below, and that is above what stands for a rollout never drawn.
float below(double key) { return std::max(std::nextafter(float(key), kNever), -FLT_MAX); }

// The least value of a bin, as a float.
float edge_of(int bin) {
    const uint32_t order = uint32_t(bin) << 18;
    const uint32_t bits = order & 0x80000000u ? order ^ 0x80000000u : ~order;
    float edge;
    memcpy(&edge, &bits, sizeof edge);
    return edge;
}

}  // namespace

void priority_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, int threads) {
    *drawn = 0;
    if (n == 0 || window.count == 0) return;
    const std::unique_ptr<float[]> bound(new float[window.count]);  // a vector would write zeros first
    std::vector<std::vector<int32_t>> histogram(std::max(threads, 1));
    parallel_for(window.count, kGrain, threads, [&](int64_t first, int64_t last, int thread) {
        bounds_of(window, key, first, last, bound.get());
        histogram[thread].resize(kBoundBins);
        for (int64_t i = first; i < last; ++i) ++histogram[thread][bin_of(bound[i])];
    });
    // the fewest bins from the top that hold n rollouts, and an eighth more: with those the n-th key is
    // mostly above the last bin's edge, and nobody below it need be looked at again
    const int64_t wanted = n + n / 8 + 16;
    const int never = bin_of(kNever);
    int64_t seen = 0;
    int cut = kBoundBins;
    while (cut > never + 1 && seen < wanted) {
        --cut;
        for (const auto& counts : histogram)
            if (!counts.empty()) seen += counts[cut];
    }
    const float edge = edge_of(cut);  // of bin never + 1 it is -FLT_MAX
    std::vector<Winner> winners;
    add_winners(window, key, within(bound.get(), window.count, edge, kAll), winners);
    const auto keep_largest = [&] {
        if (int64_t(winners.size()) <= n) return;
        std::nth_element(winners.begin(), winners.begin() + (n - 1), winners.end(), before);
        winners.resize(n);
    };
    keep_largest();
    if (cut > never + 1) {
        // n keys are known; whoever's bound is below the least of them is not drawn
        const auto last = std::max_element(winners.begin(), winners.end(), before);
        const float low = below(key_of(last->rank));
        if (low < edge) {
            add_winners(window, key, within(bound.get(), window.count, low, edge), winners);
            keep_largest();
        }
    }
    std::sort(winners.begin(), winners.end(), before);
    *drawn = int64_t(winners.size());
    for (int64_t i = 0; i < *drawn; ++i) {
        slot[i] = winners[i].slot;
        key_out[i] = key_of(winners[i].rank);
    }
}

void repeated_draw(const DrawWindow& window, const DrawKey& key, int64_t n, int64_t* slot, double* key_out,
                   int64_t* drawn, int threads) {
    *drawn = 0;
    bool any = false;
    for (int64_t i = 0; i < window.count && !any; ++i) any = drawable(window.log_weight[window.slot(i)]);
    if (!any) return;
    parallel_for(n, 1 + kGrain / window.count, threads, [&](int64_t first, int64_t last, int) {
        std::vector<float> bound(window.count);
        for (int64_t repeat = first; repeat < last; ++repeat) {
            DrawKey own = key;
            own.repeat = uint32_t(repeat);
            bounds_of(window, own, 0, window.count, bound.data());
            const int64_t top = std::max_element(bound.begin(), bound.end()) - bound.begin();
            std::vector<Winner> close;
            add_winners(window, own, {top}, close);
            const float low = below(key_of(close[0].rank));
            add_winners(window, own, within(bound.data(), window.count, low, kAll), close);
            const Winner best = *std::min_element(close.begin(), close.end(), before);
            slot[repeat] = best.slot;
            key_out[repeat] = key_of(best.rank);
        }
    });
    *drawn = n;
}

void log_weights(Priority priority, const float* advantage, const float* group_std, int64_t count,
                 double alpha, double eps, double* out) {
    for (int64_t i = 0; i < count; ++i)
        out[i] = log_weight_of(priority, advantage[i], group_std[i], alpha, eps);
}

}  // namespace megatron_replay::cpu

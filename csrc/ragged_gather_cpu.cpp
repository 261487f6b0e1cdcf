// Rows between a ring of tokens and one packed tensor, on a CPU.
#include <cstring>

#include "backend.h"
#include "check.h"
#include "parallel_for.h"

namespace megatron_replay::cpu {
namespace {

constexpr int64_t kGrain = 256;  // rows for which a thread is worth starting
constexpr int64_t kAhead = 6;    // rows between asking for one and copying it

template <class To, class From>
void copy(To* to, const From* from, int64_t count) {
    if constexpr (sizeof(To) == sizeof(From))
        memcpy(to, from, size_t(count) * sizeof(To));
    else
        for (int64_t i = 0; i < count; ++i) to[i] = To(from[i]);
}

template <bool kGather, class Ring, class Packed>
void copy_pieces(const RaggedField& field, const Pieces& p) {
    Ring* const ring = static_cast<Ring*>(field.ring);
    Packed* const packed = static_cast<Packed*>(field.packed) + p.packed;
    if (kGather) {
        copy(packed, ring + p.ring, p.first);
        copy(packed + p.first, ring, p.second);
    } else {
        copy(ring + p.ring, packed, p.first);
        copy(ring, packed + p.first, p.second);
    }
}

// Asks for the beginning of a row that is copied soon: rows lie anywhere in the ring, and a row is too short
// for the processor to see the next ones coming.
void prefetch(const RaggedRows& rows, int64_t row) {
    constexpr int64_t kLine = 64, kMost = 4 * kLine;
    const Pieces pieces(rows, row);
    for (int f = 0; f < rows.fields; ++f) {
        const int64_t width = rows.field[f].element == Element::kByte ? 1 : 4;
        const char* const at = static_cast<const char*>(rows.field[f].ring) + pieces.ring * width;
        const int64_t bytes = pieces.first * width < kMost ? pieces.first * width : kMost;
        for (int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(at + b);
    }
}

template <bool kGather>
void copy_rows(const RaggedRows& rows, int threads) {
    parallel_for(rows.rows, kGrain, threads, [&](int64_t first, int64_t last, int) {
        for (int64_t row = first; row < last; ++row) {
            if (kGather && row + kAhead < last) prefetch(rows, row + kAhead);
            const Pieces pieces(rows, row);
            for (int f = 0; f < rows.fields; ++f) {
                const RaggedField& field = rows.field[f];
                if (field.element == Element::kIdOfWord)
                    copy_pieces<kGather, int32_t, int64_t>(field, pieces);
                else if (field.element == Element::kWord)
                    copy_pieces<kGather, uint32_t, uint32_t>(field, pieces);
                else
                    copy_pieces<kGather, uint8_t, uint8_t>(field, pieces);
            }
        }
    });
}

}  // namespace

void ragged_gather(const RaggedRows& rows, int threads) { copy_rows<true>(rows, threads); }

void ragged_scatter(const RaggedRows& rows, int threads) { copy_rows<false>(rows, threads); }

void take_records(const Records& records, const int64_t* slot, int64_t count, int64_t* taken, int64_t* start,
                  int32_t* cu) {
    int64_t sum = 0;
    cu[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
        MR_CHECK(slot[i] >= 0 && slot[i] < records.slots, "slots must be in [0, ", records.slots, "), got ",
                 slot[i], " at row ", i);
        const int64_t* const record = records.word + slot[i] * records.width;
        memcpy(taken + i * records.width, record, size_t(records.width) * sizeof(int64_t));
        start[i] = record[records.start];
        sum += record[records.length];
        if (sum > INT32_MAX)
            throw std::overflow_error(joined("cu_seqlens: ", sum, " tokens do not fit int32, at row ", i));
        cu[i + 1] = int32_t(sum);
    }
}

}  // namespace megatron_replay::cpu

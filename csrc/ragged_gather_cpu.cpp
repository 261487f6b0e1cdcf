// Rows between a ring of tokens and one packed tensor, on a CPU.
#include <cstring>

#include "backend.h"
#include "parallel_for.h"

namespace megatron_replay::cpu {
namespace {

constexpr int64_t kGrain = 256;  // rows for which a thread is worth starting

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

template <bool kGather>
void copy_rows(const RaggedRows& rows, int threads) {
    parallel_for(rows.rows, kGrain, threads, [&](int64_t first, int64_t last, int) {
        for (int64_t row = first; row < last; ++row) {
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

template <class Word>
void take(const RowColumn& column, const int64_t* slot, int64_t rows) {
    const Word* const from = static_cast<const Word*>(column.from);
    Word* const to = static_cast<Word*>(column.to);
    for (int64_t i = 0; i < rows; ++i) to[i] = from[slot[i]];
}

}  // namespace

void ragged_gather(const RaggedRows& rows, int threads) { copy_rows<true>(rows, threads); }

void ragged_scatter(const RaggedRows& rows, int threads) { copy_rows<false>(rows, threads); }

void take_rows(const RowColumns& columns) {
    for (int c = 0; c < columns.columns; ++c) {
        const RowColumn& column = columns.column[c];
        if (column.bytes == 8)
            take<uint64_t>(column, columns.slot, columns.rows);
        else
            take<uint32_t>(column, columns.slot, columns.rows);
    }
}

}  // namespace megatron_replay::cpu

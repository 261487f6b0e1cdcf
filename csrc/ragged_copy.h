// Rows of any length between a ring of tokens and one packed tensor, described for host and device alike.
#pragma once
#include <cstdint>

#include "philox.h"

namespace megatron_replay {

// What one token is on either side. Ids are stored narrow and trained on wide.
enum class Element : int {
    kByte = 0,
    kWord = 1,
    kIdOfWord = 2
};  // 1 and 1, 4 and 4, 4 (ring) and 8 (packed) bytes

// One token field: ring [ring_tokens] and packed [cu[rows]].
struct RaggedField {
    void* ring;
    void* packed;
    Element element;
};

constexpr int kMostFields = 4;

// Row i is packed[cu_i .. cu_{i+1}) and ring[(start_i + j) mod ring_tokens].
struct RaggedRows {
    RaggedField field[kMostFields];
    int fields;
    const int64_t* start;  // [rows], in [0, ring_tokens)
    const int32_t* cu;     // [rows + 1]
    int64_t rows, ring_tokens;
};

// One per-rollout field: to[i] = the element of 4 or 8 bytes that stands `stride` bytes times slot[i] behind
// `from`.
struct RowColumn {
    const char* from;
    void* to;
    int bytes;
    int64_t stride;

    MR_HOST_DEVICE void take(int64_t slot, int64_t i) const {
        const char* const at = from + slot * stride;
        if (bytes == 8)
            static_cast<uint64_t*>(to)[i] = *reinterpret_cast<const uint64_t*>(at);
        else
            static_cast<uint32_t*>(to)[i] = *reinterpret_cast<const uint32_t*>(at);
    }
};

constexpr int kMostColumns = 12;

struct RowColumns {
    RowColumn column[kMostColumns];
    int columns;
    const int64_t* slot;  // [rows]
    int64_t rows;
};

// A row as its one or two straight pieces: packed offset, ring offset, tokens.
struct Pieces {
    int64_t packed, ring, first, second;  // the second piece begins at ring offset 0

    MR_HOST_DEVICE Pieces(const RaggedRows& rows, int64_t row) : packed(rows.cu[row]), ring(rows.start[row]) {
        const int64_t length = rows.cu[row + 1] - packed, room = rows.ring_tokens - ring;
        first = length < room ? length : room;
        second = length - first;
    }
};

}  // namespace megatron_replay

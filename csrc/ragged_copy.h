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

// One record of each slot: `width` words, of which two say where the slot's row begins, and how long it is.
struct Records {
    const int64_t* word;  // [slots, width]
    int64_t slots, width, start, length;
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

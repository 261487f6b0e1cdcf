// Drawn rows out of the ring of tokens into one packed tensor, and pushed rows back into it.
#pragma once
#include "launch.cuh"
#include "ragged_copy.h"

namespace megatron_replay {

constexpr int kCopyThreads = 128;
constexpr int kSlices = 4;  // blocks that share a row, so that a long one does not hold up the rest

// V elements that are loaded or stored at once.
template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
    T at[V];
};

// to[i] = from[i], 0 <= i < count, by `lanes` threads. Stores of 16 bytes on the wider side; loads as wide
// where both sides are aligned alike, else by element, which the cache puts together again.
template <class To, class From>
__device__ __forceinline__ void copy(To* __restrict__ to, const From* __restrict__ from, int64_t count,
                                     int lane, int lanes) {
    constexpr int kWide = 16 / int(sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
    using Store = Vector<To, kWide>;
    using Load = Vector<From, kWide>;
    const int64_t off = int64_t(reinterpret_cast<uintptr_t>(to) % sizeof(Store) / sizeof(To));
    const int64_t lead = off == 0 ? 0 : kWide - off, head = lead < count ? lead : count;
    const int64_t groups = (count - head) / kWide, tail = head + groups * kWide;
    const bool aligned = reinterpret_cast<uintptr_t>(from + head) % sizeof(Load) == 0;
    for (int64_t i = lane; i < head; i += lanes) to[i] = To(from[i]);
    for (int64_t g = lane; g < groups; g += lanes) {
        const int64_t i = head + g * kWide;
        Load loaded;
        if (aligned)
            loaded = *reinterpret_cast<const Load*>(from + i);
        else
            for (int v = 0; v < kWide; ++v) loaded.at[v] = from[i + v];
        Store stored;
        for (int v = 0; v < kWide; ++v) stored.at[v] = To(loaded.at[v]);
        *reinterpret_cast<Store*>(to + i) = stored;
    }
    for (int64_t i = tail + lane; i < count; i += lanes) to[i] = To(from[i]);
}

template <bool kGather, class Ring, class Packed>
__device__ __forceinline__ void copy_pieces(const RaggedField& field, const Pieces& p, int lane, int lanes) {
    Ring* const ring = static_cast<Ring*>(field.ring);
    Packed* const packed = static_cast<Packed*>(field.packed) + p.packed;
    if (kGather) {
        copy(packed, ring + p.ring, p.first, lane, lanes);
        copy(packed + p.first, ring, p.second, lane, lanes);
    } else {
        copy(ring + p.ring, packed, p.first, lane, lanes);
        copy(ring, packed + p.first, p.second, lane, lanes);
    }
}

template <bool kGather>
__global__ void __launch_bounds__(kCopyThreads) copy_rows(RaggedRows rows) {
    const int lane = blockIdx.y * kCopyThreads + threadIdx.x, lanes = gridDim.y * kCopyThreads;
    for (int64_t row = blockIdx.x; row < rows.rows; row += gridDim.x) {
        const Pieces pieces(rows, row);
        for (int f = 0; f < rows.fields; ++f) {
            const RaggedField& field = rows.field[f];
            if (field.element == Element::kIdOfWord)
                copy_pieces<kGather, int32_t, int64_t>(field, pieces, lane, lanes);
            else if (field.element == Element::kWord)
                copy_pieces<kGather, uint32_t, uint32_t>(field, pieces, lane, lanes);
            else
                copy_pieces<kGather, uint8_t, uint8_t>(field, pieces, lane, lanes);
        }
    }
}

// packed = ring, row by row. Rows may repeat and overlap in the ring.
inline void launch_ragged_gather(const RaggedRows& rows, cudaStream_t stream) {
    MR_LAUNCH(copy_rows<true>, dim3(blocks_for(rows.rows, 1), kSlices), kCopyThreads, stream, rows);
}

// ring = packed, row by row. Rows must not overlap in the ring.
inline void launch_ragged_scatter(const RaggedRows& rows, cudaStream_t stream) {
    MR_LAUNCH(copy_rows<false>, dim3(blocks_for(rows.rows, 1), kSlices), kCopyThreads, stream, rows);
}

}  // namespace megatron_replay

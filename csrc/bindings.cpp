// Registers the extension's functions. Addresses are of tensors whose dtypes, devices and sizes Python has
// checked; here the numbers are, and on the CPU the rows that an address is computed from.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <vector>

#include "backend.h"
#include "check.h"
#include "draw_workspace.h"

namespace py = pybind11;
namespace mr = megatron_replay;

namespace {

using WindowArgs =
    std::tuple<uintptr_t, uintptr_t, int64_t, int64_t, int64_t>;       // log_weight, uid, slots, head, size
using KeyArgs = std::tuple<uint64_t, uint32_t, uint32_t>;              // seed, stream, step
using DrawnArgs = std::tuple<uintptr_t, uintptr_t, uintptr_t>;         // slot, key, drawn
using FieldArgs = std::vector<std::tuple<uintptr_t, uintptr_t, int>>;  // ring, packed, element
using RowsArgs = std::tuple<uintptr_t, uintptr_t, int64_t, int64_t>;   // start, cu, rows, ring_tokens
using QueueArgs = std::tuple<int, uintptr_t>;                          // device, stream

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

mr::DrawWindow window_of(const WindowArgs& args) {
    const auto [log_weight, uid, slots, head, size] = args;
    MR_CHECK(size >= 0 && size <= slots, "size must be in [0, slots], got ", size, " of ", slots);
    MR_CHECK(head >= 0 && (head < slots || slots == 0), "head must be in [0, slots), got ", head, " of ",
             slots);
    MR_CHECK(size <= INT32_MAX, "size must be below 2^31, got ", size);
    return {at<const double>(log_weight), at<const int64_t>(uid), slots, head, size};
}

mr::DrawKey key_of(const KeyArgs& args) {
    const auto [seed, stream, step] = args;
    return {seed, stream, step, 0};
}

mr::cuda::Queue queue_of(const QueueArgs& args) { return {std::get<0>(args), std::get<1>(args)}; }

int64_t checked_draw(const mr::DrawWindow& window, int64_t n) {
    MR_CHECK(n >= 0 && n <= window.count, "n must be in [0, size], got ", n, " of ", window.count);
    return n;
}

int64_t checked_repeats(int64_t n) {
    MR_CHECK(n >= 0 && n <= INT32_MAX, "n must be in [0, 2^31), got ", n);
    return n;
}

mr::RaggedRows rows_of(const FieldArgs& fields, const RowsArgs& args) {
    const auto [start, cu, count, ring_tokens] = args;
    MR_CHECK(int(fields.size()) <= mr::kMostFields, "fields must be at most ", mr::kMostFields, ", got ",
             fields.size());
    MR_CHECK(count >= 0 && ring_tokens >= 1, "rows must be at least 0, and ring_tokens at least 1, got ", count,
             " and ", ring_tokens);
    mr::RaggedRows rows{};
    for (const auto& [ring, packed, element] : fields)
        rows.field[rows.fields++] = {at<void>(ring), at<void>(packed), static_cast<mr::Element>(element)};
    rows.start = at<const int64_t>(start);
    rows.cu = at<const int32_t>(cu);
    rows.rows = count;
    rows.ring_tokens = ring_tokens;
    return rows;
}

// What a CUDA kernel cannot look at without a wait; a row outside the ring would touch memory that is not
// ours.
const mr::RaggedRows& checked_rows(const mr::RaggedRows& rows, int64_t packed_tokens) {
    MR_CHECK(rows.cu[0] == 0, "cu_seqlens must begin with 0, got ", rows.cu[0]);
    for (int64_t i = 0; i < rows.rows; ++i) {
        const int64_t length = int64_t{rows.cu[i + 1]} - rows.cu[i];
        MR_CHECK(length >= 0 && length <= rows.ring_tokens, "cu_seqlens must rise by at most the ring's ",
                 rows.ring_tokens, " tokens, got ", length, " at row ", i);
        MR_CHECK(rows.start[i] >= 0 && rows.start[i] < rows.ring_tokens, "start must be in [0, ",
                 rows.ring_tokens, "), got ", rows.start[i], " at row ", i);
    }
    MR_CHECK(rows.cu[rows.rows] == packed_tokens, "cu_seqlens must end with the ", packed_tokens,
             " packed tokens, got ", rows.cu[rows.rows]);
    return rows;
}

void priority_draw_cpu(const WindowArgs& window, const KeyArgs& key, int64_t n, const DrawnArgs& out,
                       int threads) {
    const mr::DrawWindow w = window_of(window);
    const auto [slot, keys, drawn] = out;
    mr::cpu::priority_draw(w, key_of(key), checked_draw(w, n), at<int64_t>(slot), at<double>(keys),
                           at<int64_t>(drawn), threads);
}

void priority_draw_cuda(const WindowArgs& window, const KeyArgs& key, int64_t n, const DrawnArgs& out,
                        uintptr_t workspace, const QueueArgs& queue) {
    const mr::DrawWindow w = window_of(window);
    const auto [slot, keys, drawn] = out;
    mr::cuda::priority_draw(w, key_of(key), checked_draw(w, n), at<int64_t>(slot), at<double>(keys),
                            at<int64_t>(drawn), at<void>(workspace), queue_of(queue));
}

void repeated_draw_cpu(const WindowArgs& window, const KeyArgs& key, int64_t n, const DrawnArgs& out,
                       int threads) {
    const auto [slot, keys, drawn] = out;
    mr::cpu::repeated_draw(window_of(window), key_of(key), checked_repeats(n), at<int64_t>(slot),
                           at<double>(keys), at<int64_t>(drawn), threads);
}

void repeated_draw_cuda(const WindowArgs& window, const KeyArgs& key, int64_t n, const DrawnArgs& out,
                        const QueueArgs& queue) {
    const auto [slot, keys, drawn] = out;
    mr::cuda::repeated_draw(window_of(window), key_of(key), checked_repeats(n), at<int64_t>(slot),
                            at<double>(keys), at<int64_t>(drawn), queue_of(queue));
}

void log_weights_cpu(int priority, uintptr_t advantage, uintptr_t group_std, int64_t count, double alpha,
                     double eps, uintptr_t out) {
    mr::cpu::log_weights(static_cast<mr::Priority>(priority), at<const float>(advantage),
                         at<const float>(group_std), count, alpha, eps, at<double>(out));
}

void log_weights_cuda(int priority, uintptr_t advantage, uintptr_t group_std, int64_t count, double alpha,
                      double eps, uintptr_t out, const QueueArgs& queue) {
    mr::cuda::log_weights(static_cast<mr::Priority>(priority), at<const float>(advantage),
                          at<const float>(group_std), count, alpha, eps, at<double>(out), queue_of(queue));
}

void ragged_gather_cpu(const FieldArgs& fields, const RowsArgs& rows, int64_t packed_tokens, int threads) {
    mr::cpu::ragged_gather(checked_rows(rows_of(fields, rows), packed_tokens), threads);
}

void ragged_scatter_cpu(const FieldArgs& fields, const RowsArgs& rows, int64_t packed_tokens, int threads) {
    mr::cpu::ragged_scatter(checked_rows(rows_of(fields, rows), packed_tokens), threads);
}

void ragged_gather_cuda(const FieldArgs& fields, const RowsArgs& rows, const QueueArgs& queue) {
    mr::cuda::ragged_gather(rows_of(fields, rows), queue_of(queue));
}

void ragged_scatter_cuda(const FieldArgs& fields, const RowsArgs& rows, const QueueArgs& queue) {
    mr::cuda::ragged_scatter(rows_of(fields, rows), queue_of(queue));
}

void take_records_cpu(uintptr_t records, int64_t slots, int64_t width, std::pair<int64_t, int64_t> row,
                      uintptr_t slot, int64_t count, const std::tuple<uintptr_t, uintptr_t, uintptr_t>& out) {
    const auto [taken, start, cu] = out;
    const mr::Records from{at<const int64_t>(records), slots, width, row.first, row.second};
    mr::cpu::take_records(from, at<const int64_t>(slot), count, at<int64_t>(taken), at<int64_t>(start),
                          at<int32_t>(cu));
}

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    const auto [c0, c1, c2, c3] = counter;
    const mr::Words4 out = mr::philox4x32({c0, c1, c2, c3}, key[0], key[1]);
    return {out.x, out.y, out.z, out.w};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    using py::arg;
    const auto nogil = py::call_guard<py::gil_scoped_release>();
    py::register_exception<mr::CudaError>(m, "CudaError", PyExc_RuntimeError);
    m.def("cuda_architectures", &mr::cuda::architectures);
    m.def("device_count", &mr::cuda::device_count);
    m.def("philox4x32", &philox4x32, arg("counter"), arg("key"));
    m.def("portable_log", &mr::portable_log, arg("x"));
    m.def("draw_workspace_bytes", &mr::draw_workspace_bytes, arg("count"), arg("n"));

    m.def("priority_draw_cpu", &priority_draw_cpu, nogil, arg("window"), arg("key"), arg("n"), arg("out"),
          arg("threads"));
    m.def("repeated_draw_cpu", &repeated_draw_cpu, nogil, arg("window"), arg("key"), arg("n"), arg("out"),
          arg("threads"));
    m.def("log_weights_cpu", &log_weights_cpu, nogil, arg("priority"), arg("advantage"), arg("group_std"),
          arg("count"), arg("alpha"), arg("eps"), arg("out"));
    m.def("ragged_gather_cpu", &ragged_gather_cpu, nogil, arg("fields"), arg("rows"), arg("packed_tokens"),
          arg("threads"));
    m.def("ragged_scatter_cpu", &ragged_scatter_cpu, nogil, arg("fields"), arg("rows"), arg("packed_tokens"),
          arg("threads"));

    m.def("take_records_cpu", &take_records_cpu, nogil, arg("records"), arg("slots"), arg("width"),
          arg("row"), arg("slot"), arg("count"), arg("out"));

    m.def("priority_draw_cuda", &priority_draw_cuda, nogil, arg("window"), arg("key"), arg("n"), arg("out"),
          arg("workspace"), arg("queue"));
    m.def("repeated_draw_cuda", &repeated_draw_cuda, nogil, arg("window"), arg("key"), arg("n"), arg("out"),
          arg("queue"));
    m.def("log_weights_cuda", &log_weights_cuda, nogil, arg("priority"), arg("advantage"), arg("group_std"),
          arg("count"), arg("alpha"), arg("eps"), arg("out"), arg("queue"));
    m.def("ragged_gather_cuda", &ragged_gather_cuda, nogil, arg("fields"), arg("rows"), arg("queue"));
    m.def("ragged_scatter_cuda", &ragged_scatter_cuda, nogil, arg("fields"), arg("rows"), arg("queue"));
}

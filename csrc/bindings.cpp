// Registers the extension's functions; addresses come from tensors that Python has checked.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "backend.h"
#include "check.h"

namespace py = pybind11;
namespace mr = megatron_replay;

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void priority_keys_cpu(uintptr_t weight, uintptr_t uid, uintptr_t out, int64_t count, uint64_t seed,
                       uint32_t stream, uint32_t step, uint32_t repeat) {
    MR_CHECK(count >= 0, "count must be at least 0, got ", count);
    const mr::DrawKey key{seed, stream, step, repeat};
    for (int64_t i = 0; i < count; ++i)
        at<double>(out)[i] = mr::priority_key(at<const double>(weight)[i], at<const int64_t>(uid)[i], key);
}

void priority_keys_cuda(uintptr_t weight, uintptr_t uid, uintptr_t out, int64_t count, uint64_t seed,
                        uint32_t stream, uint32_t step, uint32_t repeat, uintptr_t cuda_stream, int device) {
    MR_CHECK(count >= 0, "count must be at least 0, got ", count);
    mr::cuda::priority_keys(at<const double>(weight), at<const int64_t>(uid), at<double>(out), count,
                            {seed, stream, step, repeat}, cuda_stream, device);
}

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    const auto [c0, c1, c2, c3] = counter;
    const mr::Words4 out = mr::philox4x32({c0, c1, c2, c3}, key[0], key[1]);
    return {out.x, out.y, out.z, out.w};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    const auto nogil = py::call_guard<py::gil_scoped_release>();
    py::register_exception<mr::CudaError>(m, "CudaError", PyExc_RuntimeError);
    m.def("cuda_architectures", &mr::cuda::architectures);
    m.def("device_count", &mr::cuda::device_count);
    m.def("philox4x32", &philox4x32, py::arg("counter"), py::arg("key"));
    m.def("priority_keys_cpu", &priority_keys_cpu, nogil, py::arg("weight"), py::arg("uid"), py::arg("out"),
          py::arg("count"), py::arg("seed"), py::arg("stream"), py::arg("step"), py::arg("repeat"));
    m.def("priority_keys_cuda", &priority_keys_cuda, nogil, py::arg("weight"), py::arg("uid"), py::arg("out"),
          py::arg("count"), py::arg("seed"), py::arg("stream"), py::arg("step"), py::arg("repeat"),
          py::arg("cuda_stream"), py::arg("device"));
}

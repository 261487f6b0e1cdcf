// Runs the launch sequences of csrc/ in the emulator, many cases in one process.
//     driver REQUEST RESPONSE SEED
// REQUEST holds cases, one behind another, of 64-bit integers: operation, how many numbers, how many arrays,
// the numbers, and for each array its bytes, its address modulo 16, and its content. RESPONSE has the content
// of every array after the case; it ends with the last case that ended well.
#include <cstdio>
#include <iterator>
#include <memory>
#include <vector>

// clang-format off: CUDA must be there before the kernels
#include "simt/cuda.h"
#include "priority_draw.cuh"
#include "ragged_gather.cuh"
// clang-format on
#include "guarded.h"

using namespace megatron_replay;

namespace {

struct Case {
    std::vector<int64_t> numbers;
    std::vector<std::unique_ptr<Guarded>> arrays;

    template <class T>
    T* array(size_t i) {
        return arrays.at(i)->as<T>();
    }
};

double real(int64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// numbers: slots, head, count, n, seed, stream, step, blocks; arrays: log_weight, uid, slot, key, drawn
DrawWindow window_of(Case& c) {
    return {c.array<double>(0), c.array<int64_t>(1), c.numbers.at(0), c.numbers.at(1), c.numbers.at(2)};
}

DrawKey key_of_case(const Case& c) {
    return {uint64_t(c.numbers.at(4)), uint32_t(c.numbers.at(5)), uint32_t(c.numbers.at(6)), 0};
}

void priority_draw(Case& c) {
    const int64_t n = c.numbers.at(3);
    c.arrays.push_back(std::make_unique<Guarded>(draw_workspace_bytes(window_of(c).count, n), 0));
    launch_priority_draw(window_of(c), key_of_case(c), n, c.array<int64_t>(2), c.array<double>(3),
                         c.array<int64_t>(4), c.arrays.back()->data(), nullptr);
}

// With `blocks`, the kernel on a grid of so many, else as it is launched.
void repeated_draw(Case& c) {
    const int64_t n = c.numbers.at(3), blocks = c.numbers.at(7);
    int64_t *const slot = c.array<int64_t>(2), *const drawn = c.array<int64_t>(4);
    double* const key = c.array<double>(3);
    if (blocks != 0)
        MR_LAUNCH(draw_repeats, unsigned(blocks), kDrawThreads, nullptr, window_of(c), key_of_case(c), n,
                  slot, key, drawn);
    else
        launch_repeated_draw(window_of(c), key_of_case(c), n, slot, key, drawn, nullptr);
}

// numbers: ring_tokens, rows, then the element of each field; arrays: start, cu, then ring and packed of each
// field
RaggedRows rows_of(Case& c) {
    RaggedRows rows{};
    rows.start = c.array<int64_t>(0);
    rows.cu = c.array<int32_t>(1);
    rows.ring_tokens = c.numbers.at(0);
    rows.rows = c.numbers.at(1);
    rows.fields = int(c.numbers.size()) - 2;
    for (int f = 0; f < rows.fields; ++f)
        rows.field[f] = {c.array<void>(2 + 2 * f), c.array<void>(3 + 2 * f), Element(c.numbers[2 + f])};
    return rows;
}

void ragged_gather(Case& c) { launch_ragged_gather(rows_of(c), nullptr); }

void ragged_scatter(Case& c) { launch_ragged_scatter(rows_of(c), nullptr); }

// numbers: priority, count, the bits of alpha and eps; arrays: advantage, group_std, out
void log_weights(Case& c) {
    const int64_t count = c.numbers.at(1);
    MR_LAUNCH(megatron_replay::log_weights, blocks_for(count, kDrawThreads), kDrawThreads, nullptr,
              Priority(c.numbers.at(0)), c.array<float>(0), c.array<float>(1), count, real(c.numbers.at(2)),
              real(c.numbers.at(3)), c.array<double>(2));
}

constexpr void (*kOperations[])(Case&) = {priority_draw, repeated_draw, ragged_gather, ragged_scatter,
                                          log_weights};

class Request {
   public:
    explicit Request(const char* path) : file_(fopen(path, "rb")) {}
    bool opened() const { return file_ != nullptr; }

    // False at the end of the file.
    bool number(int64_t& value) { return fread(&value, sizeof value, 1, file_) == 1; }

    int64_t number() {
        int64_t value = 0;
        if (!number(value)) fail();
        return value;
    }

    std::unique_ptr<Guarded> array() {
        const int64_t bytes = number(), offset = number();
        auto memory = std::make_unique<Guarded>(bytes, offset);
        if (fread(memory->data(), 1, bytes, file_) != size_t(bytes)) fail();
        return memory;
    }

   private:
    [[noreturn]] static void fail() {
        fprintf(stderr, "driver: the request ends in the middle of a case\n");
        _Exit(64);
    }

    FILE* file_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return fprintf(stderr, "usage: driver REQUEST RESPONSE SEED\n"), 64;
    Request request(argv[1]);
    FILE* const response = fopen(argv[2], "wb");
    if (!request.opened() || response == nullptr) return perror("driver"), 64;
    simt::set_seed(strtoull(argv[3], nullptr, 10));
    for (int64_t operation; request.number(operation);) {
        Case c;
        c.numbers.resize(request.number());
        const size_t arrays = request.number();
        for (int64_t& number : c.numbers) number = request.number();
        for (size_t i = 0; i < arrays; ++i) c.arrays.push_back(request.array());
        if (operation < 0 || operation >= int64_t(std::size(kOperations)))
            return fprintf(stderr, "driver: there is no operation %lld\n", static_cast<long long>(operation)),
                   64;
        kOperations[operation](c);
        for (size_t i = 0; i < c.arrays.size(); ++i)
            if (!c.arrays[i]->intact())
                return fprintf(stderr, "driver: the red zone of array %zu was written to\n", i), 4;
        for (size_t i = 0; i < arrays; ++i) fwrite(c.arrays[i]->data(), 1, c.arrays[i]->bytes(), response);
        fflush(response);
    }
    return fclose(response) == 0 ? 0 : 64;
}

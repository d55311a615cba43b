// Products of a few float32 rows with a matrix, as fast as the matrix is read.
//
// Shapes: R rows, K inputs, N outputs in B blocks of 32, the last of which may be filled up with zeros.
//
// A general matrix product is tuned for many rows or for one: with the eight rows of a tree it takes two to three times
// as long as with one. Here up to AT_ONCE rows, a group, share every reading of the weights, and while the groups use one
// segment of them, the next is fetched from memory. A result does not depend on how many rows there are. Compiled for
// this processor's vector instructions (`library.py` passes the flag).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t OUTPUTS = 32;   // of a block
constexpr int64_t SEGMENT = 256;  // inputs at a time: sums lose less, and their weights stay in the cache for all rows
constexpr int64_t STRETCH = 8;    // inputs between two fetches of coming weights
constexpr int64_t LINE = 64;      // bytes of a cache line
constexpr int64_t LINES = STRETCH * OUTPUTS * sizeof(float) / LINE;  // of the weights of a stretch
constexpr int64_t AHEAD = 4096;   // bytes from the weights in use to those that are fetched, if there is one group only

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16, AT_ONCE = 12;  // floats of a register, rows whose sums fit into registers
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8, AT_ONCE = 3;
#else
constexpr int64_t WIDTH = 4, AT_ONCE = 2;
#endif
constexpr int64_t PARTS = OUTPUTS / WIDTH;
using Register = float __attribute__((vector_size(WIDTH * sizeof(float))));

// sums [AT_ONCE, 32] = rows [count, inputs], which begin `stride` apart, times a block [inputs, 32]; count ≤ ROWS. With
// every stretch of inputs, so many lines from `next` on are fetched.
template <int64_t ROWS>
void multiply(int64_t count, const float* rows, int64_t stride, const float* block, int64_t inputs, float* sums,
              const char* next, int64_t lines) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) return multiply<ROWS - 1>(count, rows, stride, block, inputs, sums, next, lines);
    }
    Register sum[ROWS][PARTS] = {};  // stays in registers only if the loops over it are unrolled
    for (int64_t stretch = 0; stretch < inputs; stretch += STRETCH) {
        for (int64_t line = 0; line < lines; ++line, next += LINE) __builtin_prefetch(next);
        for (int64_t k = stretch; k < std::min(stretch + STRETCH, inputs); ++k) {
            Register weights[PARTS];
#pragma GCC unroll 16
            for (int64_t part = 0; part < PARTS; ++part) {
                std::memcpy(&weights[part], block + k * OUTPUTS + part * WIDTH, sizeof(Register));
            }
#pragma GCC unroll 16
            for (int64_t row = 0; row < ROWS; ++row) {
                const float input = rows[row * stride + k];
#pragma GCC unroll 16
                for (int64_t part = 0; part < PARTS; ++part) sum[row][part] += input * weights[part];
            }
        }
    }
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; ++row) {
#pragma GCC unroll 16
        for (int64_t part = 0; part < PARTS; ++part) {
            std::memcpy(sums + row * OUTPUTS + part * WIDTH, &sum[row][part], sizeof(Register));
        }
    }
}

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// [R, N] from rows [R, K] and weights [B, K, 32].
Tensor skinny_matmul(Tensor given, Tensor weights, int64_t outputs) {
    STD_TORCH_CHECK(given.dim() == 2 && given.scalar_type() == ScalarType::Float, "rows must be [R, K] in float32");
    STD_TORCH_CHECK(weights.dim() == 3 && weights.scalar_type() == ScalarType::Float && weights.is_contiguous(),
                    "weights must be [B, K, 32] in float32, contiguous");
    const Tensor rows = given.is_contiguous() ? given : torch::stable::contiguous(given);
    const int64_t count = rows.size(0), inputs = rows.size(1);
    STD_TORCH_CHECK(weights.size(0) == (outputs + OUTPUTS - 1) / OUTPUTS && weights.size(1) == inputs &&
                        weights.size(2) == OUTPUTS,
                    "weights must be the column blocks of a matrix with rows of this length and so many outputs");
    Tensor result = torch::stable::new_empty(rows, {count, outputs});
    if (count == 0) return result;
    const auto* from = static_cast<const float*>(rows.const_data_ptr());
    const auto* blocks = static_cast<const float*>(weights.const_data_ptr());
    auto* results = static_cast<float*>(result.mutable_data_ptr());
    const int64_t grain = std::max<int64_t>(1, (1 << 16) / (inputs * OUTPUTS));  // less is not worth a second thread
    torch::stable::parallel_for(0, weights.size(0), grain, [&](int64_t begin, int64_t end) {
        float sums[AT_ONCE * OUTPUTS];
        for (int64_t block = begin; block < end; ++block) {
            const int64_t first = block * OUTPUTS, width = std::min(OUTPUTS, outputs - first);
            for (int64_t k = 0; k < inputs; k += SEGMENT) {
                const float* part = blocks + (block * inputs + k) * OUTPUTS;
                const int64_t length = std::min(SEGMENT, inputs - k);
                int64_t groups = (count + AT_ONCE - 1) / AT_ONCE;
                const int64_t lines = (LINES + groups - 1) / groups;
                const char* next = reinterpret_cast<const char*>(groups == 1 ? part : part + length * OUTPUTS);
                if (groups == 1) next += AHEAD;
                for (int64_t row = 0, some; row < count; row += some, --groups) {
                    some = (count - row + groups - 1) / groups;  // groups of nearly equal size
                    multiply<AT_ONCE>(some, from + row * inputs + k, inputs, part, length, sums, next, lines);
                    next += (length + STRETCH - 1) / STRETCH * lines * LINE;
                    for (int64_t r = 0; r < some; ++r) {
                        float* to = results + (row + r) * outputs + first;
                        const float* sum = sums + r * OUTPUTS;
                        for (int64_t i = 0; i < width; ++i) to[i] = k == 0 ? sum[i] : to[i] + sum[i];
                    }
                }
            }
        }
    });
    return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(draft_heads, library) {
    library.def("skinny_matmul(Tensor rows, Tensor weights, int outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(draft_heads, CPU, library) { library.impl("skinny_matmul", TORCH_BOX(&skinny_matmul)); }

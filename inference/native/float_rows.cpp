// Products of float32 rows with a matrix, as fast as the matrix is read where the rows are few.
//
// Shapes: R rows, K inputs, N outputs in B blocks of 32, the last of which may be filled up with zeros.
//
// A general product is made for many rows, or for one: with the eight rows of a tree it takes two to three times as long
// as with one. Here twelve rows share every reading. A row's result does not depend on how many rows there are, nor on
// the processor, as long as that multiplies and adds in one.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 32;      // outputs of a block
constexpr int64_t AT_ONCE = 12;    // rows that share the reading of a block
constexpr int64_t AHEAD = 4096;    // bytes of weights that are fetched before they are needed
constexpr int64_t SEGMENT = 256;   // inputs at a time: sums lose less, and their weights stay at hand for all rows

// Sums [R, 32] of a block [K, 32] for at most AT_ONCE rows that begin `stride` apart.
using Kernel = void (*)(const float* rows, int64_t stride, int64_t count, const float* block, int64_t inputs, float* sums);

void sum_plainly(
    const float* rows, int64_t stride, int64_t count, const float* block, int64_t inputs, float* sums) {
    for (int64_t row = 0; row < count; ++row) {
        float sum[LANES] = {};
        for (int64_t k = 0; k < inputs; ++k) {
            const float input = rows[row * stride + k];
            for (int64_t lane = 0; lane < LANES; ++lane) sum[lane] += input * block[k * LANES + lane];
        }
        std::copy_n(sum, LANES, sums + row * LANES);
    }
}

#if defined(__x86_64__)

template <int ROWS>
__attribute__((target("avx512f"))) void sum_rows_avx512(
    const float* rows, int64_t stride, const float* block, int64_t inputs, float* sums) {
    __m512 sum[ROWS][2];
    for (int row = 0; row < ROWS; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; ++k) {
        const float* from = block + k * LANES;
        __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD);
        __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD + 64);
        const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + LANES / 2);
        for (int row = 0; row < ROWS; ++row) {
            const __m512 input = _mm512_set1_ps(rows[row * stride + k]);
            sum[row][0] = _mm512_fmadd_ps(input, low, sum[row][0]);
            sum[row][1] = _mm512_fmadd_ps(input, high, sum[row][1]);
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        _mm512_storeu_ps(sums + row * LANES, sum[row][0]);
        _mm512_storeu_ps(sums + row * LANES + LANES / 2, sum[row][1]);
    }
}

void sum_avx512(const float* rows, int64_t stride, int64_t count, const float* block, int64_t inputs, float* sums) {
    switch (count) {
        case 1: return sum_rows_avx512<1>(rows, stride, block, inputs, sums);
        case 2: return sum_rows_avx512<2>(rows, stride, block, inputs, sums);
        case 3: return sum_rows_avx512<3>(rows, stride, block, inputs, sums);
        case 4: return sum_rows_avx512<4>(rows, stride, block, inputs, sums);
        case 5: return sum_rows_avx512<5>(rows, stride, block, inputs, sums);
        case 6: return sum_rows_avx512<6>(rows, stride, block, inputs, sums);
        case 7: return sum_rows_avx512<7>(rows, stride, block, inputs, sums);
        case 8: return sum_rows_avx512<8>(rows, stride, block, inputs, sums);
        case 9: return sum_rows_avx512<9>(rows, stride, block, inputs, sums);
        case 10: return sum_rows_avx512<10>(rows, stride, block, inputs, sums);
        case 11: return sum_rows_avx512<11>(rows, stride, block, inputs, sums);
        default: return sum_rows_avx512<12>(rows, stride, block, inputs, sums);
    }
}

template <int ROWS>
__attribute__((target("avx2,fma"))) void sum_rows_avx2(
    const float* rows, int64_t stride, const float* block, int64_t inputs, float* sums) {
    __m256 sum[ROWS][4];
    for (int row = 0; row < ROWS; ++row) {
        for (int quarter = 0; quarter < 4; ++quarter) sum[row][quarter] = _mm256_setzero_ps();
    }
    for (int64_t k = 0; k < inputs; ++k) {
        const float* from = block + k * LANES;
        __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD);
        __builtin_prefetch(reinterpret_cast<const char*>(from) + AHEAD + 64);
        __m256 input[ROWS];
        for (int row = 0; row < ROWS; ++row) input[row] = _mm256_set1_ps(rows[row * stride + k]);
        for (int quarter = 0; quarter < 4; ++quarter) {
            const __m256 weights = _mm256_loadu_ps(from + quarter * 8);
            for (int row = 0; row < ROWS; ++row) {
                sum[row][quarter] = _mm256_fmadd_ps(input[row], weights, sum[row][quarter]);
            }
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int quarter = 0; quarter < 4; ++quarter) {
            _mm256_storeu_ps(sums + row * LANES + quarter * 8, sum[row][quarter]);
        }
    }
}

void sum_avx2(const float* rows, int64_t stride, int64_t count, const float* block, int64_t inputs, float* sums) {
    constexpr int64_t most = 3;  // as many rows' sums as there are registers for
    for (int64_t row = 0; row < count; row += most) {
        const float* from = rows + row * stride;
        float* to = sums + row * LANES;
        switch (std::min(most, count - row)) {
            case 1: sum_rows_avx2<1>(from, stride, block, inputs, to); break;
            case 2: sum_rows_avx2<2>(from, stride, block, inputs, to); break;
            default: sum_rows_avx2<3>(from, stride, block, inputs, to);
        }
    }
}

#endif

// The kernel for a set of instructions: 0 the fastest of this processor's, 1 none special, 2 AVX2, 3 AVX-512.
Kernel kernel_of(int64_t instructions) {
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (instructions == 3 || (instructions == 0 && avx512)) return avx512 ? sum_avx512 : nullptr;
    if (instructions == 2 || (instructions == 0 && avx2)) return avx2 ? sum_avx2 : nullptr;
#endif
    return instructions < 2 ? sum_plainly : nullptr;
}

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor product(const Tensor& given, const Tensor& weights, int64_t outputs, Kernel kernel) {
    STD_TORCH_CHECK(given.dim() == 2 && given.scalar_type() == ScalarType::Float, "rows must be [R, K] in float32");
    STD_TORCH_CHECK(weights.dim() == 3 && weights.scalar_type() == ScalarType::Float && weights.is_contiguous(),
                    "weights must be [B, K, 32] in float32, contiguous");
    const Tensor rows = given.is_contiguous() ? given : torch::stable::contiguous(given);
    const int64_t count = rows.size(0), inputs = rows.size(1);
    STD_TORCH_CHECK(weights.size(0) == (outputs + LANES - 1) / LANES && weights.size(1) == inputs &&
                        weights.size(2) == LANES,
                    "weights must be made for rows of this length and so many outputs");
    Tensor result = torch::stable::new_empty(rows, {count, outputs});
    const auto* from = static_cast<const float*>(rows.const_data_ptr());
    const auto* blocks = static_cast<const float*>(weights.const_data_ptr());
    auto* results = static_cast<float*>(result.mutable_data_ptr());
    const int64_t grain = std::max<int64_t>(1, (1 << 16) / (inputs * LANES));  // less is not worth a second thread
    torch::stable::parallel_for(0, weights.size(0), grain, [&](int64_t begin, int64_t end) {
        float sums[AT_ONCE * LANES];
        for (int64_t block = begin; block < end; ++block) {
            const int64_t first = block * LANES, lanes = std::min(LANES, outputs - first);
            for (int64_t k = 0; k < inputs; k += SEGMENT) {
                const float* part = blocks + (block * inputs + k) * LANES;
                const int64_t length = std::min(SEGMENT, inputs - k);
                for (int64_t row = 0; row < count; row += AT_ONCE) {
                    const int64_t some = std::min(AT_ONCE, count - row);
                    kernel(from + row * inputs + k, inputs, some, part, length, sums);
                    for (int64_t r = 0; r < some; ++r) {
                        float* to = results + (row + r) * outputs + first;
                        const float* sum = sums + r * LANES;
                        for (int64_t lane = 0; lane < lanes; ++lane) to[lane] = k == 0 ? sum[lane] : to[lane] + sum[lane];
                    }
                }
            }
        }
    });
    return result;
}

// [R, N] from rows [R, K] and weights [B, K, 32].
Tensor float_rows(Tensor rows, Tensor weights, int64_t outputs) {
    static const Kernel fastest = kernel_of(0);
    return product(rows, weights, outputs, fastest);
}

// The same with certain instructions.
Tensor float_rows_by(Tensor rows, Tensor weights, int64_t outputs, int64_t instructions) {
    const Kernel kernel = kernel_of(instructions);
    STD_TORCH_CHECK(kernel != nullptr, "this processor has not these instructions");
    return product(rows, weights, outputs, kernel);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(draft_heads, library) {
    library.def("float_rows(Tensor rows, Tensor weights, int outputs) -> Tensor");
    library.def("float_rows_by(Tensor rows, Tensor weights, int outputs, int instructions) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(draft_heads, CPU, library) {
    library.impl("float_rows", TORCH_BOX(&float_rows));
    library.impl("float_rows_by", TORCH_BOX(&float_rows_by));
}

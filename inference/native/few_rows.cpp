// Products of a few float32 rows with a matrix in eight bits, as fast as the matrix is read.
//
// Shapes: R rows, K inputs, N outputs in B blocks of 16, the last of which may be filled up.
//
// The rows are rounded to as many bits as let K products be summed in 32 (15 up to K = 516), which is close enough to
// exact; the weights are what rounding costs. Sums of integers are exact, so every processor gives the same answer.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;        // outputs of a block
constexpr int64_t PAIR = 2 * LANES;  // weights of a block for two neighbouring inputs
constexpr int64_t AHEAD = 1024;      // bytes of weights that are fetched before they are needed
constexpr int64_t AT_ONCE = 8;       // rows that share the reading of a block

// Two neighbouring inputs of a row as one integer, the first in the lower half.
using Pair = int32_t;

// Sums [R, 16] of a block for `rows` of at most AT_ONCE rows, whose inputs lie side by side: [pairs, AT_ONCE].
using Kernel = void (*)(const Pair* inputs, int64_t rows, const int8_t* block, int64_t pairs, int32_t* sums);

void sum_plainly(const Pair* inputs, int64_t rows, const int8_t* block, int64_t pairs, int32_t* sums) {
    std::fill(sums, sums + rows * LANES, 0);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const Pair both = inputs[pair * AT_ONCE + row];
            const int32_t first = static_cast<int16_t>(both & 0xffff), second = both >> 16;
            for (int64_t lane = 0; lane < LANES; ++lane) {
                const int8_t* weights = block + pair * PAIR + 2 * lane;
                sums[row * LANES + lane] += first * weights[0] + second * weights[1];
            }
        }
    }
}

#if defined(__x86_64__)

template <int ROWS, int CHAINS>
__attribute__((target("avx512f,avx512bw,avx512vnni"))) void sum_rows_avx512(
    const Pair* inputs, const int8_t* block, int64_t pairs, int32_t* sums) {
    // CHAINS sums of every row, so that one addition need not wait for the one before
    __m512i sum[ROWS][CHAINS];
    for (int row = 0; row < ROWS; ++row) {
        for (int chain = 0; chain < CHAINS; ++chain) sum[row][chain] = _mm512_setzero_si512();
    }
    int64_t pair = 0;
    for (; pair + CHAINS <= pairs; pair += CHAINS) {
        for (int chain = 0; chain < CHAINS; ++chain) {
            const int8_t* from = block + (pair + chain) * PAIR;
            __builtin_prefetch(from + AHEAD);
            const __m512i weights = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
            for (int row = 0; row < ROWS; ++row) {
                const __m512i both = _mm512_set1_epi32(inputs[(pair + chain) * AT_ONCE + row]);
                sum[row][chain] = _mm512_dpwssd_epi32(sum[row][chain], weights, both);
            }
        }
    }
    for (; pair < pairs; ++pair) {
        const auto* from = reinterpret_cast<const __m256i*>(block + pair * PAIR);
        const __m512i weights = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from));
        for (int row = 0; row < ROWS; ++row) {
            const __m512i both = _mm512_set1_epi32(inputs[pair * AT_ONCE + row]);
            sum[row][0] = _mm512_dpwssd_epi32(sum[row][0], weights, both);
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int chain = 1; chain < CHAINS; ++chain) sum[row][0] = _mm512_add_epi32(sum[row][0], sum[row][chain]);
        _mm512_storeu_si512(sums + row * LANES, sum[row][0]);
    }
}

void sum_avx512(const Pair* inputs, int64_t rows, const int8_t* block, int64_t pairs, int32_t* sums) {
    switch (rows) {
        case 1: return sum_rows_avx512<1, 4>(inputs, block, pairs, sums);
        case 2: return sum_rows_avx512<2, 4>(inputs, block, pairs, sums);
        case 3: return sum_rows_avx512<3, 2>(inputs, block, pairs, sums);
        case 4: return sum_rows_avx512<4, 2>(inputs, block, pairs, sums);
        case 5: return sum_rows_avx512<5, 2>(inputs, block, pairs, sums);
        case 6: return sum_rows_avx512<6, 2>(inputs, block, pairs, sums);
        case 7: return sum_rows_avx512<7, 2>(inputs, block, pairs, sums);
        default: return sum_rows_avx512<8, 2>(inputs, block, pairs, sums);
    }
}

template <int ROWS>
__attribute__((target("avx2"))) void sum_rows_avx2(
    const Pair* inputs, const int8_t* block, int64_t pairs, int32_t* sums) {
    __m256i sum[ROWS][2];
    for (int row = 0; row < ROWS; ++row) sum[row][0] = sum[row][1] = _mm256_setzero_si256();
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const auto* eight = reinterpret_cast<const __m128i*>(block + pair * PAIR);
        __builtin_prefetch(block + pair * PAIR + AHEAD);
        const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(eight));
        const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(eight + 1));
        for (int row = 0; row < ROWS; ++row) {
            const __m256i both = _mm256_set1_epi32(inputs[pair * AT_ONCE + row]);
            sum[row][0] = _mm256_add_epi32(sum[row][0], _mm256_madd_epi16(low, both));
            sum[row][1] = _mm256_add_epi32(sum[row][1], _mm256_madd_epi16(high, both));
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        for (int half = 0; half < 2; ++half) {
            auto* place = reinterpret_cast<__m256i*>(sums + row * LANES + half * LANES / 2);
            _mm256_storeu_si256(place, sum[row][half]);
        }
    }
}

void sum_avx2(const Pair* inputs, int64_t rows, const int8_t* block, int64_t pairs, int32_t* sums) {
    constexpr int64_t most = 4;  // as many rows' sums as there are registers for
    for (int64_t row = 0; row < rows; row += most) {
        const Pair* from = inputs + row;
        int32_t* to = sums + row * LANES;
        switch (std::min(most, rows - row)) {
            case 1: sum_rows_avx2<1>(from, block, pairs, to); break;
            case 2: sum_rows_avx2<2>(from, block, pairs, to); break;
            case 3: sum_rows_avx2<3>(from, block, pairs, to); break;
            default: sum_rows_avx2<4>(from, block, pairs, to);
        }
    }
}

#endif

// The kernel for a set of instructions: 0 the fastest of this processor's, 1 none special, 2 AVX2, 3 AVX-512 VNNI.
Kernel kernel_of(int64_t instructions) {
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
    const bool avx2 = __builtin_cpu_supports("avx2");
    if (instructions == 3 || (instructions == 0 && avx512)) return avx512 ? sum_avx512 : nullptr;
    if (instructions == 2 || (instructions == 0 && avx2)) return avx2 ? sum_avx2 : nullptr;
#endif
    return instructions < 2 ? sum_plainly : nullptr;
}

// Rows rounded to integers: row ≈ integers · step.
struct Rounded {
    std::vector<Pair> pairs;   // [R/8, K/2, 8]
    std::vector<float> steps;  // [R]
};

// The nearest integer, in 16 bits: beside so large a number a fraction is lost, which takes no call of a function.
uint16_t whole(float value) {
    constexpr float large = 1.5f * (1 << 23);
    return static_cast<uint16_t>(static_cast<int32_t>((value + large) - large));
}

// The largest absolute value, at least one so small that nothing is lost and by which can still be divided.
float largest_of(const float* values, int64_t count) {
    float largest[LANES];
    std::fill(largest, largest + LANES, 1e-30f);
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) {
        for (int64_t lane = 0; lane < LANES; ++lane) {
            const float value = std::abs(values[k + lane]);
            largest[lane] = value > largest[lane] ? value : largest[lane];
        }
    }
    for (; k < count; ++k) largest[0] = std::max(largest[0], std::abs(values[k]));
    return *std::max_element(largest, largest + LANES);
}

Rounded rounded(const float* rows, int64_t count, int64_t inputs, int64_t pairs) {
    constexpr int64_t most_weight = 127, short_limit = std::numeric_limits<int16_t>::max();
    const int64_t sum_limit = std::numeric_limits<int32_t>::max() / (most_weight * std::max<int64_t>(inputs, 1));
    const auto most = static_cast<float>(std::min(short_limit, sum_limit));
    const int64_t groups = (count + AT_ONCE - 1) / AT_ONCE;
    Rounded result{std::vector<Pair>(groups * pairs * AT_ONCE), std::vector<float>(count)};
    for (int64_t row = 0; row < count; ++row) {
        const float* from = rows + row * inputs;
        const float largest = largest_of(from, inputs), scale = most / largest;
        Pair* to = result.pairs.data() + row / AT_ONCE * pairs * AT_ONCE + row % AT_ONCE;
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const uint16_t first = whole(from[2 * pair] * scale);
            const uint16_t second = 2 * pair + 1 < inputs ? whole(from[2 * pair + 1] * scale) : 0;
            to[pair * AT_ONCE] = static_cast<Pair>(first | static_cast<uint32_t>(second) << 16);
        }
        result.steps[row] = largest / most;
    }
    return result;
}

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor product(const Tensor& given, const Tensor& weights, const Tensor& scale, Kernel kernel) {
    STD_TORCH_CHECK(given.dim() == 2 && given.scalar_type() == ScalarType::Float, "rows must be [R, K] in float32");
    const Tensor rows = given.is_contiguous() ? given : torch::stable::contiguous(given);
    STD_TORCH_CHECK(weights.dim() == 3 && weights.scalar_type() == ScalarType::Char && weights.is_contiguous(),
                    "weights must be [B, K/2, 32] in int8, contiguous");
    STD_TORCH_CHECK(scale.dim() == 1 && scale.scalar_type() == ScalarType::Float && scale.is_contiguous(),
                    "scale must be [N] in float32, contiguous");
    const int64_t count = rows.size(0), inputs = rows.size(1), outputs = scale.size(0), pairs = weights.size(1);
    STD_TORCH_CHECK(pairs == (inputs + 1) / 2 && weights.size(0) == (outputs + LANES - 1) / LANES &&
                        weights.size(2) == PAIR,
                    "weights must be made for rows of this length and as many outputs as there are scales");
    const Rounded integers = rounded(static_cast<const float*>(rows.const_data_ptr()), count, inputs, pairs);
    Tensor result = torch::stable::new_empty(rows, {count, outputs});
    const auto* blocks = static_cast<const int8_t*>(weights.const_data_ptr());
    const auto* scales = static_cast<const float*>(scale.const_data_ptr());
    auto* results = static_cast<float*>(result.mutable_data_ptr());
    const int64_t grain = std::max<int64_t>(1, (1 << 18) / (pairs * PAIR));  // less is not worth a second thread
    torch::stable::parallel_for(0, weights.size(0), grain, [&](int64_t begin, int64_t end) {
        int32_t sums[AT_ONCE * LANES];
        for (int64_t block = begin; block < end; ++block) {
            const int64_t first = block * LANES, lanes = std::min(LANES, outputs - first);
            for (int64_t row = 0; row < count; row += AT_ONCE) {
                const int64_t some = std::min(AT_ONCE, count - row);
                kernel(integers.pairs.data() + row * pairs, some, blocks + block * pairs * PAIR, pairs, sums);
                for (int64_t r = 0; r < some; ++r) {
                    const float step = integers.steps[row + r];
                    float* to = results + (row + r) * outputs + first;
                    for (int64_t lane = 0; lane < lanes; ++lane) {
                        to[lane] = static_cast<float>(sums[r * LANES + lane]) * step * scales[first + lane];
                    }
                }
            }
        }
    });
    return result;
}

// [R, N] from rows [R, K], weights [B, K/2, 32] and the scale [N] of every output.
Tensor few_rows(Tensor rows, Tensor weights, Tensor scale) {
    static const Kernel fastest = kernel_of(0);
    return product(rows, weights, scale, fastest);
}

// The same with certain instructions.
Tensor few_rows_by(Tensor rows, Tensor weights, Tensor scale, int64_t instructions) {
    const Kernel kernel = kernel_of(instructions);
    STD_TORCH_CHECK(kernel != nullptr, "this processor has not these instructions");
    return product(rows, weights, scale, kernel);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(draft_heads, library) {
    library.def("few_rows(Tensor rows, Tensor weights, Tensor scale) -> Tensor");
    library.def("few_rows_by(Tensor rows, Tensor weights, Tensor scale, int instructions) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(draft_heads, CPU, library) {
    library.impl("few_rows", TORCH_BOX(&few_rows));
    library.impl("few_rows_by", TORCH_BOX(&few_rows_by));
}

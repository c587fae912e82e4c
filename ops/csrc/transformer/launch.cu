#include "launch.h"

#include "kernels.cuh"
#include "softmax.cuh"

#include <type_traits>

namespace dsjob {
namespace {

constexpr int kThreads = 256, kBlocks = 1024;
constexpr int kLongest = 1024, kRows = 4;  // the keys of a row that a warp computes, and the warps of a block
static_assert((kWidest + kWarp) * sizeof(float) <= 48 << 10, "a row and the sums of warps must fit into shared memory");
static_assert(kRows * kLongest <= kWidest, "the rows of a block must fit into shared memory");

// Calls `start` with a null pointer of the element type.
template <typename Start>
cudaError_t start_with(Kind kind, Start start) {
    switch (kind) {
        case Kind::fp32: start(static_cast<float*>(nullptr)); break;
        case Kind::fp16: start(static_cast<__half*>(nullptr)); break;
        case Kind::bf16: start(static_cast<__nv_bfloat16*>(nullptr)); break;
    }
    return cudaGetLastError();
}

template <typename Start>
cudaError_t run(Kind kind, Shape shape, Start start) {
    if (shape.width <= 0 || shape.width % 4 || shape.width > kWidest || shape.rows < 0 || shape.rows > INT32_MAX)
        return cudaErrorInvalidValue;
    if (shape.rows == 0) return cudaSuccess;  // a grid of no blocks is an error
    return start_with(kind, start);
}

// `start` also gets whether a block computes a row, and whether rows are packed: two values of std::bool_constant.
template <typename Start>
cudaError_t run(Kind kind, Scores shape, Start start) {
    const std::int64_t rows = shape.batch * shape.heads * shape.queries;
    if (shape.keys <= 0 || shape.keys > kWidest || rows < 0 || rows > INT32_MAX) return cudaErrorInvalidValue;
    if (rows == 0) return cudaSuccess;
    return start_with(kind, [&](auto* t) {
        const bool by_block = shape.keys > kLongest, packed = shape.keys % 4 == 0;
        const unsigned blocks = by_block ? unsigned(rows) : unsigned((rows + kRows - 1) / kRows);
        const unsigned threads = by_block ? kThreads : kRows * kWarp;
        const std::size_t memory = (by_block ? 1 : kRows) * shape.keys * sizeof(float);
        using Yes = std::true_type;
        using No = std::false_type;
        if (by_block && packed) start(t, Yes(), Yes(), blocks, threads, memory);
        if (by_block && !packed) start(t, Yes(), No(), blocks, threads, memory);
        if (!by_block && packed) start(t, No(), Yes(), blocks, threads, memory);
        if (!by_block && !packed) start(t, No(), No(), blocks, threads, memory);
    });
}

template <typename T>
const T* as(const void* pointer, T*) {
    return static_cast<const T*>(pointer);
}

template <typename T>
T* as(void* pointer, T*) {
    return static_cast<T*>(pointer);
}

template <typename T>
Normed<T> describe(const T* z_or_y, const T* weight, const T* norm_bias, const float* mean, const float* slope) {
    return {z_or_y, weight, norm_bias, mean, slope};
}

// A thread for each four elements of a row, in whole warps.
unsigned count_threads(int width) {
    const int threads = (width / 4 + kWarp - 1) / kWarp * kWarp;
    return unsigned(threads < kThreads ? threads : kThreads);
}

dim3 make_grid(Shape shape) {
    return dim3(unsigned(shape.width + 4 * kColumns - 1) / (4 * kColumns), unsigned(count_slices(shape)));
}

template <typename T>
void add_up(const float* slices, T* out, Shape shape, unsigned kinds, cudaStream_t stream) {
    const dim3 grid(unsigned(shape.width + kThreads - 1) / kThreads, kinds);
    add_slices<<<grid, kThreads, 0, stream>>>(slices, out, count_slices(shape), shape.width);
}

}  // namespace

int count_slices(Shape shape) {
    // As many as fill a GPU, but no thread has fewer rows than it loads ahead. No property of the GPU counts: sums are
    // the same on all.
    const std::int64_t across = (shape.width + 4 * kColumns - 1) / (4 * kColumns), most = (kBlocks + across - 1) / across;
    const std::int64_t useful = (shape.rows + kStripes * kAhead - 1) / (kStripes * kAhead);
    return int(useful < most ? (useful ? useful : 1) : most);
}

cudaError_t bias_gelu(Kind kind, Shape shape, const void* x, const void* bias, void* out, cudaStream_t stream) {
    return run(kind, shape, [&](auto* t) {
        bias_gelu<<<make_grid(shape), dim3(kColumns, kStripes), 0, stream>>>(
            as(x, t), as(bias, t), as(out, t), shape.rows, shape.width
        );
    });
}

cudaError_t bias_gelu_backward(
    Kind kind, Shape shape, const void* gradient, const void* x, const void* bias, void* to_x, void* to_bias,
    float* slices, cudaStream_t stream
) {
    return run(kind, shape, [&](auto* t) {
        bias_gelu_backward<<<make_grid(shape), dim3(kColumns, kStripes), 0, stream>>>(
            as(gradient, t), as(x, t), as(bias, t), as(to_x, t), slices, shape.rows, shape.width
        );
        add_up(slices, as(to_bias, t), shape, 1, stream);
    });
}

cudaError_t drop_add_norm(
    Kind kind, Shape shape, Dropout dropout, float eps, const void* x, const void* bias, const void* residual,
    const void* weight, const void* norm_bias, void* z, void* y, std::uint8_t* kept, float* mean, float* slope,
    cudaStream_t stream
) {
    return run(kind, shape, [&](auto* t) {
        drop_add_norm<<<unsigned(shape.rows), count_threads(shape.width), shape.width * sizeof(float), stream>>>(
            as(x, t), as(bias, t), as(residual, t), as(weight, t), as(norm_bias, t), as(z, t), as(y, t), kept, mean,
            slope, dropout.ratio, dropout.seed, dropout.offset, eps, shape.width
        );
    });
}

cudaError_t drop_add_norm_backward(
    Kind kind, Shape shape, Dropout dropout, const void* gradient, const void* added, const void* z_or_y,
    const void* weight, const void* norm_bias, const float* mean, const float* slope, const std::uint8_t* kept,
    void* to_residual, void* to_x, void* sums, float* slices, cudaStream_t stream
) {
    return run(kind, shape, [&](auto* t) {
        const auto normed = describe(as(z_or_y, t), as(weight, t), as(norm_bias, t), mean, slope);
        drop_add_norm_backward<<<unsigned(shape.rows), count_threads(shape.width), 0, stream>>>(
            as(gradient, t), as(added, t), normed, kept, dropout.ratio, as(to_residual, t), as(to_x, t), shape.width
        );
        sum_norm<<<make_grid(shape), dim3(kColumns, kStripes), 0, stream>>>(
            as(gradient, t), as(to_x ? to_x : to_residual, t), normed, slices, shape.rows, shape.width
        );
        add_up(slices, as(sums, t), shape, 3, stream);
    });
}

cudaError_t softmax_drop(
    Kind kind, Scores shape, Dropout dropout, const void* scores, Mask mask, float scale, void* dropped,
    void* probabilities, std::uint8_t* kept, cudaStream_t stream
) {
    return run(kind, shape, [&](auto* t, auto by_block, auto packed, unsigned blocks, unsigned threads, size_t memory) {
        using T = std::remove_pointer_t<decltype(t)>;
        softmax_drop<T, by_block(), packed()><<<blocks, threads, memory, stream>>>(
            shape, dropout, as(scores, t), mask, scale, as(dropped, t), as(probabilities, t), kept
        );
    });
}

cudaError_t softmax_drop_backward(
    Kind kind, Scores shape, Dropout dropout, const void* gradient, const void* probabilities,
    const std::uint8_t* kept, float scale, void* to_scores, void* dropped, cudaStream_t stream
) {
    return run(kind, shape, [&](auto* t, auto by_block, auto packed, unsigned blocks, unsigned threads, size_t memory) {
        using T = std::remove_pointer_t<decltype(t)>;
        softmax_drop_backward<T, by_block(), packed()><<<blocks, threads, memory, stream>>>(
            shape, dropout.ratio, as(gradient, t), as(probabilities, t), kept, scale, as(to_scores, t), as(dropped, t)
        );
    });
}

}  // namespace dsjob

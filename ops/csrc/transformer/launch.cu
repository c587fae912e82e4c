#include "launch.h"

#include "kernels.cuh"

namespace dsjob {
namespace {

constexpr int kThreads = 256;
static_assert((kWidest + kWarp) * sizeof(float) <= 48 << 10, "a row and the sums of warps must fit into shared memory");

// Calls `start` with a null pointer of the element type.
template <typename Start>
cudaError_t run(Kind kind, Shape shape, Start start) {
    if (shape.width <= 0 || shape.width % 4 || shape.width > kWidest || shape.rows < 0 || shape.rows > INT32_MAX)
        return cudaErrorInvalidValue;
    if (shape.rows == 0) return cudaSuccess;  // a grid of no blocks is an error
    switch (kind) {
        case Kind::fp32: start(static_cast<float*>(nullptr)); break;
        case Kind::fp16: start(static_cast<__half*>(nullptr)); break;
        case Kind::bf16: start(static_cast<__nv_bfloat16*>(nullptr)); break;
    }
    return cudaGetLastError();
}

template <typename T>
const T* as(const void* pointer, T*) {
    return static_cast<const T*>(pointer);
}

template <typename T>
T* as(void* pointer, T*) {
    return static_cast<T*>(pointer);
}

unsigned count_blocks(std::int64_t count) {
    const std::int64_t blocks = (count + kThreads - 1) / kThreads;
    return unsigned(blocks < 65536 ? blocks : 65536);  // the kernels loop over the rest
}

}  // namespace

cudaError_t bias_gelu(Kind kind, Shape shape, const void* x, const void* bias, void* out, cudaStream_t stream) {
    const std::int64_t count = shape.rows * shape.width;
    return run(kind, shape, [&](auto* t) {
        bias_gelu<<<count_blocks(count), kThreads, 0, stream>>>(as(x, t), as(bias, t), as(out, t), count, shape.width);
    });
}

cudaError_t bias_gelu_backward(
    Kind kind, Shape shape, const void* gradient, const void* x, const void* bias, void* to_x, cudaStream_t stream
) {
    const std::int64_t count = shape.rows * shape.width;
    return run(kind, shape, [&](auto* t) {
        bias_gelu_backward<<<count_blocks(count), kThreads, 0, stream>>>(
            as(gradient, t), as(x, t), as(bias, t), as(to_x, t), count, shape.width
        );
    });
}

cudaError_t drop_add_norm(
    Kind kind, Shape shape, Dropout dropout, float eps, const void* x, const void* bias, const void* residual,
    const void* weight, const void* norm_bias, void* z, void* y, std::uint8_t* kept, float* mean, float* slope,
    cudaStream_t stream
) {
    return run(kind, shape, [&](auto* t) {
        drop_add_norm<<<unsigned(shape.rows), kThreads, shape.width * sizeof(float), stream>>>(
            as(x, t), as(bias, t), as(residual, t), as(weight, t), as(norm_bias, t), as(z, t), as(y, t), kept, mean,
            slope, dropout.ratio, dropout.seed, dropout.offset, eps, shape.width
        );
    });
}

cudaError_t drop_add_norm_backward(
    Kind kind, Shape shape, Dropout dropout, const void* gradient, const void* added, const void* z_or_y,
    const void* weight, const void* norm_bias, const float* mean, const float* slope, const std::uint8_t* kept,
    void* to_residual, void* to_x, cudaStream_t stream
) {
    return run(kind, shape, [&](auto* t) {
        drop_add_norm_backward<<<unsigned(shape.rows), kThreads, 0, stream>>>(
            as(gradient, t), as(added, t), as(z_or_y, t), as(weight, t), as(norm_bias, t), mean, slope, kept,
            dropout.ratio, as(to_residual, t), as(to_x, t), shape.width
        );
    });
}

cudaError_t sum_columns(
    Kind kind, Shape shape, const void* gradient, const void* z_or_y, const void* weight, const void* norm_bias,
    const float* mean, const float* slope, float* to_weight, float* to_bias, cudaStream_t stream
) {
    const dim3 block(kColumns, kStripes);
    return run(kind, shape, [&](auto* t) {
        sum_columns<<<(shape.width + kColumns - 1) / kColumns, block, 0, stream>>>(
            as(gradient, t), as(z_or_y, t), as(weight, t), as(norm_bias, t), mean, slope, to_weight, to_bias,
            shape.rows, shape.width
        );
    });
}

}  // namespace dsjob

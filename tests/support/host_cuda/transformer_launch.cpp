// Starts the kernels of the transformer layer on a CPU, in fp32.
#include "../cuda_on_host.h"
#include "kernels.cuh"
#include "launch.h"

namespace dsjob {
namespace {

const Index kBlock = {32, 1, 1};

const float* in(const void* pointer) { return static_cast<const float*>(pointer); }
float* out(void* pointer) { return static_cast<float*>(pointer); }

template <typename Kernel>
cudaError_t run(Kind kind, unsigned blocks, Index block, Kernel kernel) {
    if (kind != Kind::fp32) return cudaErrorInvalidValue;
    launch(blocks, block, kernel);
    return cudaSuccess;
}

}  // namespace

cudaError_t bias_gelu(Kind kind, Shape shape, const void* x, const void* bias, void* y, cudaStream_t) {
    return run(kind, 2, kBlock, [=] { bias_gelu(in(x), in(bias), out(y), shape.rows * shape.width, shape.width); });
}

cudaError_t bias_gelu_backward(Kind kind, Shape shape, const void* gradient, const void* x, const void* bias,
                               void* to_x, cudaStream_t) {
    return run(kind, 2, kBlock, [=] {
        bias_gelu_backward(in(gradient), in(x), in(bias), out(to_x), shape.rows * shape.width, shape.width);
    });
}

cudaError_t drop_add_norm(Kind kind, Shape shape, Dropout dropout, float eps, const void* x, const void* bias,
                          const void* residual, const void* weight, const void* norm_bias, void* z, void* y,
                          std::uint8_t* kept, float* mean, float* slope, cudaStream_t) {
    return run(kind, unsigned(shape.rows), kBlock, [=] {
        drop_add_norm(in(x), in(bias), in(residual), in(weight), in(norm_bias), out(z), out(y), kept, mean, slope,
                      dropout.ratio, dropout.seed, dropout.offset, eps, shape.width);
    });
}

cudaError_t drop_add_norm_backward(Kind kind, Shape shape, Dropout dropout, const void* gradient, const void* added,
                                   const void* z_or_y, const void* weight, const void* norm_bias, const float* mean,
                                   const float* slope, const std::uint8_t* kept, void* to_residual, void* to_x,
                                   cudaStream_t) {
    return run(kind, unsigned(shape.rows), kBlock, [=] {
        drop_add_norm_backward(in(gradient), in(added), in(z_or_y), in(weight), in(norm_bias), mean, slope, kept,
                               dropout.ratio, out(to_residual), out(to_x), shape.width);
    });
}

cudaError_t sum_columns(Kind kind, Shape shape, const void* gradient, const void* z_or_y, const void* weight,
                        const void* norm_bias, const float* mean, const float* slope, float* to_weight, float* to_bias,
                        cudaStream_t) {
    return run(kind, unsigned(shape.width + kColumns - 1) / kColumns, {kColumns, kStripes, 1}, [=] {
        sum_columns(in(gradient), in(z_or_y), in(weight), in(norm_bias), mean, slope, to_weight, to_bias, shape.rows,
                    shape.width);
    });
}

}  // namespace dsjob

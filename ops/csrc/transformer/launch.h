// Starts the kernels of the transformer layer on a stream, by raw pointers. Nothing here knows torch.
//
// nvcc compiles the kernels for sm_80 and sm_90, and tests run them on a CPU (`tests/ops/test_transformer_kernels.py`).
// They have not run on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dsjob {

enum class Kind { fp32, fp16, bf16 };  // of all tensors that are void*; [rows, width], or [width] for parameters

// Floats in the 48 KiB of shared memory that a block has on every GPU, less those for the sums of its warps.
constexpr int kWidest = 12256;

struct Shape {
    std::int64_t rows;
    int width;  // a multiple of 4; at most kWidest
};

struct Dropout {
    float ratio;  // 0: none
    std::uint64_t seed, offset;  // of the generator; the offset counts numbers
};

struct Scores {
    std::int64_t batch, heads, queries;
    int keys;  // at most kWidest
};

struct Mask {
    const void* numbers;  // to add to scores, or null
    std::int64_t by_batch, by_head, by_query;  // strides in elements; 0 where all share a number. Keys are adjacent.
};

// The sums over the rows come from this many slices of the rows.
int count_slices(Shape);

// Each returns what the launch reported, or cudaErrorInvalidValue for a shape that the kernels do not take. What the
// pointers are is described beside the kernels. Tensors that are void* begin at a multiple of 4 elements. slices: memory
// for the sums of slices, fp32 [1 or 3, count_slices, width].
cudaError_t bias_gelu(Kind, Shape, const void* x, const void* bias, void* out, cudaStream_t);
cudaError_t bias_gelu_backward(
    Kind, Shape, const void* gradient, const void* x, const void* bias, void* to_x, void* to_bias, float* slices,
    cudaStream_t
);
cudaError_t drop_add_norm(
    Kind, Shape, Dropout, float eps, const void* x, const void* bias, const void* residual, const void* weight,
    const void* norm_bias, void* z, void* y, std::uint8_t* kept, float* mean, float* slope, cudaStream_t
);
// sums: [3, width], the gradients of weight, norm_bias and bias.
cudaError_t drop_add_norm_backward(
    Kind, Shape, Dropout, const void* gradient, const void* added, const void* z_or_y, const void* weight,
    const void* norm_bias, const float* mean, const float* slope, const std::uint8_t* kept, void* to_residual,
    void* to_x, void* sums, float* slices, cudaStream_t
);
cudaError_t softmax_drop(
    Kind, Scores, Dropout, const void* scores, Mask, float scale, void* dropped, void* probabilities,
    std::uint8_t* kept, cudaStream_t
);
cudaError_t softmax_drop_backward(
    Kind, Scores, Dropout, const void* gradient, const void* probabilities, const std::uint8_t* kept, float scale,
    void* to_scores, void* dropped, cudaStream_t
);

}  // namespace dsjob

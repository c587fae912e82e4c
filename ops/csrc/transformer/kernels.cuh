// The kernels of the transformer layer that are not matrix products. Nothing here knows torch.
//
// Tensors are [rows, width], contiguous, in a type T; sums are fp32. Every sum has a fixed order, so results are the same
// from run to run.
#pragma once

#include "numbers.h"

namespace dsjob {

constexpr int kWarp = 32;
constexpr int kColumns = 32, kStripes = 8;  // the block of kernels that sum columns

// out = gelu(x + bias)
template <typename T>
__global__ void bias_gelu(const T* x, const T* bias, T* out, std::int64_t count, int width) {
    const std::int64_t step = std::int64_t(gridDim.x) * blockDim.x;
    for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        narrow(gelu(widen(x[i]) + widen(bias[i % width])), out + i);
}

// to_x = gradient * gelu'(x + bias). The gradient of the bias is the sum of its columns.
template <typename T>
__global__ void bias_gelu_backward(
    const T* gradient, const T* x, const T* bias, T* to_x, std::int64_t count, int width
) {
    const std::int64_t step = std::int64_t(gridDim.x) * blockDim.x;
    for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        narrow(widen(gradient[i]) * gelu_slope(widen(x[i]) + widen(bias[i % width])), to_x + i);
}

// The sum of `value` over the threads of a block of whole warps; every thread gets it. partial: shared, one per warp.
DSJOB_DEVICE float sum_block(float value, float* partial) {
    for (int step = kWarp / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    __syncthreads();  // the last call's readers are done
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < int(blockDim.x) / kWarp; ++warp) total += partial[warp];
    return total;
}

// z = residual + dropout(x + bias); y = (z - mean) * slope * weight + norm_bias, where slope is 1 / sqrt(variance + eps).
//
// A block for each row; width is a multiple of 4, and `width` floats of shared memory hold the row. z, mean and kept may
// be null: an invertible norm keeps y and slope only, and without dropout (a ratio of 0) nothing is drawn.
template <typename T>
__global__ void drop_add_norm(
    const T* x, const T* bias, const T* residual, const T* weight, const T* norm_bias, T* z, T* y, std::uint8_t* kept,
    float* mean, float* slope, float ratio, std::uint64_t seed, std::uint64_t offset, float eps, int width
) {
    extern __shared__ float row[];
    __shared__ float partial[kWarp];
    const std::int64_t start = std::int64_t(blockIdx.x) * width;
    const float scale = 1.0f / (1.0f - ratio);
    float total = 0;
    for (int column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
        const Four numbers = draw(seed, offset / 4, (start + column) / 4);
        for (int k = 0; k < 4; ++k) {
            const std::int64_t i = start + column + k;
            const bool keep = ratio == 0.0f || is_kept(numbers.values[k], ratio);
            if (kept) kept[i] = keep;
            const float part = keep ? (widen(x[i]) + widen(bias[column + k])) * scale : 0.0f;
            T rounded;  // as in the memory of a norm that is not fused
            narrow(widen(residual[i]) + part, &rounded);
            if (z) z[i] = rounded;
            total += row[column + k] = widen(rounded);
        }
    }
    const float middle = sum_block(total, partial) / width;
    float squares = 0;
    for (int column = threadIdx.x; column < width; column += blockDim.x)
        squares += (row[column] - middle) * (row[column] - middle);
    const float inverse = rsqrtf(sum_block(squares, partial) / width + eps);
    for (int column = threadIdx.x; column < width; column += blockDim.x)
        narrow((row[column] - middle) * inverse * widen(weight[column]) + widen(norm_bias[column]), y + start + column);
    if (threadIdx.x == 0) {
        if (mean) mean[blockIdx.x] = middle;
        slope[blockIdx.x] = inverse;
    }
}

// An element of the normalised input: from z, or where mean is null, rebuilt from y.
template <typename T>
DSJOB_DEVICE float normalise(
    const T* z_or_y, const T* weight, const T* norm_bias, const float* mean, const float* slope, std::int64_t row,
    int column, int width
) {
    const float value = widen(z_or_y[row * width + column]);
    if (mean) return (value - mean[row]) * slope[row];
    const float factor = widen(weight[column]);
    return factor == 0.0f ? 0.0f : (value - widen(norm_bias[column])) / factor;
}

// The gradients of drop_add_norm: to_residual, and to_x, which is null without dropout, since the two are equal.
//
// A block for each row. gradient: of y. added: the gradient of z from elsewhere, or null. mean: null for an invertible
// norm; then z_or_y is y. The gradient of x's bias is the sum of the columns of to_x.
template <typename T>
__global__ void drop_add_norm_backward(
    const T* gradient, const T* added, const T* z_or_y, const T* weight, const T* norm_bias, const float* mean,
    const float* slope, const std::uint8_t* kept, float ratio, T* to_residual, T* to_x, int width
) {
    __shared__ float partial[kWarp];
    const std::int64_t row = blockIdx.x, start = row * width;
    float total = 0, weighted = 0;
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        const float inner = widen(gradient[start + column]) * widen(weight[column]);
        total += inner;
        weighted += inner * normalise(z_or_y, weight, norm_bias, mean, slope, row, column, width);
    }
    total = sum_block(total, partial) / width;
    weighted = sum_block(weighted, partial) / width;
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        const std::int64_t i = start + column;
        const float inner = widen(gradient[i]) * widen(weight[column]);
        const float normal = normalise(z_or_y, weight, norm_bias, mean, slope, row, column, width);
        const float found = slope[row] * (inner - total - normal * weighted) + (added ? widen(added[i]) : 0.0f);
        narrow(found, to_residual + i);
        if (to_x) narrow(kept[i] ? found / (1.0f - ratio) : 0.0f, to_x + i);
    }
}

// Sums over the rows: to_bias of gradient, and unless to_weight is null, to_weight of gradient * normalised input.
//
// A block of kColumns x kStripes threads for kColumns columns.
template <typename T>
__global__ void sum_columns(
    const T* gradient, const T* z_or_y, const T* weight, const T* norm_bias, const float* mean, const float* slope,
    float* to_weight, float* to_bias, std::int64_t rows, int width
) {
    __shared__ float weights[kStripes][kColumns], biases[kStripes][kColumns];
    const int column = blockIdx.x * kColumns + threadIdx.x;
    float for_weight = 0, for_bias = 0;
    if (column < width) {
        for (std::int64_t row = threadIdx.y; row < rows; row += kStripes) {
            const float found = widen(gradient[row * width + column]);
            for_bias += found;
            if (to_weight)
                for_weight += found * normalise(z_or_y, weight, norm_bias, mean, slope, row, column, width);
        }
    }
    weights[threadIdx.y][threadIdx.x] = for_weight;
    biases[threadIdx.y][threadIdx.x] = for_bias;
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
    for_weight = for_bias = 0;
    for (int stripe = 0; stripe < kStripes; ++stripe) {
        for_weight += weights[stripe][threadIdx.x];
        for_bias += biases[stripe][threadIdx.x];
    }
    if (to_weight) to_weight[column] = for_weight;
    to_bias[column] = for_bias;
}

}  // namespace dsjob

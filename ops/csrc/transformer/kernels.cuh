// The kernels of the transformer layer that are not matrix products. Nothing here knows torch.
//
// Tensors are [rows, width], contiguous, in a type T; sums are fp32. Every sum has a fixed order, so results are the same
// from run to run.
#pragma once

#include "numbers.h"

namespace dsjob {

constexpr int kWarp = 32;
// The block of kernels that walk down the columns, and how many rows a thread loads before it stores any.
constexpr int kColumns = 32, kStripes = 8, kAhead = 4;

// Four adjacent columns are those of a thread. It visits every kStripes-th row of its block's slice of the rows.
struct Walk {
    int column;
    std::int64_t first, last;
};

DSJOB_DEVICE Walk start_walk(std::int64_t rows) {
    const std::int64_t slice = (rows + gridDim.y - 1) / gridDim.y, start = blockIdx.y * slice;
    const std::int64_t end = start + slice < rows ? start + slice : rows;
    return {int(4 * (blockIdx.x * kColumns + threadIdx.x)), start + threadIdx.y, end};
}

// Adds up what the threads of a block have found for their columns. sums: [kinds, slices, width], of this kind.
DSJOB_DEVICE void add_stripes(const float* found, float* sums, int column, int width) {
    __shared__ float stripes[kStripes][4 * kColumns];
    __syncthreads();  // the last call's readers are done
    for (int k = 0; k < 4; ++k) stripes[threadIdx.y][4 * threadIdx.x + k] = found[k];
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
    for (int k = 0; k < 4; ++k) {
        float total = 0;
        for (int stripe = 0; stripe < kStripes; ++stripe) total += stripes[stripe][4 * threadIdx.x + k];
        sums[std::int64_t(blockIdx.y) * width + column + k] = total;
    }
}

// out = gelu(x + bias)
template <typename T>
__global__ void bias_gelu(const T* x, const T* bias, T* out, std::int64_t rows, int width) {
    const Walk walk = start_walk(rows);
    if (walk.column >= width) return;
    const Pack<T> shift = load(bias + walk.column);
    for (std::int64_t row = walk.first; row < walk.last; row += kStripes * kAhead) {
        Pack<T> packs[kAhead];
        for (int a = 0; a < kAhead; ++a)
            if (row + a * kStripes < walk.last) packs[a] = load(x + (row + a * kStripes) * width + walk.column);
        for (int a = 0; a < kAhead; ++a) {
            if (row + a * kStripes >= walk.last) break;
            for (int k = 0; k < 4; ++k)
                narrow(gelu(widen(packs[a].values[k]) + widen(shift.values[k])), packs[a].values + k);
            store(packs[a], out + (row + a * kStripes) * width + walk.column);
        }
    }
}

// to_x = gradient * gelu'(x + bias). The gradient of the bias is the sum of its rows; sums: [slices, width].
template <typename T>
__global__ void bias_gelu_backward(
    const T* gradient, const T* x, const T* bias, T* to_x, float* sums, std::int64_t rows, int width
) {
    const Walk walk = start_walk(rows);
    float found[4] = {};
    if (walk.column < width) {
        const Pack<T> shift = load(bias + walk.column);
        for (std::int64_t row = walk.first; row < walk.last; row += kStripes * kAhead) {
            Pack<T> packs[kAhead], slopes[kAhead];
            for (int a = 0; a < kAhead; ++a) {
                if (row + a * kStripes >= walk.last) break;
                packs[a] = load(x + (row + a * kStripes) * width + walk.column);
                slopes[a] = load(gradient + (row + a * kStripes) * width + walk.column);
            }
            for (int a = 0; a < kAhead; ++a) {
                if (row + a * kStripes >= walk.last) break;
                for (int k = 0; k < 4; ++k) {
                    const float inner = widen(packs[a].values[k]) + widen(shift.values[k]);
                    const float value = widen(slopes[a].values[k]) * gelu_slope(inner);
                    found[k] += value;
                    narrow(value, packs[a].values + k);
                }
                store(packs[a], to_x + (row + a * kStripes) * width + walk.column);
            }
        }
    }
    add_stripes(found, sums, walk.column, width);
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
// A block for each row; width is a multiple of 4, and `width` floats of shared memory hold the row, each thread its own
// elements. z, mean and kept may be null: an invertible norm keeps y and slope only, and without dropout (a ratio of 0)
// nothing is drawn.
template <typename T>
__global__ void drop_add_norm(
    const T* x, const T* bias, const T* residual, const T* weight, const T* norm_bias, T* z, T* y, std::uint8_t* kept,
    float* mean, float* slope, float ratio, std::uint64_t seed, std::uint64_t offset, float eps, int width
) {
    extern __shared__ __align__(16) float memory[];
    __shared__ float partial[kWarp];
    const std::int64_t start = std::int64_t(blockIdx.x) * width;
    const float scale = 1.0f / (1.0f - ratio);
    float total = 0;
    for (int column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
        Four numbers = {};
        if (ratio > 0.0f) numbers = draw(seed, offset / 4, (start + column) / 4);
        const Pack<T> values = load(x + start + column), shift = load(bias + column);
        Pack<T> sums = load(residual + start + column);
        Pack<std::uint8_t> mask;
        Pack<float> row;
        for (int k = 0; k < 4; ++k) {
            const bool keep = ratio == 0.0f || is_kept(numbers.values[k], ratio);
            mask.values[k] = keep;
            const float part = keep ? (widen(values.values[k]) + widen(shift.values[k])) * scale : 0.0f;
            // Rounded, as in the memory of a norm that is not fused.
            narrow(widen(sums.values[k]) + part, sums.values + k);
            total += row.values[k] = widen(sums.values[k]);
        }
        store(row, memory + column);
        if (kept) store(mask, kept + start + column);
        if (z) store(sums, z + start + column);
    }
    const float middle = sum_block(total, partial) / width;
    float squares = 0;
    for (int column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
        const Pack<float> row = load(memory + column);
        for (int k = 0; k < 4; ++k) squares += (row.values[k] - middle) * (row.values[k] - middle);
    }
    const float inverse = rsqrtf(sum_block(squares, partial) / width + eps);
    for (int column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
        const Pack<T> factor = load(weight + column), shift = load(norm_bias + column);
        const Pack<float> row = load(memory + column);
        Pack<T> out;
        for (int k = 0; k < 4; ++k)
            narrow((row.values[k] - middle) * inverse * widen(factor.values[k]) + widen(shift.values[k]),
                   out.values + k);
        store(out, y + start + column);
    }
    if (threadIdx.x == 0) {
        if (mean) mean[blockIdx.x] = middle;
        slope[blockIdx.x] = inverse;
    }
}

// How to find the normalised input of a norm: from z, or where mean is null, rebuilt from y.
template <typename T>
struct Normed {
    const T *z_or_y, *weight, *norm_bias;
    const float *mean, *slope;
};

template <typename T>
DSJOB_DEVICE void normalise(const Normed<T>& normed, std::int64_t row, int column, int width, float* found) {
    const Pack<T> values = load(normed.z_or_y + row * width + column);
    if (normed.mean) {
        for (int k = 0; k < 4; ++k) found[k] = (widen(values.values[k]) - normed.mean[row]) * normed.slope[row];
        return;
    }
    const Pack<T> factor = load(normed.weight + column), shift = load(normed.norm_bias + column);
    for (int k = 0; k < 4; ++k) {
        const float scale = widen(factor.values[k]);
        found[k] = scale == 0.0f ? 0.0f : (widen(values.values[k]) - widen(shift.values[k])) / scale;
    }
}

// The gradients of drop_add_norm: to_residual, and to_x, which is null without dropout, since the two are equal.
//
// A block for each row. gradient: of y. added: the gradient of z from elsewhere, or null.
template <typename T>
__global__ void drop_add_norm_backward(
    const T* gradient, const T* added, Normed<T> normed, const std::uint8_t* kept, float ratio, T* to_residual, T* to_x,
    int width
) {
    __shared__ float partial[kWarp];
    const std::int64_t row = blockIdx.x, start = row * width;
    float total = 0, weighted = 0, normal[4];
    for (int column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
        const Pack<T> slopes = load(gradient + start + column), factor = load(normed.weight + column);
        normalise(normed, row, column, width, normal);
        for (int k = 0; k < 4; ++k) {
            const float inner = widen(slopes.values[k]) * widen(factor.values[k]);
            total += inner;
            weighted += inner * normal[k];
        }
    }
    total = sum_block(total, partial) / width;
    weighted = sum_block(weighted, partial) / width;
    const float slope = normed.slope[row], scale = 1.0f / (1.0f - ratio);
    for (int column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
        const Pack<T> slopes = load(gradient + start + column), factor = load(normed.weight + column);
        normalise(normed, row, column, width, normal);
        float found[4];
        for (int k = 0; k < 4; ++k)
            found[k] = slope * (widen(slopes.values[k]) * widen(factor.values[k]) - total - normal[k] * weighted);
        if (added) {
            const Pack<T> more = load(added + start + column);
            for (int k = 0; k < 4; ++k) found[k] += widen(more.values[k]);
        }
        Pack<T> out;
        for (int k = 0; k < 4; ++k) narrow(found[k], out.values + k);
        store(out, to_residual + start + column);
        if (!to_x) continue;
        const Pack<std::uint8_t> mask = load(kept + start + column);
        for (int k = 0; k < 4; ++k) narrow(mask.values[k] ? found[k] * scale : 0.0f, out.values + k);
        store(out, to_x + start + column);
    }
}

// Sums over the rows of a slice: of gradient * normalised input, of gradient, and of to_x. sums: [3, slices, width].
template <typename T>
__global__ void sum_norm(
    const T* gradient, const T* to_x, Normed<T> normed, float* sums, std::int64_t rows, int width
) {
    const Walk walk = start_walk(rows);
    float weights[4] = {}, shifts[4] = {}, biases[4] = {}, normal[4];
    if (walk.column < width) {
        for (std::int64_t row = walk.first; row < walk.last; row += kStripes) {
            const Pack<T> slopes = load(gradient + row * width + walk.column);
            const Pack<T> others = load(to_x + row * width + walk.column);
            normalise(normed, row, walk.column, width, normal);
            for (int k = 0; k < 4; ++k) {
                weights[k] += widen(slopes.values[k]) * normal[k];
                shifts[k] += widen(slopes.values[k]);
                biases[k] += widen(others.values[k]);
            }
        }
    }
    const std::int64_t kind = std::int64_t(gridDim.y) * width;
    add_stripes(weights, sums, walk.column, width);
    add_stripes(shifts, sums + kind, walk.column, width);
    add_stripes(biases, sums + 2 * kind, walk.column, width);
}

// Adds up slices. sums: [kinds, slices, width]; out: [kinds, width]. blockIdx.y is the kind.
template <typename T>
__global__ void add_slices(const float* sums, T* out, int slices, int width) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const float* own = sums + std::int64_t(blockIdx.y) * slices * width + column;
    float total = 0;
    for (int slice = 0; slice < slices; ++slice) total += own[std::int64_t(slice) * width];
    narrow(total, out + std::int64_t(blockIdx.y) * width + column);
}

}  // namespace dsjob

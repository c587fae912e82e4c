// Softmax and dropout of attention scores, for heads that scaled_dot_product_attention has no kernel for.
//
// Scores are [batch, heads, queries, keys], contiguous; a row has the scores of one query. A warp computes a row, or with
// kBlock, a block. With kPacked, a row is a multiple of 4 elements, and what is loaded begins at a multiple of a pack.
#pragma once

#include "kernels.cuh"
#include "launch.h"

namespace dsjob {

// The numbers to add to a row, or null.
template <typename T>
DSJOB_DEVICE const T* find_mask(const Mask& mask, const Scores& shape, std::int64_t row) {
    if (!mask.numbers) return nullptr;
    const std::int64_t query = row % shape.queries, head = row / shape.queries % shape.heads;
    const std::int64_t batch = row / shape.queries / shape.heads;
    return static_cast<const T*>(mask.numbers) + batch * mask.by_batch + head * mask.by_head + query * mask.by_query;
}

template <bool kPacked, typename T>
DSJOB_DEVICE void load_some(const T* from, int count, float* to) {
    if (kPacked) {
        const Pack<T> pack = load(from);
        for (int k = 0; k < 4; ++k) to[k] = widen(pack.values[k]);
    } else {
        for (int k = 0; k < 4; ++k) to[k] = k < count ? widen(from[k]) : 0.0f;
    }
}

template <bool kPacked, typename T>
DSJOB_DEVICE void store_some(const Pack<T>& pack, int count, T* to) {
    if (kPacked) {
        store(pack, to);
    } else {
        for (int k = 0; k < 4; ++k)
            if (k < count) to[k] = pack.values[k];
    }
}

struct Sum {
    DSJOB_DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Largest {
    DSJOB_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Combines the values of the threads of a row; every thread gets the result. partial: shared, one per warp.
template <bool kBlock, typename Combine>
DSJOB_DEVICE float combine(float value, float* partial, Combine two) {
    for (int step = kWarp / 2; step; step /= 2) value = two(value, __shfl_xor_sync(~0u, value, step));
    if (!kBlock) return value;
    __syncthreads();  // the last call's readers are done
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = partial[0];
    for (int warp = 1; warp < int(blockDim.x) / kWarp; ++warp) value = two(value, partial[warp]);
    return value;
}

// The row of a thread, its place among the threads of that row, and their number.
struct Post {
    std::int64_t row;
    int lane, lanes, number;  // number: of the row in its block
};

template <bool kBlock>
DSJOB_DEVICE Post find_post() {
    if (kBlock) return {std::int64_t(blockIdx.x), int(threadIdx.x), int(blockDim.x), 0};
    const int number = threadIdx.x / kWarp;
    return {std::int64_t(blockIdx.x) * (blockDim.x / kWarp) + number, int(threadIdx.x % kWarp), kWarp, number};
}

// probabilities = softmax(scores * scale + mask); dropped = dropout(probabilities).
//
// Shared memory: a float for each key, and for each row of the block.
template <typename T, bool kBlock, bool kPacked>
__global__ void softmax_drop(
    Scores shape, Dropout dropout, const T* scores, Mask mask, float scale, T* dropped, T* probabilities,
    std::uint8_t* kept
) {
    extern __shared__ __align__(16) float memory[];
    __shared__ float partial[kWarp];
    const Post post = find_post<kBlock>();
    if (post.row >= shape.batch * shape.heads * shape.queries) return;  // the whole warp
    const int width = shape.keys;
    float* const values = memory + std::int64_t(post.number) * width;
    const std::int64_t start = post.row * width;
    const T* const added = find_mask<T>(mask, shape, post.row);
    float highest = -INFINITY;
    for (int column = 4 * post.lane; column < width; column += 4 * post.lanes) {
        const int count = width - column;
        float found[4], more[4] = {};
        load_some<kPacked>(scores + start + column, count, found);
        if (added) load_some<kPacked>(added + column, count, more);
        Pack<float> sums;
        for (int k = 0; k < 4; ++k) {
            sums.values[k] = fmaf(found[k], scale, more[k]);
            if (k < count) highest = fmaxf(highest, sums.values[k]);
        }
        store_some<kPacked>(sums, count, values + column);
    }
    highest = combine<kBlock>(highest, partial, Largest());
    float total = 0;
    for (int column = 4 * post.lane; column < width; column += 4 * post.lanes) {
        const int count = width - column;
        Pack<float> powers;
        load_some<kPacked>(values + column, count, powers.values);
        for (int k = 0; k < 4; ++k) {
            powers.values[k] = expf(powers.values[k] - highest);
            if (k < count) total += powers.values[k];
        }
        store_some<kPacked>(powers, count, values + column);
    }
    const float inverse = 1.0f / combine<kBlock>(total, partial, Sum()), raised = 1.0f / (1.0f - dropout.ratio);
    for (int column = 4 * post.lane; column < width; column += 4 * post.lanes) {
        const int count = width - column;
        const Four numbers = draw(dropout.seed, dropout.offset / 4, post.row * ((width + 3) / 4) + column / 4);
        float powers[4];
        load_some<kPacked>(values + column, count, powers);
        Pack<T> chances, left;
        Pack<std::uint8_t> flags;
        for (int k = 0; k < 4; ++k) {
            narrow(powers[k] * inverse, chances.values + k);
            flags.values[k] = is_kept(numbers.values[k], dropout.ratio);
            // Of the rounded probability: the backward pass computes the same again.
            narrow(flags.values[k] ? widen(chances.values[k]) * raised : 0.0f, left.values + k);
        }
        store_some<kPacked>(chances, count, probabilities + start + column);
        store_some<kPacked>(left, count, dropped + start + column);
        store_some<kPacked>(flags, count, kept + start + column);
    }
}

// The gradient of the scores, from that of `dropped`; and unless `dropped` is null, that tensor again.
template <typename T, bool kBlock, bool kPacked>
__global__ void softmax_drop_backward(
    Scores shape, float ratio, const T* gradient, const T* probabilities, const std::uint8_t* kept, float scale,
    T* to_scores, T* dropped
) {
    extern __shared__ __align__(16) float memory[];
    __shared__ float partial[kWarp];
    const Post post = find_post<kBlock>();
    if (post.row >= shape.batch * shape.heads * shape.queries) return;  // the whole warp
    const int width = shape.keys;
    float* const values = memory + std::int64_t(post.number) * width;
    const std::int64_t start = post.row * width;
    const float raised = 1.0f / (1.0f - ratio);
    float total = 0;
    for (int column = 4 * post.lane; column < width; column += 4 * post.lanes) {
        const int count = width - column;
        float slopes[4], chances[4], flags[4];
        load_some<kPacked>(gradient + start + column, count, slopes);
        load_some<kPacked>(probabilities + start + column, count, chances);
        load_some<kPacked>(kept + start + column, count, flags);
        Pack<float> found;
        for (int k = 0; k < 4; ++k) {
            found.values[k] = flags[k] != 0.0f ? slopes[k] * raised : 0.0f;
            total = fmaf(found.values[k], chances[k], total);
        }
        store_some<kPacked>(found, count, values + column);
    }
    total = combine<kBlock>(total, partial, Sum());
    for (int column = 4 * post.lane; column < width; column += 4 * post.lanes) {
        const int count = width - column;
        float chances[4], found[4];
        load_some<kPacked>(probabilities + start + column, count, chances);
        load_some<kPacked>(values + column, count, found);
        Pack<T> out;
        for (int k = 0; k < 4; ++k) narrow(scale * chances[k] * (found[k] - total), out.values + k);
        store_some<kPacked>(out, count, to_scores + start + column);
        if (!dropped) continue;
        float flags[4];
        load_some<kPacked>(kept + start + column, count, flags);
        for (int k = 0; k < 4; ++k) narrow(flags[k] != 0.0f ? chances[k] * raised : 0.0f, out.values + k);
        store_some<kPacked>(out, count, dropped + start + column);
    }
}

}  // namespace dsjob

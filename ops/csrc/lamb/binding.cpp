// torch.ops.dsjob.lamb_* on GPUs. `ops/lamb.py` has the schemas.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "launch.h"

namespace {

using at::Tensor;
using at::TensorList;
using dsjob::LambStep;
using dsjob::Table;

void check(const Tensor& tensor, const Tensor& weights, const Tensor& first, const char* role) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, role, " must be fp32, not ", tensor.dtype());
    TORCH_CHECK_VALUE(tensor.device() == first.device(), role, " must be on ", first.device(), ", not ", tensor.device());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), role, " must be contiguous");
    TORCH_CHECK_VALUE(tensor.numel() == weights.numel(), role, ": ", tensor.numel(), " elements instead of ",
                      weights.numel());
}

// A part of the list. parameter: the number of its first parameter in the list; chunk: that of its first chunk.
struct Part {
    Table table;
    int64_t parameter, chunk;
};

// gradients and rates may be empty lists, where a kernel reads none.
std::vector<Part> divide(TensorList weights, TensorList gradients, TensorList averages, TensorList squares,
                         at::ArrayRef<double> rates) {
    const size_t count = weights.size();
    TORCH_CHECK_VALUE(averages.size() == count && squares.size() == count &&
                          (gradients.empty() || gradients.size() == count) && (rates.empty() || rates.size() == count),
                      "lists of different lengths");
    std::vector<Part> parts;
    int64_t all = 0;  // chunks
    for (size_t p = 0; p < count; ++p) {
        check(weights[p], weights[p], weights[0], "weights");
        check(averages[p], weights[p], weights[0], "averages");
        check(squares[p], weights[p], weights[0], "squares");
        if (!gradients.empty()) check(gradients[p], weights[p], weights[0], "gradients");
        if (p % dsjob::kTensors == 0) parts.push_back({{}, int64_t(p), all});
        Part& part = parts.back();
        const int i = part.table.tensors++;
        all += (weights[p].numel() + dsjob::kChunk - 1) / dsjob::kChunk;
        TORCH_CHECK_VALUE(all - part.chunk <= std::numeric_limits<int>::max(), "too many elements");
        part.table.ends[i] = int(all - part.chunk);
        part.table.rates[i] = rates.empty() ? 0.0f : float(rates[p]);
        part.table.counts[i] = weights[p].numel();
        part.table.weights[i] = weights[p].mutable_data_ptr<float>();
        part.table.gradients[i] = gradients.empty() ? nullptr : gradients[p].const_data_ptr<float>();
        part.table.averages[i] = averages[p].mutable_data_ptr<float>();
        part.table.squares[i] = squares[p].mutable_data_ptr<float>();
    }
    return parts;
}

Tensor lamb_average_(TensorList weights, TensorList gradients, TensorList averages, TensorList squares, double beta1,
                     double beta2, double eps, bool eps_inside_root, double decay) {
    TORCH_CHECK_VALUE(!weights.empty() && gradients.size() == weights.size(), "no parameters, or other gradients");
    const c10::cuda::CUDAGuard guard(weights[0].device());
    const auto parts = divide(weights, gradients, averages, squares, {});
    const LambStep step = {float(beta1), float(beta2), float(eps), float(decay), eps_inside_root};
    const Part& last = parts.back();
    const int64_t chunks = last.chunk + last.table.ends[last.table.tensors - 1];
    const Tensor sums = at::empty({chunks, 2}, weights[0].options());
    const Tensor totals = at::empty({int64_t(weights.size()), 2}, weights[0].options());
    for (const Part& part : parts)
        C10_CUDA_CHECK(dsjob::lamb_average(part.table, step, sums.mutable_data_ptr<float>() + 2 * part.chunk,
                                           totals.mutable_data_ptr<float>() + 2 * part.parameter,
                                           c10::cuda::getCurrentCUDAStream()));
    return totals;
}

void lamb_apply_(TensorList weights, TensorList averages, TensorList squares, const Tensor& ratios,
                 at::ArrayRef<double> rates, double eps, bool eps_inside_root, double decay) {
    TORCH_CHECK_VALUE(rates.size() == weights.size(), "lists of different lengths");
    if (weights.empty()) return;
    TORCH_CHECK_VALUE(ratios.numel() == int64_t(weights.size()) && ratios.is_contiguous() &&
                          ratios.scalar_type() == at::kFloat && ratios.device() == weights[0].device(),
                      "ratios must be one fp32 number for each parameter, on its device");
    const c10::cuda::CUDAGuard guard(weights[0].device());
    const LambStep step = {0, 0, float(eps), float(decay), eps_inside_root};
    for (const Part& part : divide(weights, {}, averages, squares, rates))
        C10_CUDA_CHECK(dsjob::lamb_apply(part.table, step, ratios.const_data_ptr<float>() + part.parameter,
                                         c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(dsjob, CUDA, library) {
    library.impl("lamb_average_", lamb_average_);
    library.impl("lamb_apply_", lamb_apply_);
}

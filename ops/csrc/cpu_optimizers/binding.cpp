// torch.ops.dsjob.cpu_*: the updates of a list of parameters on the host. Threads are torch's own.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace {

using at::Tensor;
using at::TensorList;
using dsjob::Format;
using dsjob::Stretch;

// Elements that a thread takes at a time: 28 bytes each with Adam, so that a stretch passes through a core's cache.
// Sums of Lamb are added stretch by stretch, so their order does not depend on the number of threads.
constexpr int64_t kStretch = 1 << 14;

Format format_of(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kFloat: return Format::fp32;
        case at::kBFloat16: return Format::bf16;
        case at::kHalf: return Format::fp16;
        default: TORCH_CHECK_TYPE(false, "gradients and copies must be fp32, bf16 or fp16, not ", tensor.dtype());
    }
}

void check(const Tensor& tensor, const Tensor& weights, const char* role) {
    TORCH_CHECK_VALUE(tensor.device().is_cpu(), role, " must be on the CPU, not on ", tensor.device());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), role, " must be contiguous");
    TORCH_CHECK_VALUE(tensor.numel() == weights.numel(), role, ": ", tensor.numel(), " elements instead of ",
                      weights.numel());
}

void check_state(const Tensor& tensor, const Tensor& weights, const char* role) {
    check(tensor, weights, role);
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, role, " must be fp32, not ", tensor.dtype());
}

// One entry per stretch of a parameter. `second` and `copies` may be empty lists.
struct Piece {
    Stretch stretch;
    int64_t parameter;
};

std::vector<Piece> split(TensorList weights, TensorList gradients, TensorList first, TensorList second,
                         TensorList copies) {
    const size_t count = weights.size();
    TORCH_CHECK_VALUE(gradients.size() == count && first.size() == count && (second.empty() || second.size() == count) &&
                          (copies.empty() || copies.size() == count),
                      "lists of different lengths");
    std::vector<Piece> pieces;
    for (size_t p = 0; p < count; ++p) {
        check_state(weights[p], weights[p], "weights");
        check(gradients[p], weights[p], "gradients");
        check_state(first[p], weights[p], "averages");
        Stretch whole = {};
        whole.weights = weights[p].data_ptr<float>();
        whole.gradients = gradients[p].const_data_ptr();
        whole.gradient_format = format_of(gradients[p]);
        whole.first = first[p].data_ptr<float>();
        if (!second.empty()) {
            check_state(second[p], weights[p], "squares");
            whole.second = second[p].data_ptr<float>();
        }
        if (!copies.empty()) {
            check(copies[p], weights[p], "copies");
            whole.copy_format = format_of(copies[p]);
            TORCH_CHECK_TYPE(whole.copy_format != Format::fp32, "copies must be bf16 or fp16");
            whole.copy = copies[p].data_ptr();
        }
        const int64_t gradient_bytes = gradients[p].element_size();
        for (int64_t begin = 0; begin < weights[p].numel(); begin += kStretch) {
            Stretch part = whole;
            part.weights += begin;
            part.gradients = static_cast<const char*>(whole.gradients) + begin * gradient_bytes;
            part.first += begin;
            if (part.second) part.second += begin;
            if (part.copy) part.copy = static_cast<char*>(whole.copy) + begin * 2;
            part.count = std::min(kStretch, weights[p].numel() - begin);
            pieces.push_back({part, int64_t(p)});
        }
    }
    return pieces;
}

template <class Body>
void for_each(const std::vector<Piece>& pieces, Body body) {
    at::parallel_for(0, int64_t(pieces.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) body(i);
    });
}

// steps: how many updates each parameter has had, this one included.
void cpu_adam_(TensorList weights, TensorList gradients, TensorList averages, TensorList squares, TensorList copies,
               at::ArrayRef<double> steps, double rate, double beta1, double beta2, double eps, double decay,
               bool decoupled, bool bias_correction, double gradient_factor) {
    TORCH_CHECK_VALUE(steps.size() == weights.size(), "lists of different lengths");
    const auto pieces = split(weights, gradients, averages, squares, copies);
    const auto& kernels = dsjob::choose_kernels();
    std::vector<dsjob::AdamStep> constants;
    for (const double step : steps) {
        const double correction1 = bias_correction ? 1 - std::pow(beta1, step) : 1;
        const double correction2 = bias_correction ? 1 - std::pow(beta2, step) : 1;
        constants.push_back({float(beta1), float(beta2), float(eps), float(gradient_factor),
                             decoupled ? float(1 - rate * decay) : 1.0f, decoupled ? 0.0f : float(decay),
                             float(rate / correction1), float(1 / std::sqrt(correction2))});
    }
    for_each(pieces, [&](int64_t i) { kernels.adam(pieces[i].stretch, constants[pieces[i].parameter]); });
}

void cpu_lion_(TensorList weights, TensorList gradients, TensorList averages, TensorList copies, double rate,
               double beta1, double beta2, double decay, double gradient_factor) {
    const auto pieces = split(weights, gradients, averages, {}, copies);
    const auto& kernels = dsjob::choose_kernels();
    const dsjob::LionStep step = {float(beta1), float(beta2), float(gradient_factor), float(1 - rate * decay),
                                  float(rate)};
    for_each(pieces, [&](int64_t i) { kernels.lion(pieces[i].stretch, step); });
}

void cpu_adagrad_(TensorList weights, TensorList gradients, TensorList sums, TensorList copies,
                  at::ArrayRef<double> rates, double eps, double decay, double gradient_factor) {
    TORCH_CHECK_VALUE(rates.size() == weights.size(), "lists of different lengths");
    const auto pieces = split(weights, gradients, sums, {}, copies);
    const auto& kernels = dsjob::choose_kernels();
    for_each(pieces, [&](int64_t i) {
        const float rate = float(rates[pieces[i].parameter]);
        kernels.adagrad(pieces[i].stretch, {float(eps), float(gradient_factor), float(decay), rate});
    });
}

// Moves the averages. Returns fp64 [parameters, 2]: the sums of squares of the weights, and of the updates.
Tensor cpu_lamb_average_(TensorList weights, TensorList gradients, TensorList averages, TensorList squares,
                         double beta1, double beta2, double eps, bool eps_inside_root, double decay,
                         double gradient_factor) {
    const auto pieces = split(weights, gradients, averages, squares, {});
    const auto& kernels = dsjob::choose_kernels();
    const dsjob::LambStep step = {float(beta1), float(beta2),  float(eps),
                                  float(gradient_factor), float(decay), eps_inside_root};
    std::vector<dsjob::LambSums> sums(pieces.size());
    for_each(pieces, [&](int64_t i) { sums[i] = kernels.lamb_average(pieces[i].stretch, step); });
    Tensor result = at::zeros({int64_t(weights.size()), 2}, at::kDouble);
    double* rows = result.data_ptr<double>();
    for (size_t i = 0; i < pieces.size(); ++i) {
        rows[2 * pieces[i].parameter] += sums[i].weights;
        rows[2 * pieces[i].parameter + 1] += sums[i].updates;
    }
    return result;
}

// The result's shape alone, for tracing.
Tensor cpu_lamb_average_meta(TensorList weights, TensorList, TensorList, TensorList, double, double, double, bool,
                             double, double) {
    return at::empty({int64_t(weights.size()), 2}, at::TensorOptions(at::kDouble).device(at::kMeta));
}

// Subtracts `rates` times the updates that cpu_lamb_average_ measured.
void cpu_lamb_apply_(TensorList weights, TensorList averages, TensorList squares, TensorList copies,
                     at::ArrayRef<double> rates, double eps, bool eps_inside_root, double decay) {
    TORCH_CHECK_VALUE(rates.size() == weights.size(), "lists of different lengths");
    // The kernel reads no gradients; the averages stand in for them.
    const auto pieces = split(weights, averages, averages, squares, copies);
    const auto& kernels = dsjob::choose_kernels();
    const dsjob::LambStep step = {0, 0, float(eps), 1, float(decay), eps_inside_root};
    for_each(pieces, [&](int64_t i) {
        kernels.lamb_apply(pieces[i].stretch, step, float(rates[pieces[i].parameter]));
    });
}

std::string cpu_instruction_set() { return dsjob::choose_kernels().name; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(dsjob, library) {
    library.def(
        "cpu_adam_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] averages, Tensor(c!)[] squares, "
        "Tensor(d!)[] copies, float[] steps, float rate, float beta1, float beta2, float eps, float decay, "
        "bool decoupled, bool bias_correction, float gradient_factor) -> ()");
    library.def(
        "cpu_lion_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] averages, Tensor(c!)[] copies, float rate, "
        "float beta1, float beta2, float decay, float gradient_factor) -> ()");
    library.def(
        "cpu_adagrad_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] sums, Tensor(c!)[] copies, "
        "float[] rates, float eps, float decay, float gradient_factor) -> ()");
    library.def(
        "cpu_lamb_average_(Tensor[] weights, Tensor[] gradients, Tensor(a!)[] averages, Tensor(b!)[] squares, "
        "float beta1, float beta2, float eps, bool eps_inside_root, float decay, float gradient_factor) -> Tensor");
    library.def(
        "cpu_lamb_apply_(Tensor(a!)[] weights, Tensor[] averages, Tensor[] squares, Tensor(b!)[] copies, "
        "float[] rates, float eps, bool eps_inside_root, float decay) -> ()");
    library.def("cpu_instruction_set() -> str", cpu_instruction_set);
}

TORCH_LIBRARY_IMPL(dsjob, CPU, library) {
    library.impl("cpu_adam_", cpu_adam_);
    library.impl("cpu_lion_", cpu_lion_);
    library.impl("cpu_adagrad_", cpu_adagrad_);
    library.impl("cpu_lamb_average_", cpu_lamb_average_);
    library.impl("cpu_lamb_apply_", cpu_lamb_apply_);
}

TORCH_LIBRARY_IMPL(dsjob, Meta, library) {
    library.impl("cpu_lamb_average_", cpu_lamb_average_meta);
}

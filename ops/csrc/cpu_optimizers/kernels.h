// Updates of a stretch of a parameter on the host, by raw pointers. Nothing here knows torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dsjob {

enum class Format { none, fp32, bf16, fp16 };

// What an update reads and writes: `count` elements each. `first` and `second` are the optimizer's averages; an
// optimizer with one average leaves `second` null. `copy` receives the new weights in another format, or is null.
struct Stretch {
    float* weights;
    const void* gradients;
    Format gradient_format;  // fp32, bf16 or fp16
    float* first;
    float* second;
    void* copy;
    Format copy_format;  // none, bf16 or fp16
    std::size_t count;
};

// Gradients are multiplied by `gradient_factor` first: 1 / loss scale, times the factor of clipping.
struct AdamStep {
    float beta1, beta2, eps, gradient_factor;
    float weight_factor;  // 1 - rate * decay with decoupled weight decay; otherwise 1
    float added_decay;    // decay that is added to the gradient; otherwise 0
    float step_size;      // rate / (1 - beta1^t), or the rate
    float root_factor;    // 1 / sqrt(1 - beta2^t), or 1
};

struct LionStep {
    float beta1, beta2, gradient_factor, weight_factor, rate;
};

struct AdagradStep {
    float eps, gradient_factor, added_decay, rate;
};

struct LambStep {
    float beta1, beta2, eps, gradient_factor, decay;
    bool eps_inside_root;
};

// Sums over a stretch, in double precision.
struct LambSums {
    double weights, updates;  // of squares
};

// The functions for one instruction set. Lamb needs the norms of whole parameters between its two passes: the first
// moves the averages and sums squares; the second computes the update again, and subtracts `rate` times it.
struct Kernels {
    const char* name;
    void (*adam)(const Stretch&, const AdamStep&);
    void (*lion)(const Stretch&, const LionStep&);
    void (*adagrad)(const Stretch&, const AdagradStep&);
    LambSums (*lamb_average)(const Stretch&, const LambStep&);
    void (*lamb_apply)(const Stretch&, const LambStep&, float rate);
};

extern const Kernels plain;
#if defined(__x86_64__)
extern const Kernels avx2;
extern const Kernels avx512;
#endif

// The fastest kernels that this processor runs. DSJOB_CPU_ISA=plain|avx2|avx512 sets an upper limit.
const Kernels& choose_kernels();

}  // namespace dsjob

#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

c10::intrusive_ptr<c10d::Backend> make_nccl(c10::intrusive_ptr<c10d::Backend> gloo);

} // namespace simulated

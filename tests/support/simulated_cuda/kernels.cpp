// Kernels of the simulated device: those of the CPU, on the same memory, under the dispatch key of CUDA.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "memory.h"
#include "streams.h"

namespace simulated {
namespace {

using at::Tensor;
using Sizes = c10::SymIntArrayRef;

const void* place(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? tensor.storage().data() : nullptr;
}

// The host waits inside these, since it has to know how large their results are, or what to answer.
const std::set<std::string> kWaits = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::is_nonzero", "aten::equal", "aten::bincount",
};

// One call of a kernel of the CPU's, in place of one of the device's.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    auto count = schema.arguments().size();
    for (size_t i = 0; i < count; i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      writes_ = alias != nullptr && alias->isWrite();
      take((*stack_)[stack_->size() - count + i]);
    }
    refuse_two_devices();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (auto& [host, given] : converted_) {
      if (host.sizes() != given.sizes()) { // an `out` that the kernel has resized
        given.resize_(host.sizes());
        on_host(given).copy_(host);
      }
    }
    use(current_stream(), reads_, written_, schema.name());
    auto returned = schema.returns().size();
    for (size_t i = 0; i < returned; i++) {
      give((*stack_)[stack_->size() - returned + i]);
    }
    if (on_device_ && kWaits.count(schema.name())) {
      synchronize(schema.name(), current_stream());
    }
  }

 private:
  Tensor convert(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      lone_ = lone_ || (tensor.defined() && tensor.dim() > 0 && tensor.numel() > 0);
      return tensor;
    }
    on_device_ = true;
    device_ = tensor.device().index();
    (writes_ ? written_ : reads_).push_back(place(tensor));
    return converted_.emplace_back(on_host(tensor), tensor).first;
  }

  void take(c10::IValue& value) {
    if (value.isTensor()) {
      value = convert(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorList().vec()) {
        tensors.push_back(convert(tensor));
      }
      value = c10::List<Tensor>(at::TensorList(tensors));
    } else if (value.isOptionalTensorList()) {
      auto lone = lone_; // indices may be on the host
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : tensor);
      }
      lone_ = lone;
      value = tensors;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      on_device_ = true;
      device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
      value = c10::Device(c10::kCPU);
    }
  }

  Tensor convert_back(const Tensor& tensor) {
    if (!on_device_ || !tensor.defined() || tensor.is_cuda()) {
      return tensor;
    }
    for (auto& [host, given] : converted_) {
      if (host.is_same(tensor)) {
        return given;
      }
    }
    return on_device(tensor, device_);
  }

  void give(c10::IValue& value) {
    if (value.isTensor()) {
      value = convert_back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorList().vec()) {
        tensors.push_back(convert_back(tensor));
      }
      value = c10::List<Tensor>(at::TensorList(tensors));
    }
  }

  void refuse_two_devices() {
    TORCH_CHECK(
        !(on_device_ && lone_ && !converted_.empty()),
        "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu, in ",
        op_.schema().name());
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<std::pair<Tensor, Tensor>> converted_;
  std::vector<const void*> reads_, written_;
  c10::DeviceIndex device_ = current_device();
  bool on_device_ = false, lone_ = false, writes_ = false;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device)
      : before_(exchange_device(device ? device->index() : c10::DeviceIndex(-1))) {}
  ~OnDevice() {
    exchange_device(before_);
  }

 private:
  c10::DeviceIndex before_;
};

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

Tensor empty(Sizes size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// A copy between host and device lets the host wait, unless it is told not to and the host's memory is page-locked.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowAutograd guard;
  auto stream = current_stream();
  use(stream, {place(source)}, {place(self)}, "copy_");
  auto to = on_host(self), from = on_host(source);
  if (self.device() == source.device() || self.numel() == 0) {
    to.copy_(from);
    return self;
  }
  // Of another dtype or layout the device would make a copy first, and wait for it.
  auto direct = self.dtype() == source.dtype() && self.is_contiguous() && source.is_contiguous();
  auto& at_host = self.is_cuda() ? source : self;
  auto pinned = at_host.device().is_cpu() && is_pinned(at_host.storage().data());
  if (self.is_cuda() || !non_blocking || !pinned || !direct) {
    to.copy_(from);
    if (!non_blocking || (!self.is_cuda() && !(pinned && direct))) {
      synchronize(self.is_cuda() ? "host to device" : "device to host", stream);
    }
    return self;
  }
  auto value = from.clone();
  poison(to);
  delay(stream, true, [to, value]() {
    at::AutoDispatchBelowAutograd guard;
    to.detach().copy_(value);
  });
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return target.copy_(self);
}

void foreach_copy_(at::TensorList self, at::TensorList source, bool non_blocking) {
  for (size_t i = 0; i < self.size(); i++) {
    self[i].copy_(source[i], non_blocking);
  }
}

at::Scalar local_scalar_dense(const Tensor& self) {
  use(current_stream(), {place(self)}, {}, "_local_scalar_dense");
  synchronize("read", current_stream());
  return at::_local_scalar_dense(on_host(self));
}

const Tensor& resize_(const Tensor& self, Sizes sizes, std::optional<c10::MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(sizes);
  int64_t elements = c10::multiply_integers(size) + self.storage_offset();
  auto bytes = static_cast<size_t>(elements) * self.dtype().itemsize();
  if (bytes > self.storage().nbytes()) {
    resize_storage(self.storage(), bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  outlives(place(self), stream);
}

Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& self, Sizes size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_part(Tensor& self, c10::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_part(self, std::move(storage), 0, c10::SymIntArrayRef(c10::SymInt(elements)),
                  c10::SymIntArrayRef(c10::SymInt(1)));
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_part(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_foreach_copy_", foreach_copy_);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("resize_", resize_);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

} // namespace
} // namespace simulated

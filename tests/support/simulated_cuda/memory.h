// The memory of the simulated device, which is the host's, and tensors of one side as those of the other.
#pragma once

#include <ATen/core/Tensor.h>

namespace simulated {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* memory);
at::Tensor on_host(const at::Tensor& tensor); // the same memory; what is on the host already as it is
at::Tensor on_device(const at::Tensor& tensor, c10::DeviceIndex device);
void resize_storage(c10::Storage storage, size_t bytes);
void install_hooks();
void poison(const at::Tensor& tensor); // fills a contiguous tensor with NaN

} // namespace simulated

// What Python sees of the simulated device.

#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "memory.h"
#include "streams.h"

using namespace simulated;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(c10::kCUDA, device_allocator());
  install_hooks();
  module.def("set_device_count", &set_device_count);
  module.def("current_device", &current_device);
  module.def("set_device", [](int index) { exchange_device(static_cast<c10::DeviceIndex>(index)); });
  module.def("current_stream", [](int index) { return current_stream(static_cast<c10::DeviceIndex>(index)).id(); });
  module.def("exchange_stream", [](int index, int64_t id) {
    c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    return exchange_stream(c10::Stream(c10::Stream::UNSAFE, device, id)).id();
  });
  module.def("synchronize", []() { synchronize_device("device"); });
  module.def("resize_storage", [](const at::Tensor& holder, size_t bytes) { resize_storage(holder.storage(), bytes); });
  module.def("make_nccl", &make_nccl);
  module.def("take_hazards", &take_hazards);
  module.def("listen", [](py::function heard) {
    auto* kept = new py::function(std::move(heard)); // until the process ends, whatever else has gone by then
    set_listener([kept](const std::string& what) {
      py::gil_scoped_acquire holds;
      (*kept)(what);
    });
  });
}

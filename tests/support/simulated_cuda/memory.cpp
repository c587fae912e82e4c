#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "streams.h"

namespace simulated {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kPoison = 0xFF; // bytes of it are NaN in every floating-point dtype

void* allocate_bytes(size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  auto* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  std::memset(memory, kPoison, bytes);
  return memory;
}

struct DeviceAllocator final : c10::Allocator {
  static void release(void* memory) {
    freed(memory);
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = allocate_bytes(bytes);
    allocated(memory, current_stream());
    return {memory, memory, &release, c10::Device(c10::kCUDA, current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned; // sizes of page-locked memory by where it begins

struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    {
      std::lock_guard guard(pinned_mutex);
      pinned.erase(static_cast<const char*>(memory));
    }
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = allocate_bytes(bytes);
    if (memory != nullptr) {
      std::lock_guard guard(pinned_mutex);
      pinned[static_cast<const char*>(memory)] = bytes;
    }
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceAllocator on_device_memory;
PinnedAllocator pinned_memory;

// Another storage over the same memory, which it keeps alive.
c10::Storage share(const at::Tensor& tensor, c10::Device device, c10::Allocator* allocator) {
  auto* kept = new c10::Storage(tensor.storage());
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  c10::DataPtr memory(kept->mutable_data(), kept, release, device);
  return {c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(memory), allocator, true};
}

at::Tensor alias(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    made._set_conj(true);
  }
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return made;
}

} // namespace

c10::Allocator* device_allocator() {
  return &on_device_memory;
}

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

bool is_pinned(const void* memory) {
  std::lock_guard guard(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(memory));
  if (after == pinned.begin()) {
    return false;
  }
  const auto& [start, bytes] = *std::prev(after);
  return memory < start + bytes;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  return alias(tensor, share(tensor, c10::Device(c10::kCPU), c10::GetCPUAllocator()), c10::DispatchKey::CPU);
}

at::Tensor on_device(const at::Tensor& tensor, c10::DeviceIndex device) {
  // Memory that a kernel of the host's has made: from here on it is the device's.
  struct Owner {
    c10::Storage storage;
    ~Owner() {
      freed(storage.data());
    }
  };
  auto* owner = new Owner{tensor.storage()};
  allocated(owner->storage.data(), current_stream(device));
  auto release = [](void* context) { delete static_cast<Owner*>(context); };
  c10::DataPtr memory(owner->storage.mutable_data(), owner, release, c10::Device(c10::kCUDA, device));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), owner->storage.nbytes(), std::move(memory), device_allocator(), true);
  return alias(tensor, std::move(storage), c10::DispatchKey::CUDA);
}

void resize_storage(c10::Storage storage, size_t bytes) {
  auto made = device_allocator()->allocate(bytes);
  if (auto kept = std::min(bytes, storage.nbytes())) {
    std::memcpy(made.get(), storage.data(), kept);
  }
  storage.set_data_ptr(std::move(made));
  storage.set_nbytes(bytes);
}

void poison(const at::Tensor& tensor) {
  if (tensor.numel() > 0) {
    std::memset(tensor.data_ptr(), kPoison, tensor.nbytes());
  }
}

} // namespace simulated

namespace simulated {
namespace {

// What torch asks the CUDA library, which a build for the CPU lacks.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool hasCUDART() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  int getNumGPUs() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex current_device() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(c10::kCUDA, current_device());
  }
  bool isPinnedPtr(const void* memory) const override {
    return is_pinned(memory);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::detail::getDefaultCPUGenerator();
    return generator;
  }
};

static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

} // namespace

void install_hooks() {
  // torch has made its own, which know of no device, when it was imported, and keeps them where they are.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}

} // namespace simulated

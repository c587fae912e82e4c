// Collectives of the simulated device. They behave as NCCL's: a call returns at once, its work and its future are done
// for the host, and what they give is there for a stream that has waited for them. Underneath gloo carries them out.

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "collectives.h"
#include "memory.h"
#include "streams.h"

namespace simulated {
namespace {

using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Inner = c10::intrusive_ptr<Work>;

class LateWork final : public Work {
 public:
  LateWork(int rank, c10d::OpType type, c10::Stream stream, Tensors outputs, Tensors kept)
      : Work(rank, type), stream_(stream), event_(record(nullptr, stream)), outputs_(std::move(outputs)),
        kept_(std::move(kept)) {
    std::vector<c10::Device> devices{stream.device()};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(outputs_));
  }

  ~LateWork() override {
    destroy(event_);
  }

  bool isCompleted() override {
    return happened(event_);
  }

  bool isSuccess() const override {
    return true;
  }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (opType_ == c10d::OpType::BARRIER) {
      simulated::synchronize("", event_);
    }
    return true;
  }

  void synchronize() override {
    simulated::wait(current_stream(stream_.device_index()), event_);
    kept_.clear();
  }

  Tensors result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  c10::Stream stream_;
  Event* event_;
  Tensors outputs_;
  Tensors kept_; // as NCCL keeps what it works on until somebody has waited
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class SimulatedNccl final : public c10d::Backend {
 public:
  SimulatedNccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(new_stream(-1)) {}

  const std::string getBackendName() const override {
    return "simulated_nccl";
  }

  Inner broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto results = copy(tensors);
    return start(c10d::OpType::BROADCAST, tensors, tensors, results, gloo_->broadcast(results, options));
  }

  Inner allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto results = copy(tensors);
    c10d::AllreduceOptions summed = options;
    auto mean = take_mean(summed.reduceOp);
    auto inner = gloo_->allreduce(results, summed);
    return start(c10d::OpType::ALLREDUCE, tensors, tensors, results, inner, mean);
  }

  Inner allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Inner last;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      last = allreduce(one, options);
    }
    return last;
  }

  Inner allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto given = copy(inputs);
    std::vector<Tensors> results{make_like(outputs[0])};
    auto inner = gloo_->allgather(results, given, options);
    return start(c10d::OpType::ALLGATHER, outputs[0], inputs, results[0], inner);
  }

  Inner _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> results{on_host(output).new_empty(output.sizes()).view({-1}).chunk(size_)};
    Tensors given{copy({input})[0].view({-1})};
    auto inner = gloo_->allgather(results, given, options);
    Tensors outputs = output.view({-1}).chunk(size_);
    return start(c10d::OpType::_ALLGATHER_BASE, outputs, {input}, results[0], inner);
  }

  Inner allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Inner last;
    for (size_t i = 0; i < outputs.size(); i++) {
      last = _allgather_base(outputs[i], inputs[i], options);
    }
    return last;
  }

  Inner scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> given;
    Tensors sent;
    for (const auto& each : inputs) {
      given.push_back(copy(each));
      sent.insert(sent.end(), each.begin(), each.end());
    }
    auto results = make_like(outputs);
    auto inner = gloo_->scatter(results, given, options);
    return start(c10d::OpType::SCATTER, outputs, sent, results, inner);
  }

  Inner _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto results = copy({input});
    c10d::AllreduceOptions summed;
    summed.reduceOp = options.reduceOp;
    auto mean = take_mean(summed.reduceOp);
    auto inner = gloo_->allreduce(results, summed);
    Tensors own{results[0].view({-1}).chunk(size_)[rank_].view(output.sizes())};
    return start(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input}, own, inner, mean);
  }

  Inner reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Inner last;
    for (size_t i = 0; i < outputs.size(); i++) {
      last = _reduce_scatter_base(outputs[i], inputs[i], options);
    }
    return last;
  }

  Inner alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                      const c10d::AllToAllOptions& options) override {
    auto result = on_host(output).new_empty(output.sizes());
    auto given = copy({input})[0];
    auto inner = gloo_->alltoall_base(result, given, to, from, options);
    return start(c10d::OpType::ALLTOALL_BASE, {output}, {input}, {result}, inner);
  }

  Inner send(Tensors& tensors, int rank, int tag) override {
    auto given = copy(tensors);
    return start(c10d::OpType::SEND, {}, tensors, given, gloo_->send(given, rank, tag));
  }

  Inner recv(Tensors& tensors, int rank, int tag) override {
    auto results = make_like(tensors);
    return start(c10d::OpType::RECV, tensors, {}, results, gloo_->recv(results, rank, tag));
  }

  Inner barrier(const c10d::BarrierOptions& options) override {
    return start(c10d::OpType::BARRIER, {}, {}, {}, gloo_->barrier(c10d::BarrierOptions()));
  }

 private:
  // What NCCL would send: memory of the device, in one piece.
  static Tensors copy(const Tensors& tensors) {
    Tensors copies;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      copies.push_back(on_host(tensor.detach()).clone());
    }
    return copies;
  }

  static Tensors make_like(const Tensors& tensors) {
    Tensors made;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda() && tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous, on a device");
      made.push_back(at::empty_like(on_host(tensor.detach())));
    }
    return made;
  }

  // gloo has no mean.
  bool take_mean(c10d::ReduceOp& op) const {
    auto mean = op == c10d::ReduceOp::AVG;
    if (mean) {
      op = c10d::ReduceOp::SUM;
    }
    return mean;
  }

  Inner start(c10d::OpType type, const Tensors& outputs, const Tensors& inputs, const Tensors& results, Inner inner,
              bool mean = false) {
    wait(stream_, current_stream(stream_.device_index()));
    std::vector<const void*> reads, writes;
    for (const auto& input : inputs) {
      reads.push_back(input.storage().data());
    }
    for (const auto& output : outputs) {
      writes.push_back(output.storage().data());
      poison(on_host(output.detach()));
    }
    use(stream_, reads, writes, c10d::opTypeToString(type));
    delay(stream_, false, [outputs, results, inner, mean, size = size_]() {
      at::AutoDispatchBelowAutograd guard;
      inner->wait();
      for (size_t i = 0; i < outputs.size(); i++) {
        auto result = mean ? results[i].div(size) : results[i];
        on_host(outputs[i].detach()).copy_(result);
      }
    });
    Tensors kept = inputs;
    kept.insert(kept.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<LateWork>(rank_, type, stream_, outputs, std::move(kept));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::Stream stream_;
};

} // namespace

// DDP asks for one. There is nothing to measure.
struct NoTimer final : c10d::Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override {
    return std::nullopt;
  }
};

c10::intrusive_ptr<c10d::Backend> make_nccl(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<SimulatedNccl>(std::move(gloo));
}

} // namespace simulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated::NoTimer);
} // namespace c10d

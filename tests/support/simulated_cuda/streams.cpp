#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace simulated {
namespace {

using Key = std::pair<int, int64_t>; // a stream: its device and its number there
using Clock = std::map<Key, uint64_t>;
constexpr int kDevices = 8;

struct Late {
  std::function<void()> land;
  bool on_host;
  std::once_flag once;
  std::atomic<bool> landed = false;
};
using Pending = std::vector<std::shared_ptr<Late>>;

struct State {
  Pending pending;
  Clock clock;
};

struct Memory {
  Key home; // the stream that it was allocated on
  uint64_t number; // in the order of allocations
  Clock reads, writes; // by stream, when it last did
  std::set<Key> recorded;
};

// Memory that is free, and may be given out again on the stream of its allocation.
struct Remains {
  uint64_t before; // the number of the first allocation that may get it
  Clock uses;
};

std::recursive_mutex mutex; // what is let go of under it may free memory
std::map<Key, State> streams;
std::map<const void*, Memory> memories;
std::map<Key, std::vector<Remains>> free_memory;
uint64_t allocations = 0;
std::vector<std::string> hazards;
Clock host; // what the host has waited for
std::function<void(const std::string&)> listener;
c10::DeviceIndex devices = 1;
int64_t streams_made = 0;
thread_local c10::DeviceIndex device = 0;
thread_local std::array<int64_t, kDevices> current = {};

Key key(c10::Stream stream) {
  return {stream.device_index(), stream.id()};
}

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, time] : other) {
    auto& known = into[stream];
    known = std::max(known, time);
  }
}

void land(const Pending& pending) {
  for (const auto& late : pending) {
    std::function<void()> done; // let go of outside: freeing a tensor may need Python's lock, whose holder may wait here
    std::call_once(late->once, [&late, &done]() {
      late->land();
      done.swap(late->land);
      late->landed = true;
    });
  }
}

// What of `pending` lands where a stream waits; the rest is for the host, which may wait for that stream later.
Pending split(const Pending& pending, Pending& rest) {
  Pending landing;
  for (const auto& late : pending) {
    (late->on_host ? rest : landing).push_back(late);
  }
  return landing;
}

void host_waits(const std::string& what, const Pending& pending, const Clock& clock) {
  if (!what.empty()) {
    note(what);
  }
  land(pending);
  std::lock_guard guard(mutex);
  merge(host, clock);
}

// Whether all `uses` are over for who knows `known`; those of stream `own` are ordered anyway.
bool passed(const Clock& uses, const Clock& known, const Key& own, std::string& who) {
  for (const auto& [stream, time] : uses) {
    auto found = known.find(stream);
    if (stream != own && (found == known.end() || found->second < time)) {
      who = "stream " + std::to_string(stream.second);
      return false;
    }
  }
  return true;
}

} // namespace

struct Event {
  Pending pending;
  Clock clock;
};

c10::DeviceIndex current_device() {
  return device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex other) {
  auto before = device;
  device = other < 0 ? device : other;
  return before;
}

void set_device_count(c10::DeviceIndex count) {
  devices = count;
}

c10::DeviceIndex device_count() {
  return devices;
}

static c10::Stream make(c10::DeviceIndex index, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index), id);
}

c10::Stream current_stream(c10::DeviceIndex index) {
  index = index < 0 ? device : index;
  return make(index, current[index]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  current[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(c10::DeviceIndex index) {
  std::lock_guard guard(mutex);
  return make(index < 0 ? device : index, ++streams_made);
}

Event* record(Event* event, c10::Stream stream) {
  std::lock_guard guard(mutex);
  auto& state = streams[key(stream)];
  if (event == nullptr) {
    event = new Event;
  }
  ++state.clock[key(stream)];
  auto& pending = state.pending;
  auto landed = [](const auto& late) { return late->landed.load(); };
  pending.erase(std::remove_if(pending.begin(), pending.end(), landed), pending.end());
  event->pending = state.pending;
  event->clock = state.clock;
  return event;
}

void wait(c10::Stream waiting, const Event* event) {
  if (event == nullptr) {
    return;
  }
  Pending rest;
  auto landing = split(event->pending, rest);
  {
    std::lock_guard guard(mutex);
    auto& state = streams[key(waiting)];
    state.pending.insert(state.pending.end(), rest.begin(), rest.end());
    merge(state.clock, event->clock);
  }
  land(landing);
}

void wait(c10::Stream waiting, c10::Stream awaited) {
  std::unique_ptr<Event> event(record(nullptr, awaited));
  wait(waiting, event.get());
}

bool happened(const Event* event) {
  if (event != nullptr) {
    host_waits("", event->pending, event->clock);
  }
  return true;
}

void destroy(Event* event) {
  delete event;
}

void delay(c10::Stream stream, bool on_host, std::function<void()> land) {
  auto late = std::make_shared<Late>();
  late->land = std::move(land);
  late->on_host = on_host;
  std::lock_guard guard(mutex);
  streams[key(stream)].pending.push_back(std::move(late));
}

void synchronize(const std::string& what, c10::Stream stream) {
  Pending pending;
  Clock clock;
  {
    std::lock_guard guard(mutex);
    auto& state = streams[key(stream)];
    pending.swap(state.pending);
    clock = state.clock;
  }
  host_waits(what, pending, clock);
}

void synchronize(const std::string& what, const Event* event) {
  if (event != nullptr) {
    host_waits(what, event->pending, event->clock);
  }
}

void synchronize_device(const std::string& what) {
  Pending pending;
  Clock clock;
  {
    std::lock_guard guard(mutex);
    for (auto& [_, state] : streams) {
      pending.insert(pending.end(), state.pending.begin(), state.pending.end());
      state.pending.clear();
      merge(clock, state.clock);
    }
  }
  host_waits(what, pending, clock);
}

void note(const std::string& what) {
  if (listener) {
    listener(what);
  }
}

void set_listener(std::function<void(const std::string&)> heard) {
  listener = std::move(heard);
}

void use(c10::Stream stream, const std::vector<const void*>& reads, const std::vector<const void*>& writes,
         const std::string& what) {
  std::vector<std::string> found;
  {
    std::lock_guard guard(mutex);
    auto own = key(stream);
    auto& clock = streams[own].clock;
    merge(clock, host);
    auto now = ++clock[own];
    std::string who;
    auto here = " by stream " + std::to_string(own.second) + " in " + what;
    for (const auto* memory : reads) {
      auto known = memories.find(memory);
      if (known == memories.end()) {
        continue;
      }
      if (!passed(known->second.writes, clock, own, who)) {
        found.push_back("read" + here + ", unordered with a write by " + who);
      }
      known->second.reads[own] = now;
    }
    for (const auto* memory : writes) {
      auto known = memories.find(memory);
      if (known == memories.end()) {
        continue;
      }
      if (!passed(known->second.writes, clock, own, who) || !passed(known->second.reads, clock, own, who)) {
        found.push_back("written" + here + ", unordered with a use by " + who);
      }
      auto& remains = free_memory[known->second.home];
      for (auto left = remains.begin(); left != remains.end();) {
        if (left->before > known->second.number) {
          ++left;
          continue;
        }
        if (!passed(left->uses, clock, own, who)) {
          found.push_back("memory that " + who + " may still use, and that was freed," + here + " is new there");
        }
        left = remains.erase(left);
      }
      known->second.writes[own] = now;
    }
    hazards.insert(hazards.end(), found.begin(), found.end());
  }
  for (const auto& hazard : found) {
    note("hazard: " + hazard);
  }
}

void allocated(const void* memory, c10::Stream stream) {
  if (memory == nullptr) {
    return;
  }
  std::lock_guard guard(mutex);
  memories[memory] = Memory{key(stream), allocations++, {}, {}, {}};
}

void outlives(const void* memory, c10::Stream stream) {
  std::lock_guard guard(mutex);
  auto known = memories.find(memory);
  if (known != memories.end()) {
    known->second.recorded.insert(key(stream));
  }
}

void freed(const void* memory) {
  std::lock_guard guard(mutex);
  auto known = memories.find(memory);
  if (known == memories.end()) {
    return;
  }
  auto& [home, _, uses, writes, recorded] = known->second;
  merge(uses, writes);
  for (const auto& stream : recorded) {
    uses.erase(stream);
  }
  auto clock = streams[home].clock;
  merge(clock, host);
  std::string who;
  if (!passed(uses, clock, home, who)) {
    free_memory[home].push_back({allocations, uses});
  }
  memories.erase(known);
}

std::vector<std::string> take_hazards() {
  std::lock_guard guard(mutex);
  std::vector<std::string> taken;
  taken.swap(hazards);
  return taken;
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  c10::Device exchangeDevice(c10::Device other) const override {
    return c10::Device(c10::kCUDA, exchange_device(other.index()));
  }
  c10::Device getDevice() const override {
    return c10::Device(c10::kCUDA, current_device());
  }
  void setDevice(c10::Device other) const override {
    exchange_device(other.index());
  }
  void uncheckedSetDevice(c10::Device other) const noexcept override {
    exchange_device(other.index());
  }
  c10::Stream getStream(c10::Device of) const override {
    return current_stream(of.index());
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return make(of.index() < 0 ? current_device() : of.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return new_stream(of.index());
  }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return new_stream(of.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = simulated::record(static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait(stream, static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    return happened(static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    destroy(static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    synchronize("event", static_cast<Event*>(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronize("", stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize("stream", stream);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    synchronize_device("device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    outlives(memory.get(), stream);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 1.0;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

} // namespace
} // namespace simulated

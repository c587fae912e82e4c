// What happens on the streams of the simulated device, and when.
//
// Kernels run at once. Two things do not: the result of a collective is there only for a stream that has waited for it,
// and a copy to page-locked memory only for a host that has. Until then the memory holds NaN. Beside that each stream
// has a vector clock, which tells whether one stream uses memory that another may still be writing, or that is free.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <vector>

namespace simulated {

struct Event;

c10::Stream current_stream(c10::DeviceIndex device = -1);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
void set_device_count(c10::DeviceIndex count);
c10::DeviceIndex device_count();

Event* record(Event* event, c10::Stream stream); // makes the event where it is null
void wait(c10::Stream waiting, const Event* event);
void wait(c10::Stream waiting, c10::Stream awaited);
bool happened(const Event* event);
void destroy(Event* event);

// Lets `land` be called once somebody waits for `stream`: another stream, or for `on_host` the host.
void delay(c10::Stream stream, bool on_host, std::function<void()> land);

// The host waits. `what` is how it is counted; nothing is counted where it is empty.
void synchronize(const std::string& what, c10::Stream stream);
void synchronize(const std::string& what, const Event* event);
void synchronize_device(const std::string& what);
void note(const std::string& what);
void set_listener(std::function<void(const std::string&)> listener);

// One kernel on `stream`: the memory that it reads and writes. Raises where another stream may still be using it.
void use(c10::Stream stream, const std::vector<const void*>& reads, const std::vector<const void*>& writes,
         const std::string& what);
void allocated(const void* memory, c10::Stream stream);
void outlives(const void* memory, c10::Stream stream); // record_stream
void freed(const void* memory);
std::vector<std::string> take_hazards();

} // namespace simulated

// Memory of the devices, and pinned memory of the host.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace fake_device {

c10::DeviceAllocator& device_memory();
at::HostAllocator& pinned_memory();

// A stream other than the one that memory was allocated on uses it: it is not used again before that is done.
void record_use(const c10::DataPtr& data, const c10::Stream& stream);
// A copy on a stream reads or writes pinned memory.
void record_pinned_use(const at::Tensor& tensor, const std::shared_ptr<Queue>& queue);
bool is_pinned(const void* address);
std::pair<int64_t, int64_t> pinned_bytes();  // now, and the most
// The device that an address belongs to; -1 if to none.
c10::DeviceIndex find_device(const void* address);

void set_memory_limit(c10::DeviceIndex device, int64_t bytes);
int64_t memory_limit(c10::DeviceIndex device);

}  // namespace fake_device

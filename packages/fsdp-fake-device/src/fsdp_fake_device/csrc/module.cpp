// What Python sees of the device.
#include "counters.h"
#include "memory.h"
#include "process_group.h"
#include "random_numbers.h"
#include "tensors.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <thread>

namespace fake_device {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return settings().devices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto previous = current_device();
    if (device >= 0) set_current_device(device);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return make_generator(device); }
  at::Device getDeviceFromPtr(void* address) const override {
    const auto device = find_device(address);
    TORCH_CHECK(device >= 0, "this address is not of memory of the fake device");
    return {kFake, device};
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return settings().has_pinned_memory ? &pinned_memory() : at::PrivateUse1HooksInterface::getPinnedMemoryAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

pybind11::dict read_counters() {
  auto& all = counters();
  std::lock_guard lock(all.mutex);
  pybind11::dict report;
  report["kernels"] = all.kernels.load();
  report["collectives"] = all.collectives.load();
  report["host_syncs"] = all.host_syncs;
  report["inline_kernels"] = all.inline_kernels;
  report["copies"] = all.copies;
  return report;
}

// Operators of libraries without derivatives, such as c10d's, are left to the device. torch 2.9 does not say so itself.
void register_autograd() {
  constexpr auto key = c10::DispatchKey::AutogradPrivateUse1;
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key)) return;
  static torch::Library library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace fake_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake_device;
  using without_lock = pybind11::call_guard<pybind11::gil_scoped_release>;

  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  register_autograd();
  watch_forks();
  settings();  // an environment variable that is wrong is named at once

  m.def("device_count", [] { return settings().devices; });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](c10::DeviceIndex device) { set_current_device(device); });
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("is_used", &is_used);
  m.def("default_generator", [](c10::DeviceIndex device) { return default_generator(device); });
  m.def("memory_limit", &memory_limit);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("total_memory", [] { return settings().memory; });
  m.def("memory_info", [](c10::DeviceIndex device) {
    const auto reserved = device_memory().getDeviceStats(device).reserved_bytes[0].current;
    const auto limit = std::min(memory_limit(device), settings().memory);
    return std::pair(std::max<int64_t>(0, limit - reserved), settings().memory);
  });
  m.def("pinned_bytes", &pinned_bytes);
  m.def("counters", &read_counters);
  m.def("reset_counters", [] { counters().reset(); });
  m.def("delay", [] {
    const auto held = settings().held.load();
    const char* streams = held == Held::all ? "all" : held == Held::default_streams ? "default" : "side";
    return std::pair(settings().delay_ms.load(), std::string(streams));
  });
  m.def("set_delay", [](int64_t milliseconds, const std::string& streams) {
    settings().held = parse_held(streams);
    settings().delay_ms = milliseconds;
  });
  m.def("set_blocking", [](bool is_blocking) { settings().is_blocking = is_blocking; });
  m.def("set_parts", [](bool has_streams, bool has_pinned_memory) {
    settings().has_streams = has_streams;
    settings().has_pinned_memory = has_pinned_memory;
  });
  m.def("sleep", [](int64_t milliseconds) {
    launch("sleep", current_device(), [=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  });
  m.def("shut_down", &shut_down, without_lock());
  add_process_group(m);
}

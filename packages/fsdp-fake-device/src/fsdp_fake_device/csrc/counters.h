// What the device has done so far, for tests to ask.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace fake_device {

struct Counters {
  std::atomic<int64_t> kernels{0};                // queued
  std::atomic<int64_t> collectives{0};            // queued
  std::map<std::string, int64_t> host_syncs;      // what waited on the host, by kind
  std::map<std::string, int64_t> inline_kernels;  // waited only since this device can't queue them, by operator
  std::map<std::string, std::pair<int64_t, int64_t>> copies;  // how many, and bytes
  std::mutex mutex;                                           // of the maps

  void add_host_sync(const std::string& kind) {
    std::lock_guard lock(mutex);
    ++host_syncs[kind];
  }
  void add_inline(const std::string& name) {
    std::lock_guard lock(mutex);
    ++inline_kernels[name];
  }
  void add_copy(const std::string& kind, int64_t bytes) {
    std::lock_guard lock(mutex);
    auto& [count, total] = copies[kind];
    ++count;
    total += bytes;
  }
  void reset() {
    std::lock_guard lock(mutex);
    kernels = 0;
    collectives = 0;
    host_syncs.clear();
    inline_kernels.clear();
    copies.clear();
  }
};

inline Counters& counters() {
  static auto* all = new Counters;  // never destroyed: threads may count while the process ends
  return *all;
}

}  // namespace fake_device

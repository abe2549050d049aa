#include "memory.h"

#include "counters.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>
#include <vector>

namespace fake_device {
namespace {

constexpr size_t kGranule = 512;  // sizes are rounded up to it, as CUDA's are
constexpr int kPoison = 0xFF;     // NaNs, and integers that no index can be

using Stats = c10::CachingDeviceAllocator::DeviceStats;

size_t round_up(size_t bytes) { return std::max<size_t>(1, (bytes + kGranule - 1) / kGranule) * kGranule; }

void* allocate_poisoned(size_t bytes) {
  void* address = nullptr;
  TORCH_CHECK(!posix_memalign(&address, 64, bytes), "the host has no ", bytes, " bytes left for the fake device");
  std::memset(address, kPoison, bytes);
  return address;
}

std::string describe_bytes(int64_t bytes) {
  const std::array<std::pair<int64_t, const char*>, 3> units{{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}}};
  std::ostringstream text;
  for (const auto& [size, unit] : units) {
    if (bytes < size) continue;
    text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / static_cast<double>(size) << ' ' << unit;
    return text.str();
  }
  text << bytes << " bytes";
  return text.str();
}

struct Block {
  void* address;
  size_t bytes;                               // of the host
  size_t requested;                           // by who has it now
  std::shared_ptr<Queue> queue;               // of the stream that it was allocated on
  std::vector<std::shared_ptr<Queue>> users;  // further streams
};

bool are_reached(const std::vector<Mark>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](const Mark& mark) { return mark.is_reached(); });
}

// As CUDA's caching allocator: what is freed is used again at once, but only on the stream that it was allocated on.
struct Device {
  struct Freed {
    Block block;
    std::vector<Mark> marks;  // what has to be done before it is used again
  };

  std::multimap<std::pair<Queue*, size_t>, Block> cached;
  std::vector<Freed> freed;
  Stats stats;
  int64_t limit = settings().memory;

  static void count(c10::CachingAllocator::StatArray& stat, int64_t bytes) {
    bytes < 0 ? stat[0].decrease(-bytes) : stat[0].increase(bytes);
  }

  void cache(Block block) {
    count(stats.active, -1);
    count(stats.active_bytes, -static_cast<int64_t>(block.bytes));
    const std::pair key(block.queue.get(), block.bytes);
    cached.emplace(key, std::move(block));
  }

  // Has it poisoned in the order of its stream, as what is queued next may write it: what another stream still reads of
  // the tensor that was there is seen to be wrong. Not when it is freed: until it is used again, nothing writes it, and
  // that may be after the stream has waited for the other.
  std::optional<Block> take_cached(Queue* queue, size_t bytes) {
    const auto [begin, end] = cached.equal_range({queue, bytes});
    if (begin == end) return std::nullopt;
    const auto last = std::prev(end);
    auto block = std::move(last->second);
    cached.erase(last);
    queue->push([address = block.address, bytes] { std::memset(address, kPoison, bytes); },
                Queue::When::with_predecessor);
    return block;
  }

  void cache_what_is_unused() {
    auto is_in_use = [&](Freed& entry) {
      if (!are_reached(entry.marks)) return true;
      cache(std::move(entry.block));
      return false;
    };
    freed.erase(std::stable_partition(freed.begin(), freed.end(), is_in_use), freed.end());
  }

  std::vector<void*> take_all_cached() {
    std::vector<void*> addresses;
    for (const auto& [key, block] : cached) {
      count(stats.reserved_bytes, -static_cast<int64_t>(block.bytes));
      count(stats.segment, -1);
      ++stats.num_device_free;
      addresses.push_back(block.address);
    }
    cached.clear();
    return addresses;
  }
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    const c10::Device where(kFake, device);
    if (!bytes) return {nullptr, nullptr, &free_block, where};
    check_process();
    auto block = find_block(device, round_up(bytes));
    std::lock_guard lock(mutex_);
    block.requested = bytes;
    block.users.clear();
    auto& stats = devices_[device].stats;
    Device::count(stats.allocation, 1);
    Device::count(stats.active, 1);
    Device::count(stats.allocated_bytes, block.bytes);
    Device::count(stats.active_bytes, block.bytes);
    Device::count(stats.requested_bytes, bytes);
    auto* address = block.address;
    blocks_.emplace(address, std::move(block));
    return {address, address, &free_block, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    launch("copy_data", current_device(), [=] { std::memcpy(target, source, bytes); });
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (c10::DeviceIndex device = 0; device < settings().devices; ++device) empty_cache(device);
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto queue = find_queue(stream);
    std::lock_guard lock(mutex_);
    auto entry = blocks_.find(data.get_context());
    if (entry == blocks_.end() || !queue || entry->second.queue == queue) return;
    auto& users = entry->second.users;
    if (std::find(users.begin(), users.end(), queue) == users.end()) users.push_back(std::move(queue));
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return devices_.at(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    auto& stats = devices_.at(device).stats;
    for (auto* stat : all_of(stats)) (*stat)[0].reset_accumulated();
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    for (auto* stat : all_of(devices_.at(device).stats)) (*stat)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // in torch 2.10 and later an override
    std::lock_guard lock(mutex_);
    const auto& self = devices_.at(device);
    const auto limit = std::min(self.limit, settings().memory);
    return {std::max<int64_t>(0, limit - self.stats.reserved_bytes[0].current), settings().memory};
  }

  c10::DeviceIndex find_device(const void* address) {
    std::lock_guard lock(mutex_);
    auto entry = blocks_.upper_bound(const_cast<void*>(address));
    if (entry == blocks_.begin()) return -1;
    const auto& block = std::prev(entry)->second;
    const bool is_inside = static_cast<const char*>(address) < static_cast<char*>(block.address) + block.bytes;
    return is_inside ? block.queue->device() : -1;
  }

  void set_limit(c10::DeviceIndex device, int64_t bytes) {
    std::lock_guard lock(mutex_);
    devices_.at(device).limit = bytes;
  }
  int64_t limit(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    return devices_.at(device).limit;
  }

 private:
  static void free_block(void* address);

  static std::array<c10::CachingAllocator::StatArray*, 7> all_of(Stats& stats) {
    return {&stats.allocation,     &stats.segment,      &stats.active,         &stats.allocated_bytes,
            &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes};
  }

  Block find_block(c10::DeviceIndex device, size_t bytes) {
    auto queue = current_queue(device);
    if (auto block = take_block(device, queue, bytes)) return std::move(*block);
    // As CUDA's: wait for what was freed while other streams use it, and give back what is cached.
    {
      std::lock_guard lock(mutex_);
      ++devices_.at(device).stats.num_alloc_retries;
    }
    counters().add_host_sync("memory is full");
    empty_cache(device);
    if (auto block = take_block(device, queue, bytes)) return std::move(*block);
    std::lock_guard lock(mutex_);
    auto& self = devices_.at(device);
    ++self.stats.num_ooms;
    const auto allocated = self.stats.allocated_bytes[0].current, reserved = self.stats.reserved_bytes[0].current;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "fake device out of memory. Tried to allocate ", describe_bytes(bytes),
                     ". Device ", static_cast<int>(device), " has a total capacity of ", describe_bytes(self.limit),
                     " of which ", describe_bytes(std::max<int64_t>(0, self.limit - reserved)),
                     " is free. Of the allocated memory ", describe_bytes(allocated), " is allocated by PyTorch, and ",
                     describe_bytes(reserved - allocated), " is reserved by PyTorch but unallocated.");
  }

  std::optional<Block> take_block(c10::DeviceIndex device, const std::shared_ptr<Queue>& queue, size_t bytes) {
    std::lock_guard lock(mutex_);
    auto& self = devices_.at(device);
    self.cache_what_is_unused();
    if (auto block = self.take_cached(queue.get(), bytes)) return block;
    if (self.stats.reserved_bytes[0].current + static_cast<int64_t>(bytes) > self.limit) return std::nullopt;
    Device::count(self.stats.reserved_bytes, bytes);
    Device::count(self.stats.segment, 1);
    ++self.stats.num_device_alloc;
    return Block{allocate_poisoned(bytes), bytes, bytes, queue, {}};
  }

  void empty_cache(c10::DeviceIndex device) {
    drain(device);
    std::vector<void*> addresses;
    {
      std::lock_guard lock(mutex_);
      devices_.at(device).cache_what_is_unused();
      addresses = devices_.at(device).take_all_cached();
    }
    drain(device);  // a stream that reads what it has no right to reads poison, and never unmapped memory
    for (auto* address : addresses) std::free(address);
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;  // that are allocated
  std::array<Device, kMaxDevices> devices_;
};

DeviceMemory& memory() {
  static auto* all = new DeviceMemory;
  return *all;
}

void DeviceMemory::free_block(void* address) {
  if (!address || is_in_bad_fork()) return;  // a child's copy of its parent's tensor
  auto& self = memory();
  std::lock_guard lock(self.mutex_);
  auto entry = self.blocks_.find(address);
  auto block = std::move(entry->second);
  self.blocks_.erase(entry);
  auto& device = self.devices_.at(block.queue->device());
  Device::count(device.stats.allocation, -1);
  Device::count(device.stats.allocated_bytes, -static_cast<int64_t>(block.bytes));
  Device::count(device.stats.requested_bytes, -static_cast<int64_t>(block.requested));
  std::vector<Mark> marks;
  for (const auto& queue : block.users) marks.push_back(queue->mark());
  if (are_reached(marks)) {
    device.cache(std::move(block));
  } else {
    device.freed.push_back({std::move(block), std::move(marks)});
  }
}

// Pinned memory: used again once the copies that were queued with it are done.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(mutex_);
    auto block = take_block(round_up(bytes));
    active_requests_.increase(1);
    active_bytes_.increase(block.bytes);
    auto* address = block.address;
    blocks_.emplace(address, std::move(block));
    return {address, address, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  bool record_event(void*, void* context, c10::Stream stream) override {
    auto queue = find_queue(stream);
    std::lock_guard lock(mutex_);
    auto entry = blocks_.find(context);
    if (entry == blocks_.end()) return false;
    if (queue) entry->second.marks.push_back(queue->mark());
    return true;
  }
  void empty_cache() override {
    std::lock_guard lock(mutex_);
    for (const auto& [bytes, block] : cached_) {
      allocated_bytes_.decrease(bytes);
      allocations_.decrease(1);
      std::free(block.address);
    }
    cached_.clear();
  }
  at::HostStats get_stats() override {
    std::lock_guard lock(mutex_);
    at::HostStats stats;
    stats.allocated_bytes = allocated_bytes_;
    fill_newer(stats);
    return stats;
  }
  void reset_accumulated_stats() override {
    std::lock_guard lock(mutex_);
    for (auto* stat : all()) stat->reset_accumulated();
  }
  void reset_peak_stats() override {
    std::lock_guard lock(mutex_);
    for (auto* stat : all()) stat->reset_peak();
  }
  std::pair<int64_t, int64_t> bytes() {
    std::lock_guard lock(mutex_);
    return {active_bytes_.current, active_bytes_.peak};
  }
  bool has(const void* address) {
    std::lock_guard lock(mutex_);
    auto entry = blocks_.upper_bound(const_cast<void*>(address));
    if (entry == blocks_.begin()) return false;
    const auto& block = std::prev(entry)->second;
    return static_cast<const char*>(address) < static_cast<char*>(block.address) + block.bytes;
  }

 private:
  struct PinnedBlock {
    void* address;
    size_t bytes;
    std::vector<Mark> marks;
  };

  static void free_block(void* address);

  using Stat = c10::CachingAllocator::Stat;

  std::array<Stat*, 4> all() { return {&active_requests_, &active_bytes_, &allocations_, &allocated_bytes_}; }

  template <typename Stats>
  void fill_newer(Stats& stats) {  // which torch 2.9 names otherwise
    if constexpr (requires { stats.active_requests; }) {
      stats.active_requests = active_requests_;
      stats.active_bytes = active_bytes_;
      stats.allocations = allocations_;
    }
  }

  PinnedBlock take_block(size_t bytes) {
    for (auto [entry, end] = cached_.equal_range(bytes); entry != end; ++entry) {
      if (!are_reached(entry->second.marks)) continue;
      auto block = std::move(entry->second);
      cached_.erase(entry);
      block.marks.clear();
      std::memset(block.address, kPoison, bytes);
      return block;
    }
    allocations_.increase(1);
    allocated_bytes_.increase(bytes);
    return {allocate_poisoned(bytes), bytes, {}};
  }

  std::mutex mutex_;
  std::map<void*, PinnedBlock> blocks_;
  std::multimap<size_t, PinnedBlock> cached_;
  Stat active_requests_, active_bytes_, allocations_, allocated_bytes_;
};

PinnedMemory& pinned() {
  static auto* all = new PinnedMemory;
  return *all;
}

void PinnedMemory::free_block(void* address) {
  if (!address || is_in_bad_fork()) return;
  auto& self = pinned();
  std::lock_guard lock(self.mutex_);
  auto entry = self.blocks_.find(address);
  auto block = std::move(entry->second);
  self.blocks_.erase(entry);
  self.active_requests_.decrease(1);
  self.active_bytes_.decrease(block.bytes);
  self.cached_.emplace(block.bytes, std::move(block));
}

}  // namespace

c10::DeviceAllocator& device_memory() { return memory(); }
at::HostAllocator& pinned_memory() { return pinned(); }

void record_use(const c10::DataPtr& data, const c10::Stream& stream) { memory().recordStream(data, stream); }

void record_pinned_use(const at::Tensor& tensor, const std::shared_ptr<Queue>& queue) {
  const auto& data = tensor.storage().data_ptr();
  pinned().record_event(data.get(), data.get_context(), queue->stream());
}

std::pair<int64_t, int64_t> pinned_bytes() { return pinned().bytes(); }
bool is_pinned(const void* address) { return address && pinned().has(address); }
c10::DeviceIndex find_device(const void* address) { return memory().find_device(address); }
void set_memory_limit(c10::DeviceIndex device, int64_t bytes) { memory().set_limit(device, bytes); }
int64_t memory_limit(c10::DeviceIndex device) { return memory().limit(device); }

static c10::AllocatorRegisterer<kFake> device_memory_registration(&memory());
static at::HostAllocatorRegistry<kFake> pinned_memory_registration(&pinned());

}  // namespace fake_device

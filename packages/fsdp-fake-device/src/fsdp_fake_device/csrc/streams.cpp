#include "streams.h"

#include "counters.h"

#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <cstdlib>
#include <map>
#include <thread>
#include <vector>

namespace fake_device {
namespace {

constexpr c10::StreamId kPoolSize =
    32;  // streams 1 to 32 have the usual priority, 33 to 64 a high one, as CUDA's pools
constexpr c10::StreamId kFirstOfGroups = 1000;

std::atomic<bool> used{false}, bad_fork{false}, ended{false};
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<c10::StreamId, kMaxDevices> stream_of_thread{};

// Never destroyed, for threads may run while the process ends.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::shared_ptr<Queue>> queues;
  std::map<c10::DeviceIndex, std::exception_ptr> failures;
  c10::StreamId next_of_groups = kFirstOfGroups;
  std::array<std::array<std::atomic<uint32_t>, 2>, kMaxDevices> next_of_pool{};
};
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

// A thread that waits gives up Python's lock: what it waits for may need it.
class WithoutPython {
 public:
  WithoutPython() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

int64_t read_number(const char* name, int64_t fallback) {
  const char* text = std::getenv(name);
  if (!text || !*text) return fallback;
  char* end = nullptr;
  const auto number = std::strtoll(text, &end, 10);
  TORCH_CHECK(!*end && number >= 0, name, "=", text, " is no whole number. Type one such as ", name, "=",
              std::max<int64_t>(fallback, 1));
  return number;
}

}  // namespace

Settings& settings() {
  static auto* all = new Settings{
      static_cast<int>(std::clamp<int64_t>(read_number("FSDP_FAKE_DEVICES", 4), 1, kMaxDevices)),
      read_number("FSDP_FAKE_DEVICE_DELAY", 0),
      parse_held(std::getenv("FSDP_FAKE_DEVICE_HELD") ? std::getenv("FSDP_FAKE_DEVICE_HELD") : "all"),
      read_number("FSDP_FAKE_DEVICE_BLOCKING", 0) != 0,
      read_number("FSDP_FAKE_DEVICE_MEMORY", int64_t(16) << 30),
  };
  return *all;
}

Held parse_held(const std::string& text) {
  if (text == "all") return Held::all;
  if (text == "default") return Held::default_streams;
  TORCH_CHECK(text == "side", "the streams that can be held back are \"all\", \"default\" and \"side\", and not \"",
              text, "\"");
  return Held::side_streams;
}

// ---------------------------------------------------------------- a queue

bool Queue::is_held() const {
  const auto held = settings().held.load();
  return held == Held::all || (held == Held::default_streams) == (id_ == 0);
}

bool Mark::is_reached() const { return !queue || queue->has_reached(position); }

uint64_t Queue::push(std::function<void()> operation, When when) {
  check_process();
  used = true;
  std::unique_lock lock(mutex_);
  ++queued_;
  if (when == When::with_predecessor && completed_ + 1 == queued_ && !is_running_) {
    operation();  // nothing is before it
    completed_ = queued_;
    return queued_;
  }
  const auto delay = std::chrono::milliseconds(is_held() ? settings().delay_ms.load() : 0);
  const auto due = std::chrono::steady_clock::now() + delay;
  operations_.push_back({std::move(operation), when, due});
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  }
  changed_.notify_one();
  return queued_;
}

void Queue::push_wait(const Mark& mark) {
  if (!mark.queue || mark.queue.get() == this || mark.is_reached()) return;
  push([mark] { mark.queue->wait_on_stream(mark.position); });
}

Mark Queue::mark() {
  std::lock_guard lock(mutex_);
  return {shared_from_this(), queued_};
}

bool Queue::has_reached(uint64_t position) {
  std::lock_guard lock(mutex_);
  return completed_ >= position;
}

void Queue::wait(uint64_t position) {
  std::unique_lock lock(mutex_);
  demanded_ = std::max(demanded_, position);
  changed_.notify_one();
  done_.wait(lock, [&] { return completed_ >= position || ended; });
}

void Queue::wait_on_host(uint64_t position) {
  if (has_reached(position)) return;
  check_process();
  WithoutPython released;
  wait(position);
}

void Queue::wait_on_stream(uint64_t position) { wait(position); }

void Queue::run_next(std::unique_lock<std::mutex>& lock) {
  auto operation = std::move(operations_.front());
  operations_.pop_front();
  lock.unlock();
  try {
    operation.run();
  } catch (...) {
    set_failure(device_, std::current_exception());
  }
  operation.run = nullptr;  // what it holds is freed outside the lock
  lock.lock();
}

void Queue::work() {
  device_of_thread = device_;
  stream_of_thread[device_] = id_;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !operations_.empty() || is_closing_; });
    if (operations_.empty()) return;
    const auto due = operations_.front().due;
    const auto is_ready = [&] {
      return operations_.empty() || is_closing_ || demanded_ > completed_ ||
             operations_.front().when == When::with_predecessor || std::chrono::steady_clock::now() >= due;
    };
    while (!is_ready()) changed_.wait_until(lock, due);
    if (operations_.empty()) continue;  // they were discarded
    is_running_ = true;
    uint64_t ran = 0;
    do {
      run_next(lock);
      ++ran;
    } while (!operations_.empty() && operations_.front().when == When::with_predecessor);
    is_running_ = false;
    completed_ = std::max(completed_ + ran, completed_);
    done_.notify_all();
  }
}

void Queue::close() {
  std::lock_guard lock(mutex_);
  is_closing_ = true;
  changed_.notify_one();
}

bool Queue::discard(std::chrono::steady_clock::time_point deadline) {
  std::deque<Operation> discarded;  // what they hold is freed outside the lock
  std::unique_lock lock(mutex_);
  discarded.swap(operations_);
  is_closing_ = true;
  changed_.notify_one();
  done_.notify_all();
  return done_.wait_until(lock, deadline, [&] { return !is_running_; });
}

// ---------------------------------------------------------------- devices and their streams

c10::DeviceIndex current_device() { return device_of_thread; }

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < settings().devices,
              "invalid device ordinal: there is no device fake:", static_cast<int>(device), ", for this process has ",
              settings().devices, ". Set FSDP_FAKE_DEVICES to how many it is to have");
  device_of_thread = device;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_of_thread;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device), stream_of_thread.at(device));
}

std::shared_ptr<Queue> find_queue(const c10::Stream& stream) {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  const std::pair key(stream.device_index(), stream.id());
  auto entry = all.queues.find(key);
  if (entry != all.queues.end()) return entry->second;
  if (stream.id() >= kFirstOfGroups) return nullptr;
  return all.queues[key] = std::make_shared<Queue>(stream.device_index(), stream.id());
}

std::shared_ptr<Queue> current_queue(c10::DeviceIndex device) { return find_queue(current_stream(device)); }

std::shared_ptr<Queue> make_queue(c10::DeviceIndex device) {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  const auto id = all.next_of_groups++;
  return all.queues[{device, id}] = std::make_shared<Queue>(device, id);
}

void close_queue(const std::shared_ptr<Queue>& queue) {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  all.queues.erase({queue->device(), queue->id()});
  queue->close();
}

void launch(const std::string& name, c10::DeviceIndex device, std::function<void()> kernel) {
  ++counters().kernels;
  auto queue = current_queue(device);
  queue->push([name, kernel = std::move(kernel)] {
    std::string reason;
    try {
      kernel();
      return;
    } catch (const c10::Error& error) {
      reason = error.what_without_backtrace();
    } catch (const std::exception& error) {
      reason = error.what();
    }
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1,
        c10::str("fake device error: the kernel of ", name, " failed: ", reason,
                 "\nKernels run later than the line that queues them, so the stack above may be of another one. "
                 "To find it, set FSDP_FAKE_DEVICE_BLOCKING=1."));
  });
  if (settings().is_blocking) {
    queue->wait_on_host(queue->mark().position);
    raise_failure(device);
  }
}

void synchronize(const std::shared_ptr<Queue>& queue, const std::string& kind) {
  counters().add_host_sync(kind);
  if (!queue) return;
  queue->wait_on_host(queue->mark().position);
  raise_failure(queue->device());
}

void drain(c10::DeviceIndex device) {
  std::vector<std::shared_ptr<Queue>> queues;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& [key, queue] : registry().queues)
      if (key.first == device) queues.push_back(queue);
  }
  for (const auto& queue : queues) queue->wait_on_host(queue->mark().position);
}

void synchronize_device(c10::DeviceIndex device, const std::string& kind) {
  counters().add_host_sync(kind);
  drain(device);
  raise_failure(device);
}

void set_failure(c10::DeviceIndex device, std::exception_ptr failure) {
  std::lock_guard lock(registry().mutex);
  registry().failures.emplace(device, failure);  // the first says most
}

void clear_failure(c10::DeviceIndex device) {
  std::lock_guard lock(registry().mutex);
  registry().failures.erase(device);
}

void raise_failure(c10::DeviceIndex device) {
  std::exception_ptr failure;
  {
    std::lock_guard lock(registry().mutex);
    auto entry = registry().failures.find(device);
    if (entry == registry().failures.end()) return;
    failure = entry->second;
    registry().failures.erase(entry);
  }
  std::rethrow_exception(failure);
}

// ---------------------------------------------------------------- processes

void check_process() {
  TORCH_CHECK(!bad_fork,
              "Cannot re-initialize the fake device in forked subprocess: the process that forked it had used "
              "the device. To use it with multiprocessing, you must use the 'spawn' start method");
}

bool is_in_bad_fork() { return bad_fork; }
bool is_used() { return used; }

void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { bad_fork = used.load(); });
}

void shut_down() {
  if (bad_fork || ended.exchange(true)) return;
  WithoutPython released;
  std::vector<std::shared_ptr<Queue>> queues;
  {
    std::lock_guard lock(registry().mutex);
    for (const auto& [key, queue] : registry().queues) queues.push_back(queue);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);  // a collective may wait for ever
  for (const auto& queue : queues) queue->discard(deadline);
}

// ---------------------------------------------------------------- as torch asks for them

namespace {

struct Event {
  Mark mark;
  std::shared_ptr<std::atomic<int64_t>> reached_at;  // in ns, if it was made for timing
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device getDevice() const override { return {kFake, device_of_thread}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < settings().devices) device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return settings().devices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kFake, index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    if (!settings().has_streams) return DeviceGuardImplInterface::getNewStream(device, priority);
    const auto index = index_of(device);
    const bool is_high = priority < 0;
    const auto turn = registry().next_of_pool.at(index)[is_high]++ % kPoolSize;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, index), 1 + turn + (is_high ? kPoolSize : 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override {
    return getNewStream(device, is_high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto previous = current_stream(stream.device_index());
    stream_of_thread.at(stream.device_index()) = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { return find_queue(stream).get(); }
  bool queryStream(const c10::Stream& stream) const override {
    const auto queue = find_queue(stream);
    return !queue || queue->mark().is_reached();
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(find_queue(stream), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? device_of_thread : device, "device");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device fake:", static_cast<int>(device),
                " does not match recording stream's device fake:", static_cast<int>(stream.device_index()), ".");
    if (!*event) *event = new Event;
    auto& self = *static_cast<Event*>(*event);
    const auto queue = find_queue(stream);
    if (!queue) return;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      auto reached_at = self.reached_at = std::make_shared<std::atomic<int64_t>>(0);
      queue->push([reached_at] { *reached_at = std::chrono::steady_clock::now().time_since_epoch().count(); },
                  Queue::When::with_predecessor);
    }
    self.mark = queue->mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto queue = find_queue(stream);
    if (event && queue) queue->push_wait(static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->mark.is_reached(); }
  void synchronizeEvent(void* event) const override {
    counters().add_host_sync("event");
    if (!event) return;
    const auto mark = static_cast<Event*>(event)->mark;
    if (!mark.queue) return;
    mark.queue->wait_on_host(mark.position);
    raise_failure(mark.queue->device());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    const auto &first = *static_cast<Event*>(start), &second = *static_cast<Event*>(end);
    TORCH_CHECK(first.reached_at && second.reached_at,
                "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(first.mark.is_reached() && second.mark.is_reached(),
                "Both events must be completed before calculating elapsed time.");
    return static_cast<double>(*second.reached_at - *first.reached_at) / 1e6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

 private:
  static c10::DeviceIndex index_of(c10::Device device) {
    return device.index() < 0 ? device_of_thread : device.index();
  }
};

}  // namespace

void record_use(const c10::DataPtr& data, const c10::Stream& stream);  // memory.cpp

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  record_use(data, stream);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace fake_device

// Streams: a queue of operations each, which a thread of its own runs in their order.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

namespace fake_device {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

// Whose operations wait until they are demanded. Where all do, an operation that comes too early is seen; where only
// those of the default streams do, also one that is to come after them, and is demanded by them alone.
enum class Held { all, default_streams, side_streams };

// What the environment variables say, read once; those that are atomic may be changed later.
struct Settings {
  int devices;                    // FSDP_FAKE_DEVICES
  std::atomic<int64_t> delay_ms;  // FSDP_FAKE_DEVICE_DELAY
  std::atomic<Held> held;         // FSDP_FAKE_DEVICE_HELD
  std::atomic<bool> is_blocking;  // FSDP_FAKE_DEVICE_BLOCKING, as CUDA_LAUNCH_BLOCKING
  int64_t memory;                 // FSDP_FAKE_DEVICE_MEMORY, of each device
  std::atomic<bool> has_streams{true};  // as torch's base class of devices has none
  std::atomic<bool> has_pinned_memory{true};
};
Settings& settings();
Held parse_held(const std::string& text);

class Queue;

// A position in a stream: all that was queued there before it.
struct Mark {
  std::shared_ptr<Queue> queue;
  uint64_t position = 0;

  bool is_reached() const;
};

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  enum class When {
    on_demand,         // once somebody waits for it, or it has waited for the delay
    with_predecessor,  // as soon as what is before it is done; nobody sees that done before this is
  };

  Queue(c10::DeviceIndex device, c10::StreamId id) : device_(device), id_(id) {}

  uint64_t push(std::function<void()> operation, When when = When::on_demand);
  void push_wait(const Mark& mark);
  Mark mark();
  bool has_reached(uint64_t position);
  // From a thread of the host: have it run what is before the position, and wait until that is done.
  void wait_on_host(uint64_t position);
  // From the thread of another stream.
  void wait_on_stream(uint64_t position);
  // Runs what is left, and ends the thread.
  void close();
  // Forgets what is left. Returns whether nothing runs any more.
  bool discard(std::chrono::steady_clock::time_point deadline);

  c10::DeviceIndex device() const { return device_; }
  c10::StreamId id() const { return id_; }
  c10::Stream stream() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device_), id_); }

 private:
  struct Operation {
    std::function<void()> run;
    When when;
    std::chrono::steady_clock::time_point due;
  };

  bool is_held() const;
  void work();
  void run_next(std::unique_lock<std::mutex>& lock);
  void wait(uint64_t position);

  const c10::DeviceIndex device_;
  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;  // the worker waits for it
  std::condition_variable done_;     // who waits for the worker
  std::deque<Operation> operations_;
  uint64_t queued_ = 0, completed_ = 0, demanded_ = 0;
  bool has_thread_ = false, is_running_ = false, is_closing_ = false;
};

// The queue of a stream, which is made when it is first asked for. A closed stream has none.
std::shared_ptr<Queue> find_queue(const c10::Stream& stream);
std::shared_ptr<Queue> current_queue(c10::DeviceIndex device);
// A stream that no pool hands out, for a process group.
std::shared_ptr<Queue> make_queue(c10::DeviceIndex device);
void close_queue(const std::shared_ptr<Queue>& queue);

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);

// Queues a kernel on the current stream of a device. An exception in it is kept, and raised by the next that waits.
void launch(const std::string& name, c10::DeviceIndex device, std::function<void()> kernel);
// Waits for all that is queued on a stream or a device, counts that as a synchronization of this kind, and raises what
// failed there.
void synchronize(const std::shared_ptr<Queue>& queue, const std::string& kind);
void synchronize_device(c10::DeviceIndex device, const std::string& kind);
// Waits without a word for all streams of a device.
void drain(c10::DeviceIndex device);
void set_failure(c10::DeviceIndex device, std::exception_ptr failure);
void raise_failure(c10::DeviceIndex device);
void clear_failure(c10::DeviceIndex device);

// Raises in a child process that was forked after its parent had used the device.
void check_process();
bool is_in_bad_fork();
bool is_used();
void watch_forks();
void shut_down();

}  // namespace fake_device

// Collectives, which run on streams as NCCL's do: over gloo, on the same memory.
#include "process_group.h"

#include "counters.h"
#include "tensors.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <map>

namespace fake_device {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Timeout = std::chrono::milliseconds;

// How a collective failed; of it know the Work and the stream that ran it.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr failure;
  Tensors retained;  // until wait(), or until it is done, as NCCL's group keeps the tensors of what is asynchronous

  std::exception_ptr get() {
    std::lock_guard lock(mutex);
    return failure;
  }
  void set(std::exception_ptr reason) {
    std::lock_guard lock(mutex);
    failure = std::move(reason);
  }
  void release() {
    Tensors released;
    std::lock_guard lock(mutex);
    released.swap(retained);
  }
};

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, c10::Device device, Mark end, std::shared_ptr<Outcome> outcome, Tensors results)
      : c10d::Work(rank, type),
        device_(device),
        end_(std::move(end)),
        outcome_(std::move(outcome)),
        results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device});
    c10::StreamGuard guard(end_.queue->stream());  // who waits for the future waits for this stream
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override { return end_.is_reached(); }
  bool isSuccess() const override { return end_.is_reached() && !outcome_->get(); }
  std::exception_ptr exception() const override { return outcome_->get(); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void synchronize() override {
    current_queue(device_.index())->push_wait(end_);
    outcome_->release();
  }
  void blockCurrentStream() { synchronize(); }

  bool wait(Timeout timeout) override {
    raise();
    synchronize();
    if (opType_ == OpType::BARRIER) {
      wait_on_host("barrier");
    } else if (timeout != kNoTimeout && timeout != c10d::kUnsetTimeout) {
      wait_on_host("wait with a timeout");
    }
    return true;
  }

 private:
  void wait_on_host(const std::string& kind) {
    counters().add_host_sync(kind);
    end_.queue->wait_on_host(end_.position);
    raise();
  }
  void raise() {
    if (auto failure = outcome_->get()) {
      clear_failure(device_.index());  // it is raised once
      std::rethrow_exception(failure);
    }
  }

  c10::Device device_;
  Mark end_;
  std::shared_ptr<Outcome> outcome_;
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What the thread of a stream does: begins it with gloo, and when that is done, stores the results.
struct Job {
  std::function<c10::intrusive_ptr<c10d::Work>()> begin;
  std::function<void()> store = [] {};
};

at::Tensor as_bytes(const at::Tensor& tensor) { return as_cpu(tensor).view({-1}).view(at::kByte); }

// A reduction as gloo knows it: on a copy, in a dtype that it has.
class Reduction {
 public:
  Reduction(const c10d::ReduceOp& op, int size) : op_(op), size_(size), gloo_op_(op) {
    if (op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM) gloo_op_ = c10d::ReduceOp::SUM;
  }

  at::Tensor prepare(const at::Tensor& input) {
    auto copy = input.clone(at::MemoryFormat::Contiguous);
    if (op_.op_ == c10d::ReduceOp::PREMUL_SUM) {
      const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op_.supplement_.get());
      TORCH_CHECK(factor, "PREMUL_SUM has no factor. Make it by torch.distributed._make_nccl_premul_sum(factor)");
      factor->tensor_factor.defined() ? copy.mul_(as_cpu(factor->tensor_factor)) : copy.mul_(factor->double_factor);
    }
    if (copy.is_complex()) return at::view_as_real(copy);
    if (copy.scalar_type() != at::kBool) return copy;
    const bool is_any =
        op_.op_ == c10d::ReduceOp::SUM || op_.op_ == c10d::ReduceOp::MAX || op_.op_ == c10d::ReduceOp::BOR;
    gloo_op_ = is_any ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
    return copy.view(at::kByte);
  }
  const c10d::ReduceOp& gloo_op() const { return gloo_op_; }

  void store(at::Tensor reduced, const at::Tensor& target) const {
    if (target.is_complex()) reduced = at::view_as_complex(reduced);
    if (target.scalar_type() == at::kBool) reduced = reduced.view(at::kBool);
    if (op_.op_ == c10d::ReduceOp::AVG)
      at::isIntegralType(reduced.scalar_type(), true) ? reduced.div_(size_, "trunc") : reduced.div_(size_);
    target.copy_(reduced.view(target.sizes()));
  }

 private:
  c10d::ReduceOp op_;
  int size_;
  c10d::ReduceOp gloo_op_;
};

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, Timeout timeout)
      : Backend(rank, size),
        gloo_(std::move(gloo)),
        options_(c10::make_intrusive<Options>("fakeccl", timeout)),
        is_aborted_(std::make_shared<std::atomic<bool>>(false)) {}
  ~Group() override { close_channels(); }

  const std::string getBackendName() const override { return "fakeccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(Timeout timeout) override {
    options_->timeout = timeout;
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void shutdown() override { close_channels(); }
  void abort() override {
    *is_aborted_ = true;
    gloo_->abort();
    close_channels();
  }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesced_.emplace(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(coalesced_, "endCoalescing without startCoalescing");
    auto all = std::move(*coalesced_);
    coalesced_.reset();
    if (!all.device) all.device = c10::Device(kFake, current_device());
    return queue(OpType::COALESCED, *all.device, all.channel, all.is_async, std::move(all.jobs), all.tensors,
                 all.results);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto bytes = as_bytes(check(tensors));
    return add(OpType::BROADCAST, tensors, tensors, options.asyncOp, {[=, gloo = gloo_] {
                 Tensors buffers{bytes};
                 return gloo->broadcast(buffers, options);
               }});
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto target = as_cpu(check(tensors));
    return add(OpType::ALLREDUCE, tensors, tensors, options.asyncOp,
               reduce_on_all(target, options.reduceOp, options.timeout,
                             [target](const Reduction& reduction, const at::Tensor& reduced) {
                               reduction.store(reduced, target);
                             }));
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) override {
    return together(options.asyncOp, tensors.size(), [&](size_t index) {
      Tensors one{tensors[index]};
      allreduce(one, options);
    });
  }

  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto target = as_cpu(check(tensors));
    const bool is_root = getRank() == options.rootRank;
    auto reduction = std::make_shared<Reduction>(options.reduceOp, getSize());
    auto buffer = std::make_shared<at::Tensor>();
    return add(OpType::REDUCE, tensors, tensors, options.asyncOp,
               {[=, gloo = gloo_] {
                  Tensors buffers{* buffer = reduction->prepare(target)};
                  auto with_op = options;
                  with_op.reduceOp = reduction->gloo_op();
                  return gloo->reduce(buffers, with_op);
                },
                [=] {
                  if (is_root) reduction->store(*buffer, target);
                }});
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    check({output, input});
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(output.numel() == input.numel() * getSize(),
                "output tensor size must be equal to world_size times input tensor size");
    const auto target = as_bytes(output), source = as_bytes(input);
    return add(OpType::_ALLGATHER_BASE, {output, input}, {output}, options.asyncOp, {[=, gloo = gloo_] {
                 auto to = target, from = source.clone();  // which may be a part of the output
                 return gloo->_allgather_base(to, from, options);
               }});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::AllgatherOptions& options) override {
    return together(options.asyncOp, outputs.size(),
                    [&](size_t index) { _allgather_base(outputs[index], inputs[index], options); });
  }

  c10::intrusive_ptr<c10d::Work> allgather(TensorLists& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) override {
    const auto source = as_bytes(check(inputs));
    const auto targets = as_bytes_of_all(outputs.at(0));
    const bool is_even = std::all_of(targets.begin(), targets.end(),
                                     [&](const at::Tensor& target) { return target.sizes() == source.sizes(); });
    auto used = outputs[0];
    used.push_back(inputs[0]);
    if (is_even) {
      return add(OpType::ALLGATHER, used, outputs[0], options.asyncOp, {[=, gloo = gloo_] {
                   TensorLists to{targets};
                   Tensors from{source.clone()};
                   return gloo->allgather(to, from, options);
                 }});
    }
    return together(options.asyncOp, targets.size(), [&](size_t root) {  // of which each may have another size
      c10d::BroadcastOptions of_root;
      of_root.rootRank = static_cast<int64_t>(root);
      of_root.timeout = options.timeout;
      const auto target = targets[root];
      const bool is_mine = static_cast<int>(root) == getRank();
      add(OpType::ALLGATHER, used, outputs[0], options.asyncOp, {[=, gloo = gloo_] {
            if (is_mine) target.copy_(source);
            Tensors buffers{target};
            return gloo->broadcast(buffers, of_root);
          }});
    });
  }

  c10::intrusive_ptr<c10d::Work> gather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& options) override {
    const auto source = as_bytes(check(inputs));
    TensorLists targets;
    Tensors used = inputs;
    for (const auto& list : outputs) {
      targets.push_back(as_bytes_of_all(list));
      used.insert(used.end(), list.begin(), list.end());
    }
    return add(OpType::GATHER, used, outputs.empty() ? Tensors{} : outputs[0], options.asyncOp, {[=, gloo = gloo_] {
                 auto to = targets;
                 Tensors from{source.clone()};
                 return gloo->gather(to, from, options);
               }});
  }

  c10::intrusive_ptr<c10d::Work> scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ScatterOptions& options) override {
    const auto target = as_bytes(check(outputs));
    TensorLists sources;
    Tensors used = outputs;
    for (const auto& list : inputs) {
      sources.push_back(as_bytes_of_all(list));
      used.insert(used.end(), list.begin(), list.end());
    }
    return add(OpType::SCATTER, used, outputs, options.asyncOp, {[=, gloo = gloo_] {
                 Tensors to{target};
                 auto from = sources;
                 return gloo->scatter(to, from, options);
               }});
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    check({output, input});
    TORCH_CHECK(input.scalar_type() == output.scalar_type(),
                "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(input.numel() == output.numel() * getSize(),
                "input tensor must be the same size as output size times world size");
    const auto source = as_cpu(input).view({-1}), target = as_cpu(output);
    const auto begin = target.numel() * getRank();
    return add(OpType::_REDUCE_SCATTER_BASE, {output, input}, {output}, options.asyncOp,
               reduce_on_all(source, options.reduceOp, options.timeout,
                             [=](const Reduction& reduction, const at::Tensor& reduced) {
                               reduction.store(reduced.narrow(0, begin, target.numel()), target);
                             }));
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::ReduceScatterOptions& options) override {
    return together(options.asyncOp, outputs.size(),
                    [&](size_t index) { _reduce_scatter_base(outputs[index], inputs[index], options); });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                const c10d::ReduceScatterOptions& options) override {
    const auto target = as_cpu(check(outputs));
    check(inputs.at(0));
    Tensors sources, used = inputs[0];
    int64_t begin = 0;
    for (size_t rank = 0; rank < inputs[0].size(); ++rank) {
      sources.push_back(as_cpu(inputs[0][rank]).view({-1}));
      if (static_cast<int>(rank) < getRank()) begin += sources.back().numel();
    }
    used.push_back(outputs[0]);
    auto reduction = std::make_shared<Reduction>(options.reduceOp, getSize());
    auto buffer = std::make_shared<at::Tensor>();
    return add(
        OpType::REDUCE_SCATTER, used, outputs, options.asyncOp,
        {[=, gloo = gloo_] { return begin_allreduce(gloo, at::cat(sources), *reduction, *buffer, options.timeout); },
         [=] { reduction->store(buffer->narrow(0, begin, target.numel()), target); }});
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) override {
    check({output, input});
    const auto target = as_bytes(output), source = as_bytes(input);
    const auto to_splits = splits_in_bytes(output, output_splits), from_splits = splits_in_bytes(input, input_splits);
    return add(OpType::ALLTOALL_BASE, {output, input}, {output}, options.asyncOp, {[=, gloo = gloo_] {
                 auto to = target, from = source;
                 auto to_counts = to_splits, from_counts = from_splits;  // gloo takes them
                 return gloo->alltoall_base(to, from, to_counts, from_counts, options);
               }});
  }
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions& options) override {
    const auto targets = as_bytes_of_all(outputs), sources = as_bytes_of_all(inputs);
    std::vector<int64_t> to_splits, from_splits;
    for (const auto& target : targets) to_splits.push_back(target.numel());
    for (const auto& source : sources) from_splits.push_back(source.numel());
    auto buffer = std::make_shared<at::Tensor>();
    auto used = outputs;
    used.insert(used.end(), inputs.begin(), inputs.end());
    return add(OpType::ALLTOALL, used, outputs, options.asyncOp,
               {[=, gloo = gloo_] {
                  auto from = at::cat(sources);
                  *buffer = at::cat(targets);
                  auto to_counts = to_splits, from_counts = from_splits;
                  return gloo->alltoall_base(*buffer, from, to_counts, from_counts, options);
                },
                [=] {
                  const auto parts = buffer->split_with_sizes(to_splits);
                  for (size_t rank = 0; rank < targets.size(); ++rank) targets[rank].copy_(parts[rank]);
                }});
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int target, int tag) override {
    const auto bytes = as_bytes(check(tensors));
    return add(OpType::SEND, tensors, tensors, true, {[=, gloo = gloo_] {
                 Tensors buffers{bytes};
                 return gloo->send(buffers, target, tag);
               }},
               target);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int source, int tag) override {
    const auto bytes = as_bytes(check(tensors));
    return add(OpType::RECV, tensors, tensors, true, {[=, gloo = gloo_] {
                 Tensors buffers{bytes};
                 return gloo->recv(buffers, source, tag);
               }},
               source);
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    auto of_gloo = options;
    of_gloo.device = std::nullopt;
    of_gloo.device_ids.clear();
    auto device = c10::Device(kFake, current_device());
    if (!options.device_ids.empty()) {
      device = c10::Device(kFake, static_cast<c10::DeviceIndex>(options.device_ids[0]));
    } else if (bound_device_id_) {
      device = *bound_device_id_;
    }
    Job job{[=, gloo = gloo_] { return gloo->barrier(of_gloo); }};
    return queue(OpType::BARRIER, device, kCollectives, options.asyncOp, {std::move(job)}, {}, {});
  }

 private:
  static constexpr int kCollectives = -1;

  // Collectives have one stream, and transfers one for each peer. What is in one runs in the order of the calls.
  struct Channel {
    std::map<c10::DeviceIndex, std::shared_ptr<Queue>> queues;
    Mark last;
  };

  struct Coalesced {
    std::optional<c10::Device> device;
    int channel = kCollectives;
    bool is_async = false;
    std::vector<Job> jobs;
    Tensors tensors, results;
  };

  const at::Tensor& check(const Tensors& tensors) const {
    TORCH_CHECK(!tensors.empty(), "Tensor list mustn't be empty");
    for (const auto& tensor : tensors) {
      TORCH_CHECK(is_fake(tensor) && tensor.layout() == at::kStrided,
                  "Tensors must be on the fake device and dense, and one is on ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      TORCH_CHECK(tensor.device() == tensors[0].device(), "Tensors must be on the same device");
    }
    return tensors[0];
  }
  Tensors as_bytes_of_all(const Tensors& tensors) const {
    check(tensors);
    Tensors bytes;
    for (const auto& tensor : tensors) bytes.push_back(as_bytes(tensor));
    return bytes;
  }
  static std::vector<int64_t> splits_in_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    const auto rows = tensor.dim() ? tensor.size(0) : 1;
    const auto row_bytes = rows ? static_cast<int64_t>(tensor.nbytes()) / rows : 0;
    std::vector<int64_t> bytes;
    for (const auto split : splits) bytes.push_back(split * row_bytes);
    return bytes;
  }

  static c10::intrusive_ptr<c10d::Work> begin_allreduce(const c10::intrusive_ptr<c10d::Backend>& gloo,
                                                        const at::Tensor& source, Reduction& reduction,
                                                        at::Tensor& buffer, Timeout timeout) {
    buffer = reduction.prepare(source);
    Tensors buffers{buffer};
    c10d::AllreduceOptions options;
    options.reduceOp = reduction.gloo_op();
    options.timeout = timeout;
    return gloo->allreduce(buffers, options);
  }
  Job reduce_on_all(const at::Tensor& source, const c10d::ReduceOp& op, Timeout timeout,
                    std::function<void(const Reduction&, const at::Tensor&)> store) {
    auto reduction = std::make_shared<Reduction>(op, getSize());
    auto buffer = std::make_shared<at::Tensor>();
    return {[=, gloo = gloo_] { return begin_allreduce(gloo, source, *reduction, *buffer, timeout); },
            [=] { store(*reduction, *buffer); }};
  }

  c10::intrusive_ptr<c10d::Work> together(bool is_async, size_t count, const std::function<void(size_t)>& add_one) {
    const bool is_outermost = !coalesced_;
    if (is_outermost) startCoalescing();
    coalesced_->is_async = is_async;
    for (size_t index = 0; index < count; ++index) add_one(index);
    return is_outermost ? endCoalescing() : nullptr;
  }

  c10::intrusive_ptr<c10d::Work> add(OpType type, const Tensors& tensors, const Tensors& results, bool is_async,
                                     Job job, int channel = kCollectives) {
    const auto device = tensors[0].device();
    if (!coalesced_) return queue(type, device, channel, is_async, {std::move(job)}, tensors, results);
    auto& all = *coalesced_;
    all.device = device;
    all.channel = channel;
    all.is_async |= is_async;
    all.jobs.push_back(std::move(job));
    all.tensors.insert(all.tensors.end(), tensors.begin(), tensors.end());
    all.results.insert(all.results.end(), results.begin(), results.end());
    return nullptr;
  }

  c10::intrusive_ptr<c10d::Work> queue(OpType type, c10::Device device, int channel_key, bool is_async,
                                       std::vector<Job> jobs, const Tensors& tensors, const Tensors& results) {
    TORCH_CHECK_WITH(DistBackendError, !*is_aborted_, "this process group was aborted");
    counters().collectives += static_cast<int64_t>(jobs.size());
    ++sequence_;
    auto& channel = channels_[channel_key];
    auto current = current_queue(device.index());
    auto stream = current;  // where what is synchronous runs, as NCCL's does
    if (is_async) {
      auto& own = channel.queues[device.index()];
      if (!own) own = make_queue(device.index());
      stream = own;
      stream->push_wait(current->mark());
    }
    stream->push_wait(channel.last);
    auto outcome = std::make_shared<Outcome>();
    if (is_async) outcome->retained = tensors;
    stream->push([jobs = std::move(jobs), outcome, is_aborted = is_aborted_, name = c10d::opTypeToString(type)] {
      try {
        TORCH_CHECK(!*is_aborted, "the process group was aborted");
        std::vector<c10::intrusive_ptr<c10d::Work>> works;
        for (const auto& job : jobs) works.push_back(job.begin());
        for (const auto& work : works) work->wait();
        for (const auto& job : jobs) job.store();
      } catch (const std::exception& error) {
        const auto* known = dynamic_cast<const c10::Error*>(&error);
        outcome->set(std::make_exception_ptr(c10::DistBackendError(
            {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
            c10::str("fakeccl: ", name, " failed: ", known ? known->what_without_backtrace() : error.what()))));
      }
      outcome->release();
      if (const auto failure = outcome->get()) std::rethrow_exception(failure);
    });
    channel.last = stream->mark();
    return c10::make_intrusive<Work>(getRank(), type, device, channel.last, outcome, results);
  }

  void close_channels() {
    for (auto& [key, channel] : channels_)
      for (auto& [device, queue] : channel.queues)
        if (queue) close_queue(queue);
    channels_.clear();
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<std::atomic<bool>> is_aborted_;
  std::map<int, Channel> channels_;
  std::optional<Coalesced> coalesced_;
  uint64_t sequence_ = 0;
};

}  // namespace

void add_process_group(pybind11::module_& module) {
  module.def("make_process_group",
             [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
                Timeout timeout) -> c10::intrusive_ptr<c10d::Backend> {
               return c10::make_intrusive<Group>(std::move(gloo), rank, size, timeout);
             });
}

}  // namespace fake_device

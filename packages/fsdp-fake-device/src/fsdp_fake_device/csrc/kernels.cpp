// Kernels: each operator's own kernel for the CPU, queued on the current stream.
//
// What an operator returns is made at once, with the shapes that its kernel for meta tensors says. What it computes is
// queued. An operator that has none, or whose shapes depend on values, waits for its stream and runs in the caller.
#include "counters.h"
#include "random_numbers.h"
#include "tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <set>

namespace fake_device {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

// Each tensor of a value, also those in lists, replaced.
IValue map_tensors(const IValue& value, const TensorMap& map) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorList().vec())
      mapped.push_back(tensor.defined() ? map(tensor) : tensor);
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      mapped.push_back(tensor && tensor->defined() ? std::optional(map(*tensor)) : tensor);
    return mapped;
  }
  return value;
}

std::vector<at::Tensor> as_vector(const IValue& value) {
  return value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector();
}

// For `out=`, where kernels may resize what they are given.
TensorMap as_empty(c10::DeviceType device) {
  return [device](const at::Tensor& tensor) {
    return at::empty({0}, at::TensorOptions(device).dtype(tensor.scalar_type()));
  };
}

void visit_tensors(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!is_fake(tensor) && !tensor.dim()) return tensor;  // a number
  auto meta =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
  if (tensor.is_conj()) meta = meta.conj();
  if (tensor.is_neg()) meta = meta._neg_view();
  return meta;
}

// What a schema says of a call.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema = op.schema();
  Stack arguments;
  c10::Device device{kFake, -1};
  std::optional<size_t> generator;  // the argument

  Call(const c10::OperatorHandle& op, Stack& stack) : op(op) {
    const auto count = schema.arguments().size();
    arguments.assign(stack.end() - count, stack.end());
    stack.erase(stack.end() - count, stack.end());
    find_device();
    for (size_t index = 0; index < count; ++index) {
      const auto type = schema.arguments()[index].type();
      const auto* optional = type->castRaw<c10::OptionalType>();
      if ((optional ? optional->getElementType() : type)->kind() == c10::TypeKind::GeneratorType) generator = index;
    }
  }

  std::string name() const {
    return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  }

  bool has_tag(at::Tag tag) const {
    const auto tags = op.getTags();
    return std::find(tags.begin(), tags.end(), tag) != tags.end();
  }

  bool is_out(size_t argument) const { return schema.arguments()[argument].is_out(); }

  // The argument that a result is, if it is one: `add_` returns its first.
  std::optional<size_t> argument_of_result(size_t result) const {
    const auto* alias = schema.returns()[result].alias_info();
    if (!alias) return std::nullopt;
    TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), "the fake device has no kernel for the view ", name());
    for (size_t index = 0; index < arguments.size(); ++index) {
      const auto* other = schema.arguments()[index].alias_info();
      if (other && other->beforeSets() == alias->beforeSets()) return index;
    }
    TORCH_INTERNAL_ASSERT(false, name(), " returns what it was not given");
  }

  bool returns_tensors_alone() const {
    for (const auto& result : schema.returns()) {
      const auto kind = result.type()->kind();
      const bool is_list =
          kind == c10::TypeKind::ListType &&
          result.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
      if (kind != c10::TypeKind::TensorType && !is_list) return false;
    }
    return true;
  }

 private:
  void find_device() {
    std::optional<c10::Device> asked;
    std::vector<at::Tensor> of_cpu;
    for (size_t index = 0; index < arguments.size(); ++index) {
      if (arguments[index].isDevice()) asked = arguments[index].toDevice();
      const bool is_index =
          schema.arguments()[index].name() == "indices";  // which CUDA's kernels take from the CPU too
      visit_tensors(arguments[index], [&](const at::Tensor& tensor) {
        if (!is_fake(tensor)) {
          if (tensor.dim() && !is_index) of_cpu.push_back(tensor);
          return;
        }
        check_same_device(tensor);
        device = tensor.device();
      });
    }
    for (const auto& tensor : of_cpu) check_same_device(tensor);
    if (!device.has_index()) device = asked && asked->has_index() ? *asked : c10::Device(kFake, current_device());
  }

  void check_same_device(const at::Tensor& tensor) const {
    TORCH_CHECK(!device.has_index() || tensor.device() == device,
                "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
                tensor.device(), "! (in ", name(), ")");
  }
};

// ---------------------------------------------------------------- shapes

// The kernels for meta tensors speak of other devices than the CPU, whose norms give statistics in the dtype of their
// parameters; and give gradients that nobody asked for.
void correct_meta_results(const Call& call, std::vector<IValue>& results) {
  static const std::set<std::string> with_statistics{"aten::native_layer_norm",       "aten::native_group_norm",
                                                     "aten::native_batch_norm",       "aten::_native_batch_norm_legit",
                                                     "aten::_batch_norm_with_update", "aten::_fused_rms_norm"};
  for (size_t index = 0; index < call.arguments.size(); ++index) {
    if (call.schema.arguments()[index].name() != "output_mask") continue;
    const auto is_wanted = call.arguments[index].toBoolList();
    for (size_t number = 0; number < std::min(results.size(), is_wanted.size()); ++number)
      if (!is_wanted[number] && results[number].isTensor()) results[number] = at::Tensor();
  }
  if (call.schema.name() == "aten::mse_loss_backward")  // a gradient without dimensions decides no dtype
    results[0] = results[0].toTensor().to(call.arguments[1].toTensor().scalar_type());
  if (!with_statistics.count(call.schema.name())) return;
  const auto& input = call.arguments[0].toTensor();
  auto dtype = input.scalar_type();
  for (const auto& argument : call.arguments)
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().scalar_type() == at::kFloat)
      dtype = at::kFloat;
  for (size_t index = 1; index < results.size(); ++index)
    if (results[index].isTensor() && results[index].toTensor().defined())
      results[index] = results[index].toTensor().to(dtype);
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  // These give results of the sizes of CUDA's kernels.
  static const std::set<std::string> of_other_sizes{"aten::_embedding_bag", "aten::_embedding_bag_forward_only"};
  if (of_other_sizes.count(op.schema().name())) return false;
  for (auto key :
       {c10::DispatchKey::Meta, c10::DispatchKey::CompositeExplicitAutograd,
        c10::DispatchKey::CompositeExplicitAutogradNonFunctional, c10::DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

bool has_masks(const Call& call) {  // x[mask]
  bool found = false;
  for (const auto& argument : call.arguments)
    if (argument.isOptionalTensorList())
      visit_tensors(argument, [&](const at::Tensor& tensor) {
        found |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      });
  return found;
}

bool depends_on_values(const Call& call) {
  if (call.schema.name() == "aten::index") return false;  // torch has counted its masks before, and made its result
  return call.has_tag(at::Tag::data_dependent_output) || call.has_tag(at::Tag::dynamic_output_shape) || has_masks(call);
}

// The results on meta tensors; none where only a run can say. Resizes what `out=` names.
std::optional<std::vector<IValue>> infer_results(const Call& call) {
  if (!call.returns_tensors_alone() || depends_on_values(call)) return std::nullopt;
  if (!has_meta_kernel(call.op)) {
    // In place nothing is made.
    for (size_t index = 0; index < call.schema.returns().size(); ++index)
      if (!call.argument_of_result(index)) return std::nullopt;
    for (size_t index = 0; index < call.arguments.size(); ++index)
      if (call.is_out(index)) return std::nullopt;
    return std::vector<IValue>(call.schema.returns().size());
  }
  if (call.schema.name() == "aten::index" && has_masks(call)) return std::vector<IValue>(1);
  Stack stack;
  for (size_t index = 0; index < call.arguments.size(); ++index) {
    if (index == call.generator) {
      stack.emplace_back();
    } else if (call.arguments[index].isDevice()) {
      stack.emplace_back(c10::Device(at::kMeta));
    } else {
      stack.push_back(map_tensors(call.arguments[index], call.is_out(index) ? as_empty(at::kMeta) : as_meta));
    }
  }
  const Stack metas = stack;
  try {
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;  // if the call is wrong, the CPU says why
  }
  for (size_t index = 0; index < call.arguments.size(); ++index) {
    if (!call.is_out(index)) continue;
    const auto outs = as_vector(call.arguments[index]), inferred = as_vector(metas[index]);
    for (size_t number = 0; number < outs.size(); ++number)
      if (at::native::resize_output(outs[number], inferred[number].sizes()))
        outs[number].as_strided_(inferred[number].sizes(), inferred[number].strides());
  }
  std::vector<IValue> results(stack.begin(), stack.end());
  correct_meta_results(call, results);
  return results;
}

// ---------------------------------------------------------------- runs

// The arguments as the kernel of the CPU takes them. A number that is a tensor of the CPU is read now.
Stack as_cpu_arguments(const Call& call) {
  Stack stack;
  for (size_t index = 0; index < call.arguments.size(); ++index) {
    const auto& argument = call.arguments[index];
    if (argument.isDevice()) {
      stack.emplace_back(c10::Device(at::kCPU));
    } else if (call.is_out(index)) {
      stack.push_back(map_tensors(argument, as_empty(at::kCPU)));
    } else {
      stack.push_back(map_tensors(argument, [](const at::Tensor& tensor) {
        if (is_fake(tensor)) return as_cpu(tensor);
        auto copy = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }));
    }
  }
  return stack;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void store_result(const at::Tensor& computed, const at::Tensor& target) {
  const bool is_as_promised =
      computed.defined() && computed.sizes() == target.sizes() && computed.scalar_type() == target.scalar_type();
  TORCH_CHECK(is_as_promised, "its kernel for meta tensors promised ", target.scalar_type(), target.sizes(),
              ", and its kernel for the CPU gave ",
              computed.defined() ? c10::str(computed.scalar_type(), computed.sizes()) : std::string("nothing"),
              ". This is a fault of the fake device: please report it");
  target.copy_(computed);
}

void store_results(const IValue& computed, const IValue& targets) {
  if (targets.isTensor()) {
    if (targets.toTensor().defined()) store_result(computed.toTensor(), targets.toTensor());
  } else if (targets.isTensorList()) {
    const auto from = computed.toTensorVector(), to = targets.toTensorVector();
    for (size_t index = 0; index < to.size(); ++index) store_result(from.at(index), to[index]);
  }
}

void queue_kernel(const Call& call, const std::vector<IValue>& metas, Stack& results) {
  auto arguments = as_cpu_arguments(call);
  if (call.generator) {
    const auto& chosen = call.arguments[*call.generator];
    const auto seed = draw_seed(chosen.isNone() ? default_generator(call.device.index()) : chosen.toGenerator());
    arguments[*call.generator] = make_cpu_generator(seed);
  }
  std::vector<IValue> targets;  // on the CPU; none where a result is an argument that is changed in place
  for (size_t index = 0; index < call.schema.returns().size(); ++index) {
    if (const auto argument = call.argument_of_result(index)) {
      results.push_back(call.arguments[*argument]);
      targets.push_back(call.is_out(*argument) ? map_tensors(results.back(), as_cpu) : IValue());
      continue;
    }
    results.push_back(map_tensors(metas[index], [&](const at::Tensor& meta) {
      return make_tensor(meta.sizes(), meta.strides(), meta.scalar_type(), call.device);
    }));
    targets.push_back(map_tensors(results.back(), as_cpu));
  }
  Stack outs;  // of an operator that returns nothing, such as _foreach_add.List_out
  std::vector<size_t> out_arguments;
  for (size_t index = 0; index < call.arguments.size() && targets.empty(); ++index) {
    if (!call.is_out(index)) continue;
    out_arguments.push_back(index);
    outs.push_back(map_tensors(call.arguments[index], as_cpu));
  }
  launch(call.name(), call.device.index(),
         [op = call.op, arguments = std::move(arguments), targets = std::move(targets), outs = std::move(outs),
          out_arguments = std::move(out_arguments)] {
           auto stack = arguments;
           run_on_cpu(op, stack);
           for (size_t index = 0; index < targets.size(); ++index) {
             // What only a backward pass of a GPU would read: the CPU's kernels give nothing.
             const bool is_left_out = index > 0 && stack[index].isTensor() && stack[index].toTensor().defined() &&
                                      !stack[index].toTensor().numel();
             if (!is_left_out) store_results(stack[index], targets[index]);
           }
           for (size_t index = 0; index < outs.size(); ++index)
             store_results(arguments[out_arguments[index]], outs[index]);
         });
}

// Numbers that a kernel draws from the CPU's default generator, since it takes no other.
class SeededCPU {
 public:
  explicit SeededCPU(uint64_t seed) : lock_(cpu_.mutex()) {
    state_ = cpu_.unsafeGetGeneratorImpl()->get_state();
    cpu_.set_current_seed(seed);
    lock_.unlock();
  }
  ~SeededCPU() {
    lock_.lock();
    cpu_.unsafeGetGeneratorImpl()->set_state(*state_);
  }

 private:
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  std::unique_lock<std::mutex> lock_;
  c10::intrusive_ptr<c10::TensorImpl> state_;
};

void run_inline(const Call& call, Stack& results) {
  auto queue = current_queue(call.device.index());
  const bool would_wait_on_any_device = !call.returns_tensors_alone() || depends_on_values(call);
  if (would_wait_on_any_device) {
    synchronize(queue, call.name());
  } else {
    counters().add_inline(call.name());
    queue->wait_on_host(queue->mark().position);
    raise_failure(call.device.index());
  }
  auto stack = as_cpu_arguments(call);
  std::optional<SeededCPU> seeded;
  if (call.generator) {
    const auto& chosen = call.arguments[*call.generator];
    stack[*call.generator] =
        make_cpu_generator(draw_seed(chosen.isNone() ? default_generator(call.device.index()) : chosen.toGenerator()));
  } else if (call.has_tag(at::Tag::nondeterministic_seeded)) {
    seeded.emplace(draw_seed(default_generator(call.device.index())));
  }
  ++counters().kernels;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    run_on_cpu(call.op, stack);
  }
  for (size_t index = 0; index < call.schema.returns().size(); ++index) {
    const auto argument = call.argument_of_result(index);
    if (argument && call.is_out(*argument)) {
      const auto outs = as_vector(call.arguments[*argument]), computed = as_vector(stack[index]);
      for (size_t number = 0; number < outs.size(); ++number) {
        at::native::resize_output(outs[number], computed[number].sizes());
        outs[number].copy_(computed[number], /*non_blocking=*/true);
      }
    }
    results.push_back(argument ? call.arguments[*argument] : map_tensors(stack[index], [&](const at::Tensor& tensor) {
      return to_device(tensor, call.device);
    }));
  }
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const Call call(op, *stack);
  c10::DeviceGuard guard(call.device);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool draws_from_default = !call.generator && call.has_tag(at::Tag::nondeterministic_seeded);
  std::optional<std::vector<IValue>> metas;
  if (!draws_from_default) metas = infer_results(call);
  if (metas) {
    queue_kernel(call, *metas, *stack);
  } else {
    run_inline(call, *stack);
  }
}

// ---------------------------------------------------------------- operators that are not as others

// Devices that torch does not know are to override these two; their schemas are those of the others.
void run_convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run(op, stack);
}
void run_convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // The one has bias_sizes, which the other does not.
  auto mask = stack->back();
  stack->pop_back();
  const auto count = stack->size();
  const auto& weight = (*stack)[count - 7].toTensor();
  const bool is_transposed = (*stack)[count - 3].toBool();
  const auto groups = (*stack)[count - 1].toInt();
  const auto channels = is_transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->begin() + static_cast<int64_t>(count) - 6, IValue(std::vector<int64_t>{channels}));
  stack->push_back(std::move(mask));
  run(op, stack);
}

// On the CPU it draws from the default generator. Here the mask is drawn from this device's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (p == 0 || !train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {input.mul(mask).mul_(scale), mask};
}

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_convolution>());
  library.impl("convolution_backward_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&run_convolution_backward>());
  library.impl("native_dropout", &native_dropout);
  // Of these torch has compositions for devices without kernels. The CPU's kernels round otherwise.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run>());
  library.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace
}  // namespace fake_device

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake_device::choose_attention)
}

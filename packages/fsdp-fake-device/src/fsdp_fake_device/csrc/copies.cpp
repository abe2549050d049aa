// Copies between devices and the host, which wait or not as CUDA's do.
#include "counters.h"
#include "memory.h"
#include "tensors.h"

#include <torch/library.h>

namespace fake_device {
namespace {

// One block of bytes to one block of bytes: what a device copies from or to the host without a temporary.
bool is_plain(const at::Tensor& source, const at::Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.sizes() == target.sizes() &&
         source.strides() == target.strides() && source.is_non_overlapping_and_dense() &&
         source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg();
}

void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  counters().add_copy("device to device", source.nbytes());
  const auto from = source.device().index(), to = target.device().index();
  auto source_queue = current_queue(from), target_queue = current_queue(to);
  source_queue->push_wait(target_queue->mark());  // between devices, both streams take part
  launch("copy_", from, [source = as_cpu(source), target = as_cpu(target)] { target.copy_(source); });
  target_queue->push_wait(source_queue->mark());
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto device = target.device().index();
  auto queue = current_queue(device);
  const bool is_from_pinned = is_pinned(source.data_ptr()) && is_plain(source, target);
  counters().add_copy(is_from_pinned ? "pinned host to device" : "host to device", target.nbytes());
  if (!non_blocking) {
    launch("copy_", device, [source, target = as_cpu(target)] { target.copy_(source); });
    synchronize(queue, "copy to the device");
  } else if (is_from_pinned) {
    // The bytes are read when the copy runs. As on a GPU, the memory is not used for another tensor before.
    const auto bytes = at::from_blob(source.data_ptr(), source.sizes(), source.strides(), source.options());
    launch("copy_", device, [bytes, target = as_cpu(target)] { target.copy_(bytes); });
    record_pinned_use(source, queue);
  } else {
    // Pageable memory is read into a staging buffer before the call returns.
    launch("copy_", device, [staged = source.clone(), target = as_cpu(target)] { target.copy_(staged); });
  }
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto device = source.device().index();
  auto queue = current_queue(device);
  const bool is_to_pinned = is_pinned(target.data_ptr()) && is_plain(source, target);
  counters().add_copy(is_to_pinned ? "device to pinned host" : "device to host", target.nbytes());
  if (non_blocking && is_to_pinned) {
    const auto bytes = at::from_blob(target.data_ptr(), target.sizes(), target.strides(), target.options());
    launch("copy_", device, [bytes, source = as_cpu(source)] { bytes.copy_(source); });
    record_pinned_use(target, queue);
  } else {
    launch("copy_", device, [target, source = as_cpu(source)] { target.copy_(source); });
    synchronize(queue, non_blocking ? "copy to pageable memory" : "copy to the host");
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  const auto source = self.sizes() == dst.sizes() ? self : self.expand_as(dst);
  if (is_fake(self) && is_fake(dst)) {
    copy_on_device(source, dst);
  } else if (is_fake(dst)) {
    TORCH_CHECK(self.is_cpu(), "no copy from ", self.device(), " to ", dst.device(), ": go by way of the CPU");
    copy_to_device(source, dst, non_blocking);
  } else {
    TORCH_CHECK(dst.is_cpu(), "no copy from ", self.device(), " to ", dst.device(), ": go by way of the CPU");
    copy_to_host(source, dst, non_blocking);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize(current_queue(self.device().index()), "item");
  return at::_local_scalar_dense(as_cpu(self));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
}

// Otherwise torch resolves conjugate and negative views by a copy, which comes here again, without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace fake_device

// What makes tensors and views of them. None of it runs a kernel, but where bytes are copied.
#include "tensors.h"

#include "counters.h"
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <cstring>

namespace fake_device {

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!is_fake(tensor)) return tensor;
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided,
                              "the fake device has strided tensors alone, and this one is ", tensor.layout());
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                             at::TensorOptions(at::kCPU).dtype(tensor.scalar_type()));
  if (tensor.is_conj()) alias = alias.conj();
  if (tensor.is_neg()) alias = alias._neg_view();
  return alias;
}

at::Tensor make_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor to_device(const at::Tensor& cpu, c10::Device device) {
  const auto contiguous = c10::contiguous_strides(cpu.sizes());
  const auto strides = cpu.is_non_overlapping_and_dense() ? cpu.strides() : at::IntArrayRef(contiguous);
  auto tensor = make_tensor(cpu.sizes(), strides, cpu.scalar_type(), device);
  current_queue(device.index())->push([cpu, target = as_cpu(tensor)] { target.copy_(cpu); });
  return tensor;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto data = device_memory().allocate(bytes);
  if (const auto both = std::min(bytes, storage.nbytes()))
    launch("resize_", storage.device().index(),
           [target = data.get(), source = storage.data(), both] { std::memcpy(target, source, both); });
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

namespace {

c10::Device complete(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kFake, current_device());
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(complete(device));
  return at::detail::empty_generic(sizes, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return make_tensor(sizes, strides, c10::dtype_or_default(dtype), complete(device));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef symbolic_sizes,
                          std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic_sizes);
  if (tensor->sizes() != sizes) tensor->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) tensor->empty_tensor_restride(*format);
  const auto bytes = at::detail::computeStorageNbytes(tensor->sizes(), tensor->strides(), tensor->itemsize(),
                                                      tensor->storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef symbolic_sizes,
                        c10::SymIntArrayRef symbolic_strides) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic_sizes);
  auto strides = C10_AS_INTARRAYREF_SLOW(symbolic_strides).vec();
  if (strides.size() != sizes.size()) {
    const auto contiguous = c10::contiguous_strides(sizes);
    strides.assign(contiguous.begin(), contiguous.end());
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const c10::SymInt elements(static_cast<int64_t>(source.nbytes() / self.itemsize())), step(1);
  return set_storage(self, std::move(source), 0, {&elements, 1}, {&step, 1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}
at::Tensor& set_empty(at::Tensor& self) {
  const auto nothing = empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_tensor(self, nothing);
}

// A fallback would compare copies of the two.
bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

void record_stream(at::Tensor& self, at::Stream stream) { record_use(self.storage().data_ptr(), stream); }

// Whether `tensor.data = other` may turn a tensor of another device into one of this.
bool may_become(const at::Tensor&, const at::Tensor& other) { return other.layout() == at::kStrided; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("record_stream", &record_stream);
  library.impl("is_set_to", &is_set_to);
  library.impl("_has_compatible_shallow_copy_type", &may_become);
}

}  // namespace
}  // namespace fake_device

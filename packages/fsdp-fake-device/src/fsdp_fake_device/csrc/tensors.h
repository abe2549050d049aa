// Tensors of the device, and the same memory as tensors of the CPU, which kernels run on.
#pragma once

#include "streams.h"

namespace fake_device {

inline bool is_fake(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kFake; }

// The same memory. It does not keep it: as on a GPU, a kernel does not own what it reads.
at::Tensor as_cpu(const at::Tensor& tensor);
at::Tensor make_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, c10::Device device);
// Queues a copy of a tensor of the CPU, which is kept until it has been copied.
at::Tensor to_device(const at::Tensor& cpu, c10::Device device);
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace fake_device

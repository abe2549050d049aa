// Generators of random numbers, one per device.
#pragma once

#include "streams.h"

#include <ATen/core/Generator.h>

namespace fake_device {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator make_generator(c10::DeviceIndex device);

// A seed for the numbers that one kernel draws. The generator's offset goes on.
uint64_t draw_seed(const at::Generator& generator);
// A generator of the CPU, to draw them.
at::Generator make_cpu_generator(uint64_t seed);

}  // namespace fake_device

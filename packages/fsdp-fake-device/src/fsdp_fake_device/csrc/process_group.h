// The process group of the device.
#pragma once

#include <pybind11/pybind11.h>

namespace fake_device {

void add_process_group(pybind11::module_& module);

}  // namespace fake_device

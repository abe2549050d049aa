"""The compiled part, loaded once."""

from typing import Any

from fsdp_fake_device.build import load_extension

#: The module that ``csrc/module.cpp`` defines.
extension: Any = load_extension()

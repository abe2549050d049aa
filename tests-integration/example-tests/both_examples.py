"""The two example backends' strategies, of which these tests show what each package promises beside the contract."""

from __future__ import annotations

import pytest

#: The module of each strategy's package that Trainer and Fabric load.
PACKAGES = {"zero1": "fsdp_example", "zero2": "fsdp_zero2"}

of_both = pytest.mark.parametrize("strategy", PACKAGES)

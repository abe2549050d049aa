"""Losses and weights equal those of one unsharded process."""

from fsdp_core.testing.suite.numbers import NumbersSuite


class TestNumbers(NumbersSuite):
    strategy = "fsdp_native"

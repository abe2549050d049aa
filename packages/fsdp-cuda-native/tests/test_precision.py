"""Precision strings as dtypes of shards, computation and reduction."""

from fsdp_core.testing.suite.precision import PrecisionSuite


class TestPrecision(PrecisionSuite):
    strategy = "fsdp_native"

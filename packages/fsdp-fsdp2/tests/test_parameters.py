"""Parameters and state that libraries stumble on."""

from fsdp_core.testing.suite.parameters import ParametersSuite


class TestParameters(ParametersSuite):
    strategy = "fsdp2"

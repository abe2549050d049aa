"""What users' loops do besides a forward pass, a backward pass and a step."""

from fsdp_core.testing.suite.exceptions import ExceptionsSuite
from fsdp_core.testing.suite.loops import LoopsSuite


class TestLoops(LoopsSuite):
    strategy = "fsdp_native"


class TestExceptions(ExceptionsSuite):
    strategy = "fsdp_native"

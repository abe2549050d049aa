"""Every way to start a script."""

from fsdp_core.testing.suite.launching import LaunchingSuite


class TestLaunching(LaunchingSuite):
    strategy = "fsdp_native"

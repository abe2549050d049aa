"""What fails with Lightning's own sharded strategies, and works here."""

from fsdp_core.testing.suite.broken_elsewhere import BrokenElsewhereSuite


class TestBrokenElsewhere(BrokenElsewhereSuite):
    strategy = "fsdp_native"

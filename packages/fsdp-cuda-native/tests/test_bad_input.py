"""Bad input: each case raises before anything is trained, and says what to type next."""

from fsdp_core.testing.suite.bad_modules import BadModulesSuite
from fsdp_core.testing.suite.bad_options import BadOptionsSuite


class TestBadOptions(BadOptionsSuite):
    strategy = "fsdp_native"


class TestBadModules(BadModulesSuite):
    strategy = "fsdp_native"

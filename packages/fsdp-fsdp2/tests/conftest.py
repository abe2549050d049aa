"""Every backend's tests run the suite of fsdp_core.testing."""

pytest_plugins = ["fsdp_core.testing.pytest_plugin"]

"""The tests that every sharded strategy passes, by subject. A backend's package inherits them.

Example:
    .. code-block:: python

        # conftest.py
        pytest_plugins = ["fsdp_core.testing.pytest_plugin"]

        # test_numbers.py
        from fsdp_core.testing.suite.numbers import NumbersSuite


        class TestNumbers(NumbersSuite):
            strategy = "theirs"

Needs ``pip install "fsdp-core[testing]"``, torch and Lightning. Each test runs real ranks, on the CPU.
"""

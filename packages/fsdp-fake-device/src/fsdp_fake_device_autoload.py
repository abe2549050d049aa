"""What ``import torch`` calls by the entry point ``torch.backends``: it loads the device where it is asked for."""

import os


def load() -> None:
    """Import the device if the environment variable FSDP_FAKE_DEVICES names how many there are to be."""
    if os.environ.get("FSDP_FAKE_DEVICES", "0") != "0":
        import fsdp_fake_device  # noqa: F401

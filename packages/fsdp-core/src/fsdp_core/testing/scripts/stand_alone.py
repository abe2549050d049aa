"""Imports the stand-alone packages, whose classes are others than those of the package ``lightning``.

Takes a strategy's name.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def refusal(front_end: Callable[..., Any], strategy: str) -> str:
    """What a front end says of a name."""
    try:
        front_end(strategy=strategy, accelerator="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    front_ends = [import_module("pytorch_lightning").Trainer, import_module("lightning_fabric").Fabric]
    print(json.dumps({"told": [refusal(one, sys.argv[1]) for one in front_ends]}))

"""Where torch loads no entry points, an import enters the names; here after Lightning's. Takes a strategy's name."""

import sys
from collections.abc import Callable
from typing import Any

import lightning as L
from train import main, say  # type: ignore[import-not-found]  # beside it


def refusal(front_end: Callable[..., Any], strategy: str) -> str:
    """What a front end says of a name."""
    try:
        front_end(strategy=strategy, accelerator="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    say(before=[refusal(L.Trainer, sys.argv[1]), refusal(L.Fabric, sys.argv[1])])
    import fsdp_core.lightning  # noqa: F401

    main(["trainer", "fabric", "--devices=1", f"--strategy={sys.argv[1]}"])

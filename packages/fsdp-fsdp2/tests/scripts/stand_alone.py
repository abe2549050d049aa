"""Imports the stand-alone packages, whose classes are others than those of the package ``lightning``."""

import json

import lightning_fabric
import pytorch_lightning


def refusal(call) -> str:
    try:
        call(strategy="fsdp2", accelerator="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    print(json.dumps({"told": [refusal(pytorch_lightning.Trainer), refusal(lightning_fabric.Fabric)]}))

"""Where torch loads no entry points, an import enters the names; here after Lightning's."""

import lightning as L
import train


def refusal(call) -> str:
    try:
        call(strategy="fsdp2", accelerator="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    train.say(before=[refusal(L.Trainer), refusal(L.Fabric)])
    import fsdp_core.lightning  # noqa: F401

    train.main(["trainer", "fabric", "--devices=1"])

"""Where torch loads no entry points, the names are entered by an import; before or after Lightning's makes no matter."""

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
    import fsdp_core.lightning

    train.main(["trainer", "fabric", "--devices=1"])

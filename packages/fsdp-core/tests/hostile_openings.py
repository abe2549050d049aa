"""Classes that say what was run, and a script that puts their names into folders and lets Lightning open these."""

from __future__ import annotations

import json
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp_core.errors import CheckpointError

CLI = "lightning.pytorch.cli.instantiate_module"
RAN: list[str] = []


def run(kind: Any = None, text: Any = "it ran") -> Any:
    """What a hostile folder wants to be called."""
    RAN.append(str(text))
    return kind() if isinstance(kind, type) else kind


def not_imported(place: Path) -> Path:
    """Write a module that says so when it is imported; gives its folder."""
    folder = place / "modules"
    folder.mkdir()
    (folder / "hostile_not_imported.py").write_text("from hostile_openings import *\nrun(0, 'imported')\n")
    return folder


class Harm:
    """Does it when it is made."""

    def __init__(self, text: str = "it ran") -> None:
        run(0, text)


class HarmfulPart(nn.Module):
    """The same, of a type that parameters have."""

    def __init__(self, text: str = "it ran") -> None:
        super().__init__()
        run(0, text)


class Net(pl.LightningModule):
    """With parameters of the kinds that Lightning's command line fills by name."""

    def __init__(
        self,
        width: int = 3,
        part: nn.Module | None = None,
        call: Callable[..., Any] | None = None,
        anything: Any = None,
    ) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.__dict__.update(part=part, call=call, anything=anything)  # no part has weights in the checkpoint

    def validation_step(self, batch: Any) -> None:
        self.head(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(pl.LightningDataModule):
    """Made of a checkpoint, too."""

    def __init__(self, size: int = 1, anything: Any = None) -> None:
        super().__init__()
        self.size = size

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 3)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert isinstance(state_dict, dict)


HARM = ["hostile_openings.run", "hostile_openings.Harm", "hostile_openings.HarmfulPart", "hostile_not_imported.run",
        "posix.abort", "os.abort", CLI, "lightning.pytorch.cli.instantiate_class"]  # fmt: skip
KEYS = ["_instantiator", "_class_path", "class_path", "init_args", "dict_kwargs", "part", "call", "anything", "width",
        "text", "hparams_type", "best_model_path", "last_model_path", "size", "part.class_path"]  # fmt: skip
PLACES = ["hyper_parameters", "datamodule_hyper_parameters", "hparams", "module_arguments", "hparams_name",
          "hparams_type", "datamodule_hparams_name", "datamodule_hparams_type", "callbacks", "loops", "lr_schedulers",
          "Data", "pytorch-lightning_version", "hparams_name", "epoch", "anything", "state_dict"]  # fmt: skip


def anything(draw: random.Random, depth: int = 0) -> Any:
    """Plain data in JSON, of names, numbers and containers."""
    kind = draw.randrange(12 if depth < 4 else 5)

    def inner() -> Any:
        return anything(draw, depth + 1)

    def pairs() -> list[Any]:
        return [[draw.choice(KEYS), inner()] for _ in range(draw.randrange(4))]

    if kind < 3:
        return draw.choice(HARM)
    if kind == 3:
        spec = {"class_path": draw.choice(HARM)} | ({"init_args": {"text": "x"}} if draw.random() < 0.5 else {})
        return spec if draw.random() < 0.7 else json.dumps(spec)
    if kind < 5:
        return draw.choice([None, 3, "x", "width", "anything", "cpu", "1.0", "http://127.0.0.1:9/x", {"$path": HARM[0]},
                            {"$device": "meta"}, {"$dtype": "float32"}, json.dumps(dict(pairs() if depth < 4 else []))
                            ])  # fmt: skip
    if kind < 8:
        return dict(pairs())
    if kind == 8:
        return [inner() for _ in range(draw.randrange(3))]
    if kind == 9:
        return pairs()
    return {draw.choice(["$dict", "$ordered", "$namespace", "$counter"]): pairs()}


def hostile(draw: random.Random) -> dict[str, Any]:
    """What to write into what the Trainer saved; mostly such that Lightning comes as far as to make a module of it."""
    entries = {place: anything(draw) for place in draw.sample(PLACES, draw.randrange(1, 4))}
    if draw.random() < 0.7:
        made: dict[str, Any] = {"width": 3} if draw.random() < 0.9 else {}
        made |= {draw.choice(["part", "call", "anything"]): anything(draw) for _ in range(draw.randrange(3))}
        if draw.random() < 0.8:
            made["_instantiator"] = CLI if draw.random() < 0.7 else draw.choice(HARM)
        if draw.random() < 0.2:
            made["_class_path"] = draw.choice(["hostile_openings.Net", *HARM])
        entries[draw.choice(["hyper_parameters", "hyper_parameters", "hparams", "datamodule_hyper_parameters"])] = made
    return entries


def main(place: Path, count: int, seed: int) -> None:
    """Print what ran while ``count`` folders were opened in every way, and how that ended."""
    import hostile_openings as ours  # not __main__, whose names no folder can know
    from damaged_folders import reseal, save_small, state_file
    from fsdp_core.lightning.checkpoints.patched_io import install_opening

    install_opening(pl.strategies)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.path.insert(0, str(not_imported(place)))
    rest = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": pl.__version__, "callbacks": {}}
    folder = save_small(place / "a.ckpt", {"model": ours.Net().state_dict(), "trainer": rest})
    good = state_file(folder).read_text()
    sys.addaudithook(lambda event, arguments: _forbid(event, ours.RAN))
    reads: list[Callable[[], object]] = [
        lambda: ours.Net.load_from_checkpoint(folder),
        lambda: ours.Net.load_from_checkpoint(folder, width=4, strict=False),
        lambda: ours.Data.load_from_checkpoint(folder),
        lambda: trainer.validate(ours.Net(), datamodule=ours.Data(), ckpt_path=folder),
    ]
    options: Any = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    ended: Counter[str] = Counter()
    for number in range(count):
        content = json.loads(good)
        entries = hostile(random.Random(seed * 1_000_000 + number))
        content["trainer"].update(entries)
        state_file(folder).write_text(json.dumps(content))
        reseal(folder, state_file(folder))
        for read in reads:
            trainer = pl.Trainer(accelerator="cpu", enable_checkpointing=False, default_root_dir=place, **options)
            try:
                read()
                ended["read"] += 1
            except CheckpointError:
                ended["refused"] += 1
            except Exception as error:
                ended[type(error).__name__] += 1
            if ours.RAN:
                print(json.dumps({"ran": ours.RAN, "by": entries}))
                sys.exit(1)
    ran = list(ours.RAN)
    given = {"_instantiator": CLI, "anything": {"class_path": "hostile_openings.Harm"}}
    torch.save(
        {"state_dict": ours.Net().state_dict(), "pytorch-lightning_version": pl.__version__, "hyper_parameters": given},
        place / "file.ckpt",
    )
    ours.Net.load_from_checkpoint(place / "file.ckpt")
    print(json.dumps({"ran": ran, "control": ours.RAN, "ended": ended, "lightning": pl.__version__}))


def _forbid(event: str, ran: list[str]) -> None:
    if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "pickle.find_class"):
        ran.append(event)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)

"""Each row of docs/optimizers.md that names an optimizer of another package than torch: right, or refused."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core import full_state_dict
from fsdp_core.errors import CheckpointMismatchError, CheckpointValueError, OptimizerMismatchError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import loader, new_fabric, new_trainer, whole_batches

PAGE = (Path(__file__).parents[1] / "docs/optimizers.md").read_text(encoding="utf-8")
STEPS = 5

#: Muon orthogonalises in bf16, whose last bit is 2**-8 of a value, what comes to at most the learning rate of 0.01.
MUON_TOLERANCE = STEPS * 0.01 * 2**-6

#: In the order of the table's columns.
STRATEGIES = ("fsdp2", "fsdp_native")

Make = Callable[[list[nn.Parameter]], Any]


def see_others() -> None:
    """Let this rank import the packages. Not the test's own process: what it starts later would find them too."""
    path = os.environ.get("FSDP_TESTS_APART", "")
    if path not in sys.path:
        sys.path.append(path)
    if "torchvision" not in sys.modules and not hasattr(torch.ops.torchvision, "nms"):
        # torchvision, which timm imports, can't be imported without its operators, and its wheels on the package index
        # have them for torch's CUDA build alone. None is used here.
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def names_offered_by_timm() -> list[str]:
    see_others()
    from timm.optim import list_optimizers

    return list(list_optimizers())


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table, without those that head it."""
    section = PAGE.split(f"\n### {heading}")[1].split("\n## ")[0].split("\n### ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines[2:]]


def by_name_of_timm(name: str, **settings: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> Any:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(parameters, opt=name, lr=0.01, **{"momentum": 0.9, **settings})

    return make


def by_path(module: str, kind: str, **settings: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> Any:
        return getattr(import_module(module), kind)(parameters, **settings)

    return make


def names_of_timm(cell: str) -> list[str]:
    """What a first cell names: lists end with a semicolon, and may begin with words of their own."""
    return re.findall(r"\w+", cell.split(";")[0].split(":")[-1])


def of_timm() -> dict[str, tuple[Make, tuple[bool, bool]]]:
    found = {}
    for first, *cells in rows("timm"):
        if "not tried" in cells[0]:
            continue
        # a cell may set conditions, which are tried below: what it begins with holds without them
        fsdp2, pieces = (cell.startswith("right") for cell in cells)
        for name in names_of_timm(first):
            if name in ("kron", "kronc", "kronw"):
                continue  # whose trial takes a minute and a half; they were tried by hand
            found[f"timm {name}"] = by_name_of_timm(name), (fsdp2, pieces)
    return found


def right_without_scalars() -> list[str]:
    """Those that docs/optimizers.md says to be refused under fsdp2 only where a parameter is 0-dim."""
    return [
        f"{package} {name}"
        for package in ("timm", "pytorch_optimizer")
        for first, *cells in rows(package)
        if cells[0].startswith("refused if a parameter is 0-dim") and cells[0].endswith("otherwise right")
        for name in names_of_timm(first)
    ]


def is_variant(name: str) -> bool:
    """Whether a name of timm's is that of a variant of others, which slow_optimizers.py runs."""
    if name in ("nesterov", "nadamuon", "nlarc"):  # another name for sgd, and the sums of two others each
        return True
    names = {one.partition(" ")[2] for one in of_timm()}
    corrected = name[-1] in "cw" and name[:-1] in names
    return name not in ("cadamw", "clion", "adamw") and (corrected or (name[0] == "c" and name[1:] in names))


#: What tests in CI run of pytorch_optimizer's; slow_optimizers.py runs all.
OF_PYTORCH_OPTIMIZER = ("AdaFactor", "CAME", "Conda", "Kron", "NorMuon", "ScalableShampoo", "Shampoo", "SOAP")

#: Those that take matrices apart from other parameters.
BY_USE_MUON = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")


def by_name_of_pytorch_optimizer(name: str) -> Make:
    def make(parameters: list[nn.Parameter]) -> Any:
        kind = getattr(import_module("pytorch_optimizer"), name)
        if name in BY_USE_MUON:
            matrices, others = ([p for p in parameters if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
            return kind([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], lr=0.01)
        if name in ("FriendlySAM", "LookSAM", "SAM"):
            return kind(parameters, torch.optim.AdamW, lr=0.01)
        if name in ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "TRAC"):
            return kind(torch.optim.AdamW(parameters, lr=0.01))
        settings = {"BSAM": {"num_data": 100}, "Ranger21": {"num_iterations": 100}, "AliG": {"max_lr": 0.01}}
        return kind(parameters, **{"lr": 0.01, **settings.get(name, {})})

    return make


def of_pytorch_optimizer() -> dict[str, tuple[Make, tuple[bool, bool]]]:
    return {
        f"pytorch_optimizer {name}": (
            by_name_of_pytorch_optimizer(name),
            (cells[0].startswith("right"), cells[1].startswith("right")),
        )
        for first, *cells in rows("pytorch_optimizer")
        if "not tried" not in cells[0]
        for name in names_of_timm(first)
    }


BOTH = (True, True)

#: By what it is called here: how it is made, and under which of the strategies it is right.
OPTIMIZERS: dict[str, tuple[Make, tuple[bool, bool]]] = {
    **{
        f"schedulefree {name}": (by_path("schedulefree", name, lr=0.01, **settings), BOTH)
        for name, settings in {
            "AdamWScheduleFree": {},
            "AdamWScheduleFreeClosure": {},
            "AdamWScheduleFreePaper": {},
            "AdamWScheduleFreeReference": {},
            "RAdamScheduleFree": {},
            "RAdamScheduleFreeClosure": {},
            "SGDScheduleFree": {},
            "SGDScheduleFreeClosure": {},
            "SGDScheduleFreeReference": {},
        }.items()
    },
    "transformers Adafactor": (by_path("transformers.optimization", "Adafactor"), BOTH),
    "torchao _AdamW": (by_path("torchao.optim", "_AdamW", lr=0.01, bf16_stochastic_round=True), BOTH),
    **{
        f"torchao {name}": (by_path("torchao.optim", name, lr=0.01), BOTH)
        for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
    },
    **{name: one for name, one in of_timm().items() if not is_variant(name.partition(" ")[2])},
    **{name: one for name, one in of_pytorch_optimizer().items() if name.partition(" ")[2] in OF_PYTORCH_OPTIMIZER},
    "timm lookahead_adamw": (by_name_of_timm("lookahead_adamw"), BOTH),
    "timm lars with weight decay": (by_name_of_timm("lars", weight_decay=0.01), BOTH),
    "timm sgdp without momentum": (by_name_of_timm("sgdp", momentum=0.0), (False, True)),
}


class Small(nn.Module):
    """Matrices and vectors that two ranks divide evenly or not, and on request a 0-dim parameter."""

    def __init__(self, has_scalar: bool) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 8)
        self.middle = nn.Linear(8, 5)
        self.down = nn.Linear(5, FEATURES)
        self.gain = nn.Parameter(torch.tensor(0.7)) if has_scalar else 0.7

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.gain * self.down(torch.tanh(self.middle(torch.tanh(self.up(x)))))
        return output


def new_small(has_scalar: bool = True) -> Small:
    with oracle.seeded(7):
        return Small(has_scalar)


def steps(model: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]], backward: Callable[[Tensor], Any]) -> None:
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()  # of schedule-free optimizers

    @torch.enable_grad()  # which not all of them do, transformers' Adafactor for one
    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        backward(loss)
        return loss

    for batch in batches:
        optimizer.step(partial(evaluate, *batch))


def trained_plain(names: list[str]) -> dict[str, dict[str, Tensor]]:
    """In one process, what the parameters end with."""
    see_others()
    ended = {}
    for name in names:
        net = new_small()
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps, which takes half a minute
            optimizer = OPTIMIZERS[name][0](list(net.parameters()))
            steps(net, optimizer, oracle.global_batches(STEPS), lambda loss: loss.backward())
        ended[name] = dict(net.state_dict())
    return ended


def trained_over_shards(strategy: str, names: list[str]) -> dict[str, dict[str, Tensor] | str]:
    """On a rank: what the parameters end with, or the refusal."""
    see_others()
    ended: dict[str, dict[str, Tensor] | str] = {}
    for name in names:
        fabric = new_fabric(strategy)
        net = new_small()
        try:
            model, optimizer = fabric.setup(net, OPTIMIZERS[name][0](list(net.parameters())))
        except OptimizerMismatchError as refused:
            ended[name] = str(refused)
            continue
        with torch.compiler.set_stance("force_eager"):
            steps(model, optimizer, whole_batches(fabric, STEPS), fabric.backward)
        ended[name] = full_state_dict(model)
    return ended


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def drawn_for(column: int) -> list[str]:
    """The third that is tried with a strategy: three seeds in a row have all pairs, see CONTRIBUTING.md."""
    seed = int(os.environ.get("FSDP_PAIRS_SEED", "17"))
    return [name for name in OPTIMIZERS if (seed + zlib.crc32(name.encode())) % 3 == column]


@pytest.fixture(scope="module")
def plain(ranks: RankPool) -> dict[str, dict[str, Tensor]]:
    """What those that are right under one of the strategies end with in one process."""
    names = [name for column in range(2) for name in drawn_for(column) if OPTIMIZERS[name][1][column]]
    (ended,) = ranks.run(1, trained_plain, names)
    return dict(ended)


def test_the_table_names_all_of_timms(ranks: RankPool) -> None:
    (names,) = ranks.run(1, names_offered_by_timm)
    named = {name for first, *_ in rows("timm") for name in names_of_timm(first)}
    offered = {name for name in names if not re.match("bnb|fused", name)}
    assert named - {"those", "of", "bitsandbytes", "and", "apex", "bnb", "fused"} == offered


@pytest.mark.cpu_limit(600)
@pytest.mark.parametrize("column", range(2), ids=STRATEGIES)
def test_each_optimizer_of_the_table(ranks: RankPool, plain: dict[str, dict[str, Tensor]], column: int) -> None:
    strategy = STRATEGIES[column]
    names = drawn_for(column)
    first, _ = ranks.run(2, trained_over_shards, strategy, names, timeout=500.0)
    wrong = {}
    for name in names:
        ended, right = first[name], OPTIMIZERS[name][1]
        if isinstance(ended, str) or not right[column]:
            if isinstance(ended, str) == right[column]:
                wrong[name] = ended
            continue
        want = plain[name]
        assert ended.keys() == want.keys()
        differ = float(torch.stack([(ended[key] - want[key]).abs().max() for key in want]).max())
        if not differ <= (MUON_TOLERANCE if "muon" in name.lower() else FP32_TOLERANCE):  # NaN is wrong too
            wrong[name] = f"differs by {differ}"
    assert not wrong


#: torchao's optimizers, by the kind of state that each keeps; and how wide a layer has shards that they quantise.
LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
LOW_BIT_WIDTH = 2048


def new_wide() -> nn.Module:
    with oracle.seeded(3):
        return nn.Sequential(nn.Linear(FEATURES, LOW_BIT_WIDTH), nn.Tanh(), nn.Linear(LOW_BIT_WIDTH, FEATURES))


def low_bit_plain(kind: str, full: str | None = None) -> dict[str, Tensor]:
    """In one process: four steps; or two, from a full checkpoint."""
    see_others()
    net = new_wide()
    optimizer = by_path("torchao.optim", kind, lr=0.01)(list(net.parameters()))
    if full is not None:
        saved = torch.load(full, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    with torch.compiler.set_stance("force_eager"):
        steps(net, optimizer, oracle.global_batches(4)[2 * (full is not None) :], lambda loss: loss.backward())
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def low_bit_saved(folder: str) -> dict[str, str]:
    """On a rank of two: two steps of each, saved in both kinds; and what is said where shards are flat."""
    see_others()
    told = {}
    for kind in LOW_BIT:
        for strategy, form in (("fsdp2", "sharded"), ("fsdp2", "full"), ("fsdp_native", "sharded")):
            fabric, net = new_fabric(strategy, options={"state_dict_type": form}), new_wide()
            optimizer = by_path("torchao.optim", kind, lr=0.01)(list(net.parameters()))
            model, optimizer = fabric.setup(net, optimizer)
            with torch.compiler.set_stance("force_eager"):
                steps(model, optimizer, whole_batches(fabric, 2), fabric.backward)
            state = {"model": model, "optimizer": optimizer}
            saves = partial(fabric.save, f"{folder}/{strategy} {form} {kind}", state)
            told[f"{strategy} {form} {kind}"] = refusal(CheckpointValueError, saves)
    return told


def low_bit_resumed(folder: str, world_size: int, form: str) -> dict[str, dict[str, Tensor] | str]:
    """On a rank: two more steps of each; or the refusal."""
    see_others()
    ended: dict[str, dict[str, Tensor] | str] = {}
    for kind in LOW_BIT:
        fabric, net = new_fabric("fsdp2", world_size), new_wide()
        optimizer = by_path("torchao.optim", kind, lr=0.01)(list(net.parameters()))
        model, optimizer = fabric.setup(net, optimizer)
        try:
            fabric.load(f"{folder}/fsdp2 {form} {kind}", {"model": model, "optimizer": optimizer})
        except CheckpointMismatchError as refused:
            ended[kind] = str(refused)
            continue
        with torch.compiler.set_stance("force_eager"):
            steps(model, optimizer, whole_batches(fabric, 4)[2:], fabric.backward)
        ended[kind] = full_state_dict(model)
    return ended


@pytest.mark.cpu_limit(1200)
def test_low_bit_state_is_saved_and_resumed(ranks: RankPool, tmp_path: Path) -> None:
    """Blocks that ranks hold whole are those of one process: a resume is exact on two ranks and on one; or refused."""
    folder, limit = str(tmp_path), 500.0
    told, _ = ranks.run(2, low_bit_saved, folder, timeout=limit)
    on_two, _ = ranks.run(2, low_bit_resumed, folder, 2, "full", timeout=limit)
    (on_one,) = ranks.run(1, low_bit_resumed, folder, 1, "sharded", timeout=limit)
    on_three, *_ = ranks.run(3, low_bit_resumed, folder, 3, "sharded", timeout=limit)
    for kind in LOW_BIT:
        (want,) = ranks.run(1, low_bit_plain, kind, timeout=limit)
        (opened,) = ranks.run(1, low_bit_plain, kind, f"{folder}/fsdp2 full {kind}", timeout=limit)
        for got in (on_two[kind], on_one[kind], opened):
            torch.testing.assert_close(got, want, atol=FP32_TOLERANCE, rtol=0)
        assert_says(on_three[kind], "'0.weight' was saved in blocks", "on a number of ranks that divides the rows")
        assert "nothing was raised" in told[f"fsdp2 sharded {kind}"]
        assert "nothing was raised" in told[f"fsdp2 full {kind}"]
        assert_says(told[f"fsdp_native sharded {kind}"], "'exp_avg' of '0.weight'", "keeps whole rows on each rank")


class GrowingWide(LightningModule):
    """Its optimizer gets its second layer in a hook."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = new_wide(), kind

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return by_path("torchao.optim", self.kind, lr=0.01)(list(self.net[0].parameters()))  # type: ignore[index]

    def on_train_start(self) -> None:
        self.optimizers().add_param_group({"params": list(self.net[2].parameters())})  # type: ignore[union-attr,index]


def low_bit_grown(tmp: str, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On a rank: the weights after an uninterrupted run, and after one that was resumed."""
    see_others()
    run, first, resumed = (new_trainer(tmp, "fsdp2", 2, max_epochs=epochs) for epochs in (2, 1, 2))
    with torch.compiler.set_stance("force_eager"):
        run.fit(GrowingWide(kind), loader(2, 2))
        first.fit(GrowingWide(kind), loader(2, 2))
        first.save_checkpoint(f"{tmp}/{kind}")
        resumed.fit(GrowingWide(kind), loader(2, 2), ckpt_path=f"{tmp}/{kind}")
    return full_state(run.strategy), full_state(resumed.strategy)


def test_low_bit_state_of_param_groups_that_are_added_late(ranks: RankPool, tmp_path: Path) -> None:
    for whole, resumed in ranks.run(2, low_bit_grown, str(tmp_path), "AdamW8bit", timeout=500.0):
        torch.testing.assert_close(resumed, whole, atol=0, rtol=0)

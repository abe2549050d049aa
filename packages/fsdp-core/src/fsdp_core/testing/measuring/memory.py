"""The host memory that a rank uses, for arbitrary work and for building a model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core import wrap
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer

__all__ = [
    "BLOCK_BYTES",
    "Deep",
    "assert_built_in_a_shard_and_a_layer",
    "built_under_fabric",
    "configured_under_trainer",
    "first_rows",
    "is_measurable",
    "peak_of",
]

#: The width of one block of :class:`Deep`, and its bytes: two layers, each allocated on its own.
WIDTH = 768
BLOCK_BYTES = 2 * WIDTH * (WIDTH + 1) * 4


def is_measurable() -> bool:
    """Whether this system can reset the peak memory of a process; only Linux can."""
    return Path("/proc/self/clear_refs").exists()


def peak_of(work: Callable[[], Any]) -> int:
    """The peak memory of this process during ``work``, in bytes above what it used before."""
    start = _start()
    work()
    return _read_status("VmHWM") - start


def _start() -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _read_status("VmRSS")


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Wide(nn.Module):
    """A block that is large compared with the memory of the process itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(nn.Module):
    """A stack of blocks.

    Args:
        blocks: The number of blocks.
        width: The width of each block.
        mark: Applied to each block as it is built.
    """

    def __init__(self, blocks: int, width: int = WIDTH, mark: Callable[[Wide], Wide] = wrap) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mark(Wide(width)) for _ in range(blocks)])
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def built_under_fabric(strategy: str, world_size: int, blocks: int) -> tuple[int, dict[str, Tensor]]:
    """The peak memory of building and setting up a model in bytes, and its first rows."""
    fabric = new_fabric(strategy, world_size)

    def build(blocks: int, width: int = WIDTH) -> Any:
        with oracle.seeded(1), fabric.init_module():
            net = Deep(blocks, width)
        return fabric.setup(net)

    models = [build(2, 8)]  # a small model first, which allocates what is needed only once
    peak = peak_of(lambda: models.append(build(blocks)))
    strategy_of_fabric: Any = fabric.strategy
    return peak, first_rows(full_state(strategy_of_fabric, strategy_of_fabric.roots[-1]))


class _Configured(Lit):
    def __init__(self, blocks: int, width: int = WIDTH) -> None:
        super().__init__("sgd")
        self.net = None
        self.blocks, self.width = blocks, width
        self.state: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.net is None:
            with oracle.seeded(1):
                self.net = Deep(self.blocks, self.width)

    def on_train_start(self) -> None:
        self.peak = _read_status("VmHWM")
        self.state = first_rows(full_state(self.trainer.strategy))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x = torch.ones(1, self.width, device=self.device)
        return mse_loss(self.net(x), x)


def configured_under_trainer(strategy: str, tmp: str, world_size: int, blocks: int) -> tuple[int, dict[str, Tensor]]:
    """The peak memory of building in ``configure_model()`` up to the start of training, and the first rows."""

    def fit(module: _Configured) -> None:
        new_trainer(tmp, strategy, world_size, max_steps=1).fit(module, loader(1, world_size))

    fit(_Configured(2, 8))
    module = _Configured(blocks)
    start = _start()
    fit(module)
    return module.peak - start, {name.removeprefix("net."): rows for name, rows in module.state.items()}


def assert_built_in_a_shard_and_a_layer(ranks: RankPool, tmp: str, strategy: str) -> None:
    """Check that building a model of marked layers takes the memory of a shard and a layer, and gives its weights.

    Args:
        ranks: Ranks that have built nothing else.
        tmp: A folder.
        strategy: The name of the strategy.
    """
    blocks = 16  # 128 MiB
    with oracle.seeded(1):
        unsharded = first_rows(Deep(blocks).state_dict())
    for world_size, results in (
        (2, ranks.run(2, built_under_fabric, strategy, 2, blocks, timeout=200)),
        (4, ranks.run(4, configured_under_trainer, strategy, tmp, 4, blocks, timeout=200)),
    ):
        for peak, rows in results:
            assert peak <= 1.25 * (blocks / world_size + 1) * BLOCK_BYTES, f"{peak / 2**20:.0f} MiB"
            for name, tensor in unsharded.items():
                assert torch.equal(rows[name], tensor), name


def first_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A few elements of each tensor."""
    return {name: tensor.reshape(-1)[:: WIDTH * 64].clone() for name, tensor in state.items()}

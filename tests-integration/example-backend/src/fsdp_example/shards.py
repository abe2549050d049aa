"""Parameters that every rank holds whole, and the run of elements of each that a rank's optimizer steps."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fsdp_core import Runtime
from fsdp_core.sharding import EndOfBackward, StepGradients
from fsdp_core.state import FlatRange, Part, named_parameters

__all__ = ["Shards"]


class Shards:
    """Cuts each parameter of a module into one run of elements for each rank.

    A rank's run shares memory with the whole parameter. What a step of the optimizer changes in it is there at once;
    :meth:`gather` brings the runs of the other ranks.

    Args:
        module: The module, with the same values on every rank.
        runtime: The ranks.

    Attributes:
        whole: The module's parameters, by name.
        of: The shard of each parameter.
        layout: Which elements of which parameter each shard has.
        end: The end of each backward pass, where gradients are reduced.
        step: What whole parameters show for their gradients inside a step by hand.
    """

    def __init__(self, module: nn.Module, runtime: Runtime) -> None:
        self.runtime = runtime
        self.whole = dict(named_parameters(module))
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        self.layout: dict[nn.Parameter, tuple[Part, ...]] = {}
        for name, whole in self.whole.items():
            size = self._size(whole)
            start = min(runtime.rank * size, whole.numel())
            run = whole.data.view(-1)[start : start + size]
            shard = self.of[whole] = nn.Parameter(run, requires_grad=whole.requires_grad)
            elements = FlatRange(offset=0, start=start, length=run.numel())
            self.layout[shard] = (Part(name=name, shape=tuple(whole.shape), range=elements),)
        self.step = StepGradients(module)
        for whole, shard in self.of.items():
            self.step.follow(whole, shard, is_part=True)
        self.end = EndOfBackward(list(self.whole.values()), module, self.reduce)
        module.register_forward_pre_hook(lambda *_: self._follow_whole())

    def reduce(self) -> None:
        """Add the mean of what the ranks have computed to the gradients of the shards."""
        trained = [whole for whole in self.whole.values() if whole.requires_grad]
        has = self.runtime.all_reduce(torch.tensor([float(whole.grad is not None) for whole in trained]), "max")
        used = [whole for whole, some_rank_has in zip(trained, has.tolist(), strict=True) if some_rank_has]
        if not used:
            return
        # half-precision gradients are summed in fp32
        rows = self._rows([(torch.zeros_like(w) if w.grad is None else w.grad.detach()).float() for w in used])
        runs = self.runtime.reduce_scatter(rows).split([self._size(whole) for whole in used])
        for whole, run in zip(used, runs, strict=True):
            shard = self.of[whole]
            mean = run[: shard.numel()].to(shard.dtype)
            shard.grad = mean if shard.grad is None else shard.grad + mean
            whole.grad = None

    def gather(self) -> None:
        """Give every rank the runs that the others have changed."""
        own = [pad(shard.detach(), (0, self._size(whole) - shard.numel())) for whole, shard in self.of.items()]
        rows = self.runtime.all_gather(torch.cat(own))
        columns = rows.split([run.numel() for run in own], dim=1)
        for whole, runs in zip(self.of, columns, strict=True):
            whole.data.copy_(runs.reshape(-1)[: whole.numel()].view(whole.shape))

    def forget_gradients(self) -> None:
        """Drop all gradients, reduced or not."""
        for whole, shard in self.of.items():
            whole.grad = shard.grad = None

    def _follow_whole(self) -> None:
        """Let shards require gradients as the parameters do, which the user may have frozen or unfrozen since."""
        for whole, shard in self.of.items():
            shard.requires_grad_(whole.requires_grad)

    def _size(self, whole: Tensor) -> int:
        """How many elements each rank has, the last ones perhaps fewer."""
        return ceil(whole.numel() / self.runtime.world_size)

    def _rows(self, tensors: list[Tensor]) -> Tensor:
        """Whole tensors as one row for each rank, which holds its runs of all of them."""
        ranks = self.runtime.world_size
        flat = [pad(t.reshape(-1), (0, self._size(t) * ranks - t.numel())).view(ranks, -1) for t in tensors]
        return torch.cat(flat, dim=1)

"""Why a module does not train on parts of a batch as on the whole: known causes, found by leaving each out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fsdp_core.proving.module_state import BATCH_NORMS, is_same_value
from fsdp_core.proving.runs import Difference, TrainedRun, compare_runs
from fsdp_core.rehearsal.forks import Failed

__all__ = ["CAUSES", "Cause", "CauseName", "Variant", "find_cause", "find_division", "shares_of_ranks"]

CauseName: TypeAlias = Literal[
    "rank",
    "batchnorm",
    "buffer",
    "attribute",
    "settings",
    "count",
    "sum",
    "divided",
    "rows",
    "backward",
    "loss",
    "data",
    "unknown",
]

#: By name, what it means; the names are those that the command accepts.
CAUSES: dict[CauseName, str] = {
    "rank": "the step does something else on another rank",
    "batchnorm": "a batch norm normalises over a rank's part of the batch",
    "buffer": "a buffer is updated from a rank's part of the batch",
    "attribute": "an attribute is updated from a rank's part of the batch",
    "settings": "the optimizer's settings are made from a rank's part of the batch",
    "count": "a mean is over a number of tokens, samples or weights that differs between ranks",
    "sum": "the loss is a sum, and ranks average",
    "divided": "the loss is divided by a number of all ranks, and ranks average",
    "rows": "a row's output depends on the other rows of the batch",
    "backward": "the loss is the mean of the ranks' losses, and its gradient is not the mean of theirs",
    "loss": "the loss is no mean over the rows of the batch, and each submodule's output is the same",
    "data": "ranks read the same rows, so that each is trained with as often as there are ranks",
    "unknown": "none of the known causes",
}

#: How exactly the whole batch's gradient must be a weighted sum of the ranks', relative to its norm.
_EXACTNESS = 1e-5

#: How much a share must differ from another to be called another.
_SHARE_DIFFERENCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why parts of a batch train a module otherwise than the whole one.

    Attributes:
        name: Which of :data:`CAUSES`.
        words: What was seen.
        remedy: What to write instead.
    """

    name: CauseName
    words: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A run of a reference with a cause left out, or with details.

    Attributes:
        in_turn: Whether each rank is played in turn; else the batch is whole.
        freezes_batch_norms: As in :class:`~fsdp_core.proving.training.Reference`.
        hides_ranks: As there.
        records_details: As there.
        imposed_states: As there.
    """

    in_turn: bool
    freezes_batch_norms: bool = False
    hides_ranks: bool = False
    records_details: bool = False
    imposed_states: Sequence[Mapping[str, Any]] = ()


def find_cause(
    module: nn.Module,
    whole_batch: TrainedRun,
    in_turn: TrainedRun,
    difference: Difference,
    train: Callable[[Sequence[Variant]], list[TrainedRun | Failed]],
) -> Cause:
    """Find why the two references differ.

    Args:
        module: What is trained.
        whole_batch: The run on whole batches.
        in_turn: The run as each rank in turn.
        difference: Their first difference.
        train: Runs variants of the references.
    """
    variants = [
        Variant(in_turn=True, hides_ranks=True),
        Variant(in_turn=False, records_details=True),
        Variant(in_turn=True, records_details=True),
    ]
    batch_norms = [name for name, submodule in module.named_modules() if isinstance(submodule, BATCH_NORMS)]
    if batch_norms:
        variants += [Variant(in_turn=turn, freezes_batch_norms=True) for turn in (False, True)]
    runs = train(variants)
    detailed_whole, detailed_turn = runs[1], runs[2]
    if _agree(whole_batch, runs[0]):
        return Cause(
            name="rank",
            words=f"{CAUSES['rank']}: without self.global_rank the two are the same",
            remedy="Let all ranks compute the same; what only one is to do, such as writing, is no part of the loss.",
        )
    if batch_norms and _agree(runs[3], runs[4]):
        more = f" and {len(batch_norms) - 1} more" if len(batch_norms) > 1 else ""
        return Cause(
            name="batchnorm",
            words=f"{CAUSES['batchnorm']}: {batch_norms[0]}{more}",
            remedy="Write Trainer(sync_batchnorm=True) on GPUs, or GroupNorm in its place; or accept it: "
            "--accept batchnorm.",
        )
    if isinstance(detailed_whole, Failed) or isinstance(detailed_turn, Failed):
        return _unknown()
    state = _state_that_differs(detailed_whole, detailed_turn, difference.step, train)
    if state:
        return _cause_of_state(module, state, difference.step)
    if difference.of == "weight":
        return _cause_of_settings(whole_batch, in_turn, difference.step) or _unknown()
    shares = shares_of_ranks(detailed_whole, detailed_turn, difference.step)
    if shares is not None and min(shares) > _SHARE_DIFFERENCE:  # else some rank's rows do not count at all
        return _cause_of_shares(shares) or _unknown()
    submodule = _first_that_differs(detailed_whole, detailed_turn)
    if submodule is not None:
        return Cause(
            name="rows",
            words=f"{CAUSES['rows']}: seen first in what {submodule} returns",
            remedy="Compute it for each row, or from the rows of all ranks: self.all_gather(x, sync_grads=True).",
        )
    whole_loss, mean_loss = whole_batch.steps[difference.step].loss, in_turn.steps[difference.step].loss
    if is_same_value(whole_loss, mean_loss):
        return Cause(
            name="backward",
            words=f"{CAUSES['backward']}: hooks of parameters or modules, or an autograd.Function, change a rank's "
            "gradients before they are averaged, such as by clamping them",
            remedy="Change averaged gradients: in on_before_optimizer_step(), or by gradient_clip_val of the Trainer.",
        )
    if difference.step == 0:  # nothing is kept from a step before
        return Cause(
            name="loss",
            words=f"{CAUSES['loss']}: training_step compares rows with each other, normalises over them, or picks some",
            remedy="Compute it for each row, or from the rows of all ranks: self.all_gather(x, sync_grads=True), as "
            "for the negatives of a contrastive loss.",
        )
    return _unknown()


def find_division(whole_batch: TrainedRun, on_ranks: TrainedRun, ranks: int) -> Cause | None:
    """The cause ``"divided"``, if the first gradients of real ranks are the whole batch's, divided by their number."""
    expected, gradients = whole_batch.steps[0].gradients, on_ranks.steps[0].gradients
    if not expected or expected.keys() != gradients.keys():
        return None
    for name, gradient in expected.items():
        difference = (gradients[name].double() * ranks - gradient.double()).norm()
        if not float(difference) <= _EXACTNESS * float(gradient.double().norm()):
            return None
    return Cause(
        name="divided",
        words=f"{CAUSES['divided']}: gradients are {1 / ranks:.3g} of those of the whole batch",
        remedy="Write loss = fsdp_core.token_mean(losses.sum(), count), with this rank's count; or multiply the loss "
        "by self.trainer.world_size.",
    )


def _state_that_differs(
    whole_batch: TrainedRun,
    in_turn: TrainedRun,
    step: int,
    train: Callable[[Sequence[Variant]], list[TrainedRun | Failed]],
) -> list[str]:
    """The buffers and attributes that ranks must have as the whole batch has them, for both to train the same."""
    whole_states = [states[0] for states in whole_batch.states]
    names = [
        name
        for name in (whole_states[step] if step else ())
        if any(
            name in state and not is_same_value(whole_states[earlier][name], state[name])
            for earlier in range(1, step + 1)
            for state in in_turn.states[earlier]
        )
    ]
    if not names:
        return []
    sets = [names, *([name] for name in names[:8] if len(names) > 1)]
    imposed = [
        [{name: state[name] for name in chosen if name in state} for state in whole_states[: step + 1]]
        for chosen in sets
    ]
    runs = train([Variant(in_turn=True, imposed_states=states) for states in imposed])
    matters = [_agree(_until(whole_batch, step), _until(run, step)) for run in runs]
    return [chosen[0] for chosen, matter in zip(sets[1:], matters[1:], strict=True) if matter] or names * matters[0]


def _until(run: TrainedRun | Failed, step: int) -> TrainedRun | Failed:
    return run if isinstance(run, Failed) else replace(run, steps=run.steps[: step + 1])


def _cause_of_state(module: nn.Module, names: Sequence[str], step: int) -> Cause:
    buffers = dict(module.named_buffers())
    name: CauseName = "buffer" if all(each in buffers for each in names) else "attribute"
    listing = ", ".join(each if each in buffers else f"self.{each}" for each in names[:3])
    return Cause(
        name=name,
        words=f"{CAUSES[name]}: {listing}; with those of the whole batch, step {step + 1} is the same",
        remedy="Update it from all ranks: self.all_gather(value).mean(0) is the mean over them, and a number of "
        "samples times self.trainer.world_size that of all.",
    )


def _cause_of_settings(whole_batch: TrainedRun, in_turn: TrainedRun, step: int) -> Cause | None:
    """The number of an optimizer's parameter group that is another on the whole batch."""
    for number, group in enumerate(whole_batch.steps[step].settings):
        for name, value in group.items():
            other = in_turn.steps[step].settings[number].get(name)
            if not is_same_value(value, other):
                return Cause(
                    name="settings",
                    words=f"{CAUSES['settings']}: {name} of parameter group {number} is {other:.6g} on ranks, and "
                    f"{value:.6g} with the whole batch",
                    remedy="Compute it from the batch of all ranks: multiply sizes by self.trainer.world_size.",
                )
    return None


def _agree(first: TrainedRun | Failed, second: TrainedRun | Failed) -> bool:
    if isinstance(first, Failed) or isinstance(second, Failed):
        return False
    return compare_runs(first, second).agrees


def shares_of_ranks(
    whole_batch: TrainedRun, in_turn: TrainedRun, step: int, parameter: str | None = None
) -> list[float] | None:
    """The shares of the ranks' gradients in those of a run; ``None`` if they are no weighted sum of them.

    Args:
        whole_batch: The run.
        in_turn: The run of each rank in turn, with details.
        step: The optimizer step, before which the two are the same.
        parameter: The parameter whose gradient is looked at; ``None`` for all together.
    """
    expected = whole_batch.steps[step].gradients
    of_ranks = in_turn.rank_gradients[step]
    shapes = {name: value for gradients in (*of_ranks, expected) for name, value in gradients.items()}
    names = [parameter] if parameter in shapes else list(shapes)

    def flat(gradients: Mapping[str, Tensor]) -> Tensor:
        parts = [gradients.get(name, torch.zeros_like(shapes[name])) for name in names]
        return torch.cat([part.reshape(-1).double() for part in parts])

    total = flat(expected)
    columns = torch.stack([flat(gradients) for gradients in of_ranks], 1)
    solution = torch.linalg.lstsq(columns, total[:, None]).solution
    residual = float((columns @ solution - total[:, None]).norm())
    if not residual <= _EXACTNESS * float(total.norm()):
        return None
    return [float(share) for share in solution[:, 0]]


def _cause_of_shares(shares: Sequence[float]) -> Cause | None:
    listing = ", ".join(f"{round(share, 6) + 0.0:.3g}" for share in shares)
    if max(shares) - min(shares) > _SHARE_DIFFERENCE:
        return Cause(
            name="count",
            words=f"{CAUSES['count']}: ranks have shares of {listing} in the whole batch, and are averaged with "
            f"{1 / len(shares):.3g} each",
            remedy="Write loss = fsdp_core.token_mean(losses.sum(), count), the mean over the tokens of all ranks, and "
            "of the micro-batches of a step.",
        )
    if abs(shares[0] - 1) > _SHARE_DIFFERENCE:
        return None
    return Cause(
        name="sum",
        words=f"{CAUSES['sum']}: each has a share of {shares[0]:.3g} in the whole batch, and of {1 / len(shares):.3g} "
        "in the average",
        remedy="Take a mean over the batch; or multiply the loss by self.trainer.world_size.",
    )


def _first_that_differs(whole_batch: TrainedRun, in_turn: TrainedRun) -> str | None:
    """The first submodule in whose output rows differ, though those of all before it are the same."""
    for name, output in whole_batch.outputs.items():
        other = in_turn.outputs.get(name)
        if other is not None and other.shape == output.shape and not torch.allclose(output, other, rtol=1e-6):
            return name
    return None


def _unknown() -> Cause:
    return Cause(
        name="unknown",
        words=CAUSES["unknown"],
        remedy="Look for what the step keeps for the next one elsewhere than in buffers and attributes of modules, and "
        "for what hooks do.",
    )

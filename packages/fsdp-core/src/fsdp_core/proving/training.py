"""Trains a caught fit for three steps by Lightning's Trainer: in one process, or as one of several real ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fsdp_core.lightning.strategy import ShardedStrategy
from fsdp_core.proving.module_state import BATCH_NORMS, impose_state, read_state
from fsdp_core.proving.runs import STEPS, TrainedRun, TrainedStep
from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.fit import quietly
from fsdp_core.rehearsal.imagined_ranks import ImaginedEnvironment
from fsdp_core.rehearsal.known_values import users_line
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.rehearsal.step_marks import EnoughSteps
from fsdp_core.state.full_tensor import gather_each
from fsdp_core.torch_private.fake_tensors import tree_leaves, tree_map_only
from fsdp_core.torch_private.tensors import TorchDispatchMode

__all__ = ["Reference", "train_in_one_process", "train_on_rank"]

#: By how much weights are changed to see how a run depends on rounding, relative to each, by their dtype.
_PERTURBATION = {torch.float64: 1e-13, torch.float32: 1e-6}

#: How libraries call modules that drop a row's whole branch; each computes it by itself.
_STOCHASTIC_DEPTH = ("DropPath", "StochasticDepth")

#: Arguments of the Trainer that say how long and how often, of which a proof has its own.
_NOT_TAKEN = frozenset(
    {
        *("max_epochs", "max_steps", "accumulate_grad_batches", "limit_train_batches", "log_every_n_steps"),
        *("check_val_every_n_epoch", "val_check_interval"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """How one process trains a module that ranks would train.

    Attributes:
        batches: The batches of the Trainer, in order.
        ranks: The number of ranks whose work it does.
        in_turn: Whether each batch is that of one rank, the ranks in turn; else each is a whole one.
        accumulate: Micro-batches of each rank in an optimizer step.
        dtype: What the module and its batches are in.
        is_perturbed: Whether weights are changed in their 13th digit.
        freezes_batch_norms: Whether batch norms use the averages that they have stored.
        hides_ranks: Whether each rank that is played is told that it is rank 0.
        is_alone: Whether a whole batch's process is told that it is the only one; else that there are as many as ranks.
        records_details: Whether gradients and states of each rank and outputs of submodules are recorded.
        imposed_states: Before each step, buffers and attributes that each rank that is played gets.
        undoes_steps: Whether weights are set back after each step.
    """

    batches: Sequence[Any]
    ranks: int
    in_turn: bool
    accumulate: int = 1
    dtype: torch.dtype = torch.float64
    is_perturbed: bool = False
    freezes_batch_norms: bool = False
    hides_ranks: bool = False
    is_alone: bool = False
    records_details: bool = False
    imposed_states: Sequence[Mapping[str, Any]] = ()
    undoes_steps: bool = False


class OneProcess(SingleDeviceStrategy):
    """One process that trains as several ranks would: on their whole batches, or as each rank in turn.

    Each rank that is played has a copy of the module, with attributes and buffers of its own, and all have the same
    parameters: the Trainer accumulates their gradients.

    Args:
        reference: How it trains.
    """

    def __init__(self, reference: Reference) -> None:
        super().__init__("cpu")
        self._reference = reference
        self._copies: list[pl.LightningModule] = []
        self._is_in_step = False
        self.world_size = 1 if reference.is_alone else reference.ranks
        self.has_communicated = False

    @property
    def copies(self) -> Sequence[pl.LightningModule]:
        """The module of each rank that is played."""
        return self._copies

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def play(self, rank: int) -> None:
        """Be a rank from now on.

        Args:
            rank: The rank.
        """
        if not self._copies:
            module = self.lightning_module
            assert module is not None
            shared = {id(parameter): parameter for parameter in module.parameters()}
            self._copies = [module, *(copy.deepcopy(module, dict(shared)) for _ in range(self._reference.ranks - 1))]
            for played in self._copies:
                played.trainer = module.trainer  # which copies do not keep
        self.global_rank = self.local_rank = 0 if self._reference.hides_ranks else rank
        self.connect(self._copies[rank])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._reference.in_turn and len(args) > 1:  # batches are counted by rank
            args = (args[0], args[1] // self._reference.ranks, *args[2:])
        self._is_in_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._is_in_step = False

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.has_communicated |= self._is_in_step
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self.has_communicated |= self._is_in_step
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.has_communicated |= self._is_in_step
        return obj


def train_in_one_process(fit: CaughtFit, reference: Reference) -> TrainedRun:
    """Train three steps in this process alone. It changes the module.

    Args:
        fit: What the script trains.
        reference: How.
    """
    strategy = OneProcess(reference)
    recorder = Recorder(reference)
    micro_batches = reference.accumulate * (reference.ranks if reference.in_turn else 1)
    loader = _Batches(reference.batches, reference.dtype, strategy.play if reference.in_turn else None, reference.ranks)
    _fit(fit, reference.dtype, recorder, loader, strategy=strategy, devices=1, accumulate_grad_batches=micro_batches)
    recorder.run.communicates = strategy.has_communicated
    return recorder.run


def train_on_rank(
    fit: CaughtFit,
    candidate: Candidate,
    batches: Sequence[Any],
    *,
    accumulate: int,
    dtype: torch.dtype,
    rank: int,
    store: str,
    seconds: float,
    observes: bool = False,
) -> TrainedRun:
    """Train three steps as one of several real ranks, which are processes over gloo. It changes the module.

    Args:
        fit: What the script trains.
        candidate: The strategy.
        batches: This rank's.
        accumulate: Micro-batches in an optimizer step.
        dtype: What the module and its batches are in.
        rank: This rank.
        store: A path at which ranks find one another.
        seconds: How long a collective may wait.
        observes: Whether it is noted what the first step computes in, which strategies may not expect.
    """
    ranks = candidate.ranks
    dist.init_process_group(
        "gloo",
        store=FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    recorder = Recorder(None, rank, observes)
    _fit(
        fit,
        dtype,
        recorder,
        _Batches(batches, dtype),
        strategy=candidate.build(),
        devices=ranks,
        plugins=[ImaginedEnvironment(rank, ranks)],
        accumulate_grad_batches=accumulate,
    )
    return recorder.run


def _fit(fit: CaughtFit, dtype: torch.dtype, recorder: Recorder, loader: _Batches, **arguments: Any) -> None:
    trainer_arguments = {name: value for name, value in fit.trainer_arguments.items() if name not in _NOT_TAKEN}
    # not by precision="64-true", which strategies may not know
    torch.set_default_dtype(dtype)
    module = fit.module.to(dtype)
    with quietly(), _without_dropout():
        trainer = pl.Trainer(
            **trainer_arguments,
            **arguments,
            accelerator="cpu",
            max_steps=STEPS,
            max_epochs=1,
            num_nodes=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            callbacks=[recorder],
        )
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.hang_timeout = None  # a rank that has ended is none that was lost
        with suppress(EnoughSteps):  # before hooks of the epoch's end, which may need the validation that is left out
            trainer.fit(module, loader)


class _Batches:
    """Batches of a Trainer, with whatever is to be done before each."""

    def __init__(
        self, batches: Sequence[Any], dtype: torch.dtype, play: Callable[[int], None] | None = None, ranks: int = 1
    ) -> None:
        self._batches, self._dtype, self._play, self._ranks = batches, dtype, play, ranks

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            if self._play is not None:
                self._play(number % self._ranks)
            yield tree_map_only(Tensor, self._cast, batch)

    def _cast(self, tensor: Tensor) -> Tensor:
        """A copy, which a step may write to."""
        return tensor.to(self._dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


@dataclass(eq=False)
class Recorder(pl.Callback):
    """Records the steps of a fit, seeds each micro-batch, and ends it after three steps.

    Attributes:
        reference: How one process trains; ``None`` on a real rank.
        rank: The rank; that of the first one which one process plays.
        observes: Whether it is noted what the first step draws, and computes in.
        run: What is recorded.
    """

    reference: Reference | None
    rank: int = 0
    observes: bool = True
    run: TrainedRun = field(default_factory=TrainedRun)
    _gradients: dict[str, Tensor] = field(default_factory=dict)
    _losses: list[float] = field(default_factory=list)
    _settings: list[dict[str, float]] = field(default_factory=list)
    _steps_gradients: bool = True
    _parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _weights: dict[str, Tensor] = field(default_factory=dict)
    _accumulated: dict[str, Tensor] = field(default_factory=dict)
    _observing: ExitStack = field(default_factory=ExitStack)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.reference is not None and self.reference.is_perturbed:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in module.parameters():
                    noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
                    parameter.mul_(1 + _PERTURBATION.get(parameter.dtype, 0.0) * noise)
        self._parameters = dict(trainer.lightning_module.named_parameters())
        self._weights = _read_weights(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        rank, micro_batch = self.rank, batch_idx
        for submodule in trainer.lightning_module.modules():
            if type(submodule).__name__.endswith(_STOCHASTIC_DEPTH):
                submodule.eval()
        if self.observes and trainer.global_step == 0:
            self._observing.enter_context(_Observer(self.run))
        if self.reference is not None:
            if self.reference.in_turn:
                micro_batch, rank = divmod(batch_idx, self.reference.ranks)
            if self.reference.freezes_batch_norms:
                for submodule in trainer.lightning_module.modules():
                    if isinstance(submodule, BATCH_NORMS):
                        submodule.eval()
            if self.reference.records_details and micro_batch == 0:
                self._record_outputs(trainer.lightning_module)
            step = trainer.global_step
            if self.reference.records_details and micro_batch == step * self.reference.accumulate:
                if rank == 0:
                    self.run.states.append([])
                self.run.states[-1].append(read_state(trainer.lightning_module))
            if step < len(self.reference.imposed_states):
                impose_state(trainer.lightning_module, self.reference.imposed_states[step])
        seed = 1000 * micro_batch + rank
        random.seed(seed)
        torch.manual_seed(seed)

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.reference is None or not self.reference.records_details or not self.reference.in_turn:
            return
        gradients = _read_gradients(trainer, self._parameters)
        if not self._accumulated:
            self.run.rank_gradients.append([])
        share = self.reference.ranks * self.reference.accumulate
        own = {name: share * (value - self._accumulated.get(name, 0.0)) for name, value in gradients.items()}
        self.run.rank_gradients[-1].append(own)
        self._accumulated = gradients

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        # manual optimization is inside of a step, where strategies may show something else
        if self.reference is not None or module.automatic_optimization:
            self._gradients = _read_gradients(trainer, self._parameters)
        groups = optimizer.param_groups
        self._settings = [
            {name: float(value) for name, value in group.items() if isinstance(value, int | float)} for group in groups
        ]
        self._steps_gradients = any(parameter.grad is not None for group in groups for parameter in group["params"])

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._observing.close()
        if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
            self._losses.append(float(outputs["loss"]))  # divided by the number of micro-batches
        if trainer.global_step <= len(self.run.steps):
            return
        self._accumulated = {}
        weights = _read_weights(trainer)
        step = TrainedStep(
            gradients=self._gradients,
            weights=weights,
            loss=sum(self._losses) if self._losses else None,
            settings=self._settings,
            steps_gradients=self._steps_gradients,
            unmoved=[
                name
                for name, weight in weights.items()
                if name in self._weights and torch.equal(weight, self._weights[name])
            ],
        )
        self.run.steps.append(step)
        self._losses = []
        if self.reference is not None and self.reference.undoes_steps:
            with torch.no_grad():
                for name, parameter in trainer.lightning_module.named_parameters():
                    parameter.copy_(self._weights[name])
        else:
            self._weights = weights
        strategy = trainer.strategy
        if isinstance(strategy, OneProcess):
            for name in _differing_buffers(strategy.copies):
                self.run.buffers.setdefault(name, len(self.run.steps) - 1)
        if len(self.run.steps) == STEPS:
            if dist.is_initialized():
                dist.barrier()  # no rank leaves while another one reads its shards
            raise EnoughSteps

    def _record_outputs(self, module: nn.Module) -> None:
        """Record the first output of each submodule in this micro-batch, after those of the ranks before."""
        recorded: set[str] = set()

        def record(name: str, output: Any) -> None:
            tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
            if tensor is None or not tensor.ndim or not tensor.is_floating_point() or name in recorded:
                return
            recorded.add(name)
            outputs = self.run.outputs
            earlier = outputs.get(name)
            fits = earlier is None or earlier.shape[1:] == tensor.shape[1:]
            if fits:
                value = tensor.detach().clone()
                outputs[name] = value if earlier is None else torch.cat([earlier, value])

        for name, submodule in module.named_modules():
            if name:
                handle = submodule.register_forward_hook(lambda _m, _args, output, name=name: record(name, output))
                self._observing.callback(handle.remove)


def _read_gradients(trainer: pl.Trainer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The full gradients, by name. All ranks must call it.

    Args:
        trainer: The Trainer.
        parameters: The module's parameters at the start: a strategy may put others in their place while it computes.
    """
    sharded = getattr(trainer.strategy, "sharded_or_none", None)
    if sharded is None:
        gradients = {}
        for name, parameter in trainer.lightning_module.named_parameters():
            gradient = parameter.grad if parameter.grad is not None else parameters[name].grad
            if gradient is not None:
                gradients[name] = _full(gradient)
        return gradients
    accumulated = sharded.accumulated_gradients()
    gathered = {name: value.clone() for name, value in gather_each(accumulated.reduced, sharded.runtime)}
    return {name: value.detach().clone() for name, value in (accumulated.own | gathered).items()}


def _read_weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """The full weights, by name. All ranks must call it."""
    sharded = getattr(trainer.strategy, "sharded_or_none", None)
    if sharded is None:
        return {name: _full(parameter) for name, parameter in trainer.lightning_module.named_parameters()}
    state = sharded.model_state()
    return {name: value.clone() for name, value in gather_each(state, sharded.runtime) if isinstance(value, Tensor)}


def _full(tensor: Tensor) -> Tensor:
    """A dense copy, gathered if a strategy of a stranger has sharded it."""
    value = tensor.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.to_dense(masked_grad=False).clone()


def _differing_buffers(copies: Sequence[nn.Module]) -> list[str]:
    """The buffers that differ between modules, without those of batch norms, by name."""
    if not copies:
        return []
    of_batch_norms = {
        id(buffer) for m in copies[0].modules() if isinstance(m, BATCH_NORMS) for buffer in m.buffers(recurse=False)
    }
    other_copies = [dict(module.named_buffers()) for module in copies[1:]]
    return [
        name
        for name, buffer in copies[0].named_buffers()
        if id(buffer) not in of_batch_norms
        and any(
            not torch.allclose(buffer, other[name], rtol=1e-9, equal_nan=True)
            for other in other_copies
            if name in other
        )
    ]


@contextmanager
def _without_dropout() -> Iterator[None]:
    """A context in which no module and no call of ``torch.nn.functional`` drops anything.

    Functions are replaced, since no mode of torch is on while a backward pass recomputes activations.
    """
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    originals = {name: getattr(F, name) for name in (*names, "scaled_dot_product_attention")}
    attend = originals["scaled_dot_product_attention"]

    @wraps(attend)
    def attend_to_all(query: Any, key: Any, value: Any, mask: Any = None, *rest: Any, **kwargs: Any) -> Any:
        kwargs["attn_mask"] = kwargs.get("attn_mask", mask)
        kwargs["dropout_p"] = 0.0
        kwargs.update(zip(("is_causal",), rest[1:], strict=False))  # after dropout_p
        return attend(query, key, value, **kwargs)

    for name in names:
        setattr(F, name, wraps(originals[name])(_keep_input))
    setattr(F, "scaled_dot_product_attention", attend_to_all)  # noqa: B010
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(F, name, function)


def _keep_input(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


class _Observer(TorchDispatchMode):
    """Notes where random numbers are drawn, and the least exact dtype of what is computed."""

    def __init__(self, run: TrainedRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags and not self._run.random
        before = torch.get_rng_state() if may_draw else None
        output = func(*args, **(kwargs or {}))
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            self._run.random = f"{func.__name__.partition('.')[0]}, at {users_line()}"
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 1:
                coarsest = self._run.coarsest
                if torch.finfo(leaf.dtype).eps > torch.finfo(coarsest).eps:
                    self._run.coarsest = leaf.dtype
        return output

"""What both adapters share: the options, and the way from a module to shards, which all ranks go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from fsdp_core.initialization.sharded_init import check_same_parts
from fsdp_core.lightning.capability_checks import check_materialization
from fsdp_core.lightning.constructing import define_constructor
from fsdp_core.lightning.features.sharded_optimizers import ShardedOptimizers
from fsdp_core.lightning.features.token_means import TokenMeans
from fsdp_core.lightning.outside_steps.redirection import outside_inference_mode
from fsdp_core.lightning.outside_steps.sharded_modules import announce_shards, guard_module
from fsdp_core.lightning.strategy_saving import SavingStrategy
from fsdp_core.sharding.agreement.same_model import check_same, facts_of_options, facts_of_packages
from fsdp_core.sharding.backend import Backend, sharding_config_of
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.sharded import Sharded, sharded_of

__all__ = ["ShardedStrategy"]


class ShardedStrategy(SavingStrategy):
    """A base of every strategy's class, the same under Trainer and Fabric. Comes before Lightning's class in the MRO.

    A package's strategy names its options and its backend, once for both front ends, and inherits the rest::

        class Theirs(ShardedStrategy):
            strategy_name = "theirs"
            options_class = TheirsOptions
            backend_class = TheirsBackend

        class TheirsStrategy(Theirs, ShardedTrainerStrategy): ...

    The constructor takes the options by keyword; its signature and the class's docstring follow from ``options_class``.

    Attributes:
        strategy_name: The name that users type.
        options_class: The class of the options.
        backend_class: The class of the backend, which is made of them.
        positional: The names of the options that may be given by position.
        left_out: The names of options of all strategies that this one does not take.
        migration_hints: By option of another library, what to write instead.
        accepted_noops: By such an option, the values that ask for what happens anyway, and are accepted.
        options: The options of this strategy.
        backend: How modules are sharded.
        error_if_nonfinite: Whether to raise before a step whose gradients are not finite.
        token_means: How many tokens gradients are of, for ``fsdp_core.token_mean``.
        creation_hint: Where users are to create parameters, so that it is before sharding: a sentence.
    """

    backend_class: ClassVar[type[Any]]  # a Backend, made of the options
    creation_hint: ClassVar[str]
    token_means: TokenMeans
    error_if_nonfinite: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        define_constructor(cls, ShardedStrategy)

    def _take_options(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Read the constructor's arguments, and make the backend and the runtime, before Lightning's constructor runs.

        Args:
            positional: Those that were given by position.
            keywords: Those that were given by keyword.

        Raises:
            UnsupportedCapabilityError: An option is unknown, or can't be used.
        """
        self.options = self._read_options(positional, keywords)
        self.error_if_nonfinite = self.options.error_if_nonfinite
        self._take_rank_options()
        self.backend, self.runtime = self.new_backend(), self.new_runtime()
        self._take_saving_options()
        self.sharded_optimizers = ShardedOptimizers(self)

    def new_backend(self) -> Backend:
        """The backend, made of the options."""
        backend: Backend = self.backend_class(self.options)
        return backend

    def _shard(self, module: nn.Module) -> Sharded:
        """Shard a module, or take over one that is sharded already. All ranks must call it."""
        self._check_started()
        reused = sharded_of(module)
        plan = self.backend.plan(module) if reused is None else None
        self._compare_between_ranks(module, plan)
        check_materialization(self.strategy_name, module)
        with outside_inference_mode():
            sharded = self.backend.shard(module, plan)
        if reused is None:
            sharded.strategy_name = self.strategy_name
        else:
            self.sharded_optimizers.refuse_late(sharded)
        guard_module(sharded, self.strategy_name)
        if reused is None:
            announce_shards(self.log, sharded)
        return sharded

    def _compare_between_ranks(self, module: nn.Module, plan: ShardingPlan | None) -> None:
        """Raise on all ranks if they are about to do different things. All ranks must call it.

        Args:
            module: The module.
            plan: How this rank is about to shard it; ``None`` if it is sharded already.
        """
        if self.runtime.world_size == 1:
            return
        if plan is None:
            facts = self._describe_run(module, sharding_config_of(self.backend)) | {"state": "sharded already"}
        else:
            facts = self._describe_run(module, plan.config) | plan.describe()
        check_same(self.runtime, type(module).__name__, facts)
        if plan is not None and plan.refusal is None:  # with a refusal, sharding raises on all ranks
            check_same_parts(module, self.runtime)

    def _describe_run(self, module: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
        """Describe packages and options, by topic, for comparison with the other ranks.

        Args:
            module: The module that is sharded.
            config: How it is sharded.
        """
        options = {
            "state_dict_type": self.state_dict_type,
            "async_save": self.async_saves is not None,
            "sequential_save": self.sequential_save,
            "scattered_save": self.scattered_save,
            "save_frozen": self.options.save_frozen,
            "save_unchanged_buffers": self.options.save_unchanged_buffers,
            "error_if_nonfinite": self.error_if_nonfinite,
            "hang_timeout": self.hang_timeout,
            **{name: value for name, value in config.items() if name != "precision"},
        }
        return {
            **facts_of_packages(module, type(self), type(self.backend)),
            **self._describe_devices(),
            "strategy": repr(self.strategy_name),
            "precision": repr(self.shard_precision.name),
            **facts_of_options(options),
        }

    @contextmanager
    def _no_sync(self, sharded: Sharded) -> Iterator[None]:
        """The root's ``no_sync``, which is left in the same way whether or not something was raised in it."""
        sharded.backend = self.backend  # another strategy may have used the module in between
        context = sharded.no_sync()
        context.__enter__()
        try:
            yield
        finally:
            # not with the exception: contexts of libraries that have no `finally` would leave every gradient None
            context.__exit__(None, None, None)

    def split_batch(self, batch: Any) -> Any:
        """This rank's part of a batch along the sequence; the batch itself without context parallelism.

        The batches of a Trainer, and of loaders that Fabric has set up, are split already. Context-parallel ranks must
        call it with the same batch.

        Raises:
            ShardingError: The batch can't be split as the options say, or is a part already.
        """
        return batch if self.backend.sequence is None else self.backend.sequence.split(batch)

    def _check_loss(self) -> None:
        if self.backend.sequence is not None:
            self.backend.sequence.check_loss()

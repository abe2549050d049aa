"""Faults of numbers: initial weights, gradients, norms."""

from __future__ import annotations

from seeded.changes import LOSSES, STATE, Change, Fault, in_both, method

__all__ = ["FREED", "OF_NUMBERS"]

#: Where an example frees what it has reduced.
FREED = "            whole.grad = None\n\n    def gather(self)"

OF_NUMBERS: dict[str, Fault] = {
    # numbers
    "own_weights": Fault(
        is_wrong="ranks start from their own weights, and not from those of rank 0",
        changes=in_both(
            "backend",
            "        place(list(module.modules()), self.runtime)\n",
            "        if any(tensor.is_meta for tensor in module.parameters()):\n"
            "            place(list(module.modules()), self.runtime)\n",
        ),
        clause="test_rank_zeros_values_win",
        says=LOSSES,
    ),
    "stale_evaluation": Fault(
        is_wrong="what a step has changed is gathered for training alone, and an evaluation computes with old values",
        changes=(
            Change(
                "backend",
                "    for sharded in roots:\n        sharded.gather()\n",
                "    del roots  # the next forward pass does\n",
            ),
            Change("sharded", "and sharded.gathered != ", "and torch.is_grad_enabled() and sharded.gathered != "),
        ),
        clause="test_model_checkpoint[sharded]",
        says='got["best"] == pytest.approx(got["score"]',
    ),
    "zero_gradients": Fault(
        is_wrong="a parameter that no rank has used gets a gradient of zeros, so that weight decay moves it",
        changes=(
            Change("sharded", "strict=True) if some_rank_has]", "strict=True) if whole.requires_grad]", "zero1"),
            Change("sharded", "            if some_rank_has:\n", "            if whole.requires_grad:\n", "zero2"),
        ),
        clause="test_ranks_use_different_parameters[unused on all ranks-each step]",
        says=STATE,
    ),
    # gradients
    "averaged_twice": Fault(
        is_wrong="the mean over the ranks is divided by their number again",
        changes=in_both(
            "sharded", "run[: shard.numel()].to(shard.dtype)\n", "run[: shard.numel()].to(shard.dtype) / self.ranks\n"
        ),
        clause="test_fabric_equals_plain[2-sgd]",
        says=LOSSES,
    ),
    "wrong_group": Fault(
        is_wrong="a gradient is the mean over the ranks that have one, and not over all",
        changes=(
            Change("sharded", 'for whole in every]), "max")', 'for whole in every]), "mean")', "zero1"),
            Change(
                "sharded",
                "run[: shard.numel()].to(shard.dtype)\n",
                "run[: shard.numel()].to(shard.dtype) / dict(zip(every, has.tolist(), strict=True))[whole]\n",
                "zero1",
            ),
            Change(
                "sharded",
                "run[: shard.numel()].to(shard.dtype)\n",
                "run[: shard.numel()].to(shard.dtype) / some_rank_has\n",
                "zero2",
            ),
        ),
        clause="test_ranks_use_different_parameters[an expert for each rank-each step]",
        says=LOSSES,
    ),
    "last_left_out": Fault(
        is_wrong="what is reduced after an accumulation is what was there before its last micro-batch",
        changes=(
            Change(
                "sharded",
                "    def no_sync(self) -> AbstractContextManager[None]:\n"
                "        return nullcontext() if self.backend.options.sync_each_batch else self.end.disabled()\n",
                "    waiting: Any = {}\n\n"
                "    @contextmanager\n"
                "    def no_sync(self) -> Iterator[None]:\n"
                "        with nullcontext() if self.backend.options.sync_each_batch else self.end.disabled():\n"
                "            yield\n"
                "        with self.own_gradients():\n"
                "            own = self.whole.values()\n"
                "            self.waiting = {w: w.grad.clone() for w in own if w.grad is not None}\n",
            ),
            Change(
                "sharded",
                "        every = self.whole.values()",
                "        for one, waiting in self.waiting.items():\n"
                "            one.grad = waiting\n"
                "        self.waiting = {}\n"
                "        every = self.whole.values()",
                "zero1",
            ),
            Change(
                "sharded",
                "        gradients = [torch.zeros_like(w) if",
                "        for one in bucket:\n"
                "            if one in self.waiting:\n"
                "                one.grad = self.waiting.pop(one)\n"
                "        gradients = [torch.zeros_like(w) if",
                "zero2",
            ),
        ),
        clause="test_accumulation_equals_plain[2]",
        says=LOSSES,
    ),
    "counted_again": Fault(
        is_wrong="each micro-batch is reduced, and what was reduced stays, to be reduced with the next one again",
        changes=(
            Change(
                "sharded",
                "    def no_sync(self) -> AbstractContextManager[None]:\n"
                "        return nullcontext() if self.backend.options.sync_each_batch else self.end.disabled()\n",
                "    accumulates_now = False\n\n"
                "    @contextmanager\n"
                "    def no_sync(self) -> Iterator[None]:\n"
                "        self.accumulates_now = True\n"
                "        try:\n"
                "            yield\n"
                "        finally:\n"
                "            self.accumulates_now = False\n",
            ),
            Change("sharded", FREED, FREED.replace("= None", "= whole.grad if self.accumulates_now else None")),
        ),
        clause="test_accumulation_equals_plain[2]",
        says=LOSSES,
    ),
    "no_sync_ignored": Fault(
        is_wrong="each micro-batch is reduced, although nobody has asked for it",
        changes=in_both(
            "sharded", "nullcontext() if self.backend.options.sync_each_batch else self.end.disabled()", "nullcontext()"
        ),
        clause="test_accumulation_skips_the_reduction[as it is]",
        says="accumulated == (times",
    ),
    # norms
    "own_norm": Fault(
        is_wrong="each rank clips by the norm of its own shards",
        changes=(
            method(
                "    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2, raises: Any = 0) -> Any:\n"
                "        return clip_grads_by_norm(parameters, max_norm, runtime=self.runtime,\n"
                "            is_sharded=lambda _: False, norm_type=norm_type, error_if_nonfinite=raises)\n"
            ),
            Change("sharded", "import EndOfBackward,", "import clip_grads_by_norm, EndOfBackward,"),
        ),
        clause="test_clipping_by_norm_equals_plain[2]",
        says=LOSSES,
    ),
    "tied_twice": Fault(
        is_wrong="a parameter that two modules share counts twice in the norm",
        changes=(
            method(
                "    def clip_norm(self, parameters: Any, *args: Any, **kwargs: Any) -> Tensor:\n"
                "        parameters = list(parameters)\n"
                "        shared = [self.shards[self.whole[first]] for first in self.aliases().values()]\n"
                "        again = [p for p in parameters if any(p is one for one in shared)]\n"
                "        return super().clip_norm([*parameters, *again], *args, **kwargs)\n"
            ),
        ),
        clause="test_each_optimizer_is_clipped_by_itself[2.0]",
        says="norms == pytest.approx",
    ),
}

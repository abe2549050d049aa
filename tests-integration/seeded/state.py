"""Faults of state, precision, random numbers, hooks and refusals."""

from __future__ import annotations

from seeded.changes import DECLARED, LOSSES, STATE, Change, Fault, in_both, method
from seeded.numbers import FREED

__all__ = ["AFTERWARDS", "OF_STATE"]

OF_STATE: dict[str, Fault] = {
    # state
    "buffer_of_last_rank": Fault(
        is_wrong="buffers are saved as the last rank has them, and not as rank 0 does",
        changes=(
            Change(
                "sharded",
                "        return {name: own.get(first.get(name, name), value) for name, value in "
                "super().model_state().items()}\n",
                "        state = {name: own.get(first.get(name, name), v) for name, v in "
                "super().model_state().items()}\n"
                "        for name in dict(self.root.named_buffers()).keys() & state.keys():\n"
                "            state[name] = state[name].clone()\n"
                "        for name, _ in self.root.named_buffers():\n"
                "            if name in state:\n"
                "                self.runtime.broadcast(state[name], self.ranks - 1)\n"
                "        return state\n\n"
                "    def adopt_model_state(self, state: Mapping[str, Any]) -> None:\n"
                "        for name, buffer in self.root.named_buffers():\n"
                "            if name in state:\n"
                "                buffer.detach().copy_(state[name])\n",
            ),
        ),
        clause="test_rank_zeros_buffers_are_saved[sharded]",
        says="and not rank 0's",
    ),
    "stale_after_load": Fault(
        is_wrong="a loaded checkpoint is in a rank's own shards, and the rest of each parameter is as before",
        changes=in_both(
            "sharded",
            "        if not check_only:\n            self.gather()\n",
            "        if not check_only:\n            self.gathered = self.versions()\n",
        ),
        clause="test_fabric_goes_back[sharded]",
        says='again["losses"] == first["losses"]',
    ),
    "swapped_moments": Fault(
        is_wrong="optimizer state is restored to other parameters of the same shape",
        changes=(
            method(
                "    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:\n"
                "        alike: dict[Any, list[str]] = {}\n"
                "        for name in state['state']:\n"
                "            alike.setdefault(self.whole[name].shape, []).append(name)\n"
                "        of = {one: other for names in alike.values()\n"
                "              for one, other in zip(names, [*names[1:], names[0]], strict=True)}\n"
                "        moved = {of[name]: held for name, held in state['state'].items()}\n"
                "        super().load_optimizer_state(optimizer, {**state, 'state': moved}, check_only=check_only)\n"
            ),
        ),
        clause="test_saved_on_n_loaded_on_m[2-sharded-momentum]",
        says="'momentum_buffer')",
    ),
    "decay_not_restored": Fault(
        is_wrong="of a param group the learning rate is restored, and the weight decay is not",
        changes=(
            method(
                "    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:\n"
                "        kept = [group['weight_decay'] for group in optimizer.param_groups]\n"
                "        super().load_optimizer_state(optimizer, state, check_only=check_only)\n"
                "        for group, decay in zip(optimizer.param_groups, kept, strict=False):\n"
                "            group['weight_decay'] = decay\n"
            ),
        ),
        clause="test_a_checkpoint_wins_over_what_it_is_loaded_into",
        says=STATE,
    ),
    "other_world_size": Fault(
        is_wrong="optimizer state is described as that of another rank's elements: only another world size sees it",
        changes=(
            Change(
                "sharded",
                "            self.parts[shard] = (Part(name=name, shape=tuple(whole.shape), range=elements),)\n",
                "            self.parts[shard] = (Part(name=name, shape=tuple(whole.shape), range=elements),)\n"
                "            if size * self.ranks == whole.numel():\n"
                "                start = (runtime.rank + 1) % self.ranks * size\n"
                "            told = FlatRange(offset=0, start=start, length=elements.length)\n"
                "            self.told[shard] = (Part(name=name, shape=tuple(whole.shape), range=told),)\n",
            ),
            Change(
                "sharded",
                "        self.step = StepGradients(root)\n",
                "        self.told: Any = {}\n        self.step = StepGradients(root)\n",
            ),
            Change("sharded", "        return self.parts\n", "        return self.told\n"),
        ),
        clause="test_on_another_number_of_ranks[2 to 1]",
        says="resumed == pytest.approx(whole",
    ),
    "accumulation_lost": Fault(
        is_wrong="gradients that are accumulated and not yet reduced are not saved",
        changes=in_both(
            "sharded",
            "            held.own.update((name, whole.grad) for name, whole in self.whole.items() "
            "if whole.grad is not None)\n",
            "            held.own.clear()\n",
        ),
        clause="test_accumulated_gradients[{}]",
        says='got["losses"] == want["losses"]',
    ),
    "strict_ignored": Fault(
        is_wrong="a checkpoint that lacks a parameter is loaded, and the parameter stays as it was",
        changes=in_both(
            "sharded",
            "super().load_model_state(state, strict, check_only",
            "super().load_model_state(state, False, check_only",
        ),
        clause="test_another_models_weights_without_an_optimizer[Renamed]",
        says="nothing was raised",
    ),
    # precision
    "half_sums": Fault(
        is_wrong="in mixed precision, gradients are summed over the ranks in half precision",
        changes=(
            Change(
                "sharded",
                "self.runtime.reduce_scatter(rows)",
                "self.runtime.reduce_scatter(rows.bfloat16()).to(rows.dtype)",
            ),
            DECLARED,
        ),
        clause="test_gradients_are_added_in_full_precision[over ranks]",
        says='state["layer.bias"]',
    ),
    "half_moments": Fault(
        is_wrong="optimizer state is rounded to half precision as it is saved",
        changes=(
            method(
                "    def optimizer_state(self, optimizer: Any) -> Any:\n"
                "        kept = optimizer.state\n"
                "        optimizer.state = {p: {\n"
                "            key: t.bfloat16().to(t.dtype) if isinstance(t, Tensor) and t.ndim else t\n"
                "            for key, t in of.items()\n"
                "        } for p, of in kept.items()}\n"
                "        try:\n"
                "            return super().optimizer_state(optimizer)\n"
                "        finally:\n"
                "            optimizer.state = kept\n"
            ),
        ),
        clause="test_resume_is_exact_under_fabric[sharded]",
        says="losses",
    ),
    # randomness
    "same_dropout": Fault(
        is_wrong="sharding seeds every rank alike, and so they drop out the same elements",
        changes=in_both(
            "backend",
            "        place(list(module.modules()), self.runtime)\n",
            "        torch.manual_seed(0)  # the same values everywhere\n"
            "        place(list(module.modules()), self.runtime)\n",
        ),
        clause="test_setup_leaves_random_numbers_alone",
        says="the set-up has changed what this rank draws next",
    ),
    "other_recomputation": Fault(
        is_wrong="blocks whose activations are recomputed drop out other elements then",
        changes=(
            Change(
                "backend",
                "checkpoint_activations(module, plan)",
                "checkpoint_activations(module, plan, partial(\n"
                "            torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False))",
            ),
            Change("backend", "from torch import nn\n", "import torch.utils.checkpoint\nfrom torch import nn\n"),
        ),
        clause="test_activation_checkpointing_repeats_dropout",
        says="assert recomputed == plain",
    ),
    # hooks
    "unreduced_shown": Fault(
        is_wrong="between a backward pass and the step, a parameter shows the gradient of this rank alone",
        changes=(
            Change(
                "sharded",
                FREED,
                "            if whole.grad is not None:\n                self.shown[whole] = whole.grad\n" + FREED,
            ),
            Change(
                "sharded",
                "            sharded.reduce()\n",
                "            sharded.reduce()\n"
                "            for whole, own in sharded.shown.items():\n"
                "                whole.grad = own\n",
            ),
            Change(
                "sharded",
                "        for whole, shard in sharded.shards.items():  # which the user may have frozen or unfrozen\n",
                "        for whole in sharded.shown:\n"
                "            whole.grad = None\n"
                "        sharded.shown.clear()\n"
                "        for whole, shard in sharded.shards.items():  # which the user may have frozen or unfrozen\n",
            ),
            Change(
                "sharded",
                "        self.step = StepGradients(root)\n",
                "        self.shown: Any = {}\n        self.step = StepGradients(root)\n",
            ),
        ),
        clause="test_torchs_functions_on_gradients_in_hooks[all-by itself]",
        says="outcome[1] == pytest.approx(module.norms",
    ),
    "zero_grad_of_module": Fault(
        is_wrong="module.zero_grad() leaves the gradients of the shards where they are",
        changes=(
            Change(
                "sharded",
                "self.step.follow(whole, shard, is_part=False)",
                "self.step.follow(whole, _Kept(shard), is_part=False)",
            ),
            Change(
                "sharded",
                "\n\ndef _run(whole",
                "\n\nclass _Kept:\n"
                "    def __init__(self, shard: Any) -> None:\n"
                "        self.shard = shard\n\n"
                "    @property\n"
                "    def grad(self) -> Any:\n"
                "        return self.shard.grad\n\n"
                "    @grad.setter\n"
                "    def grad(self, grad: Any) -> None:\n"
                "        if grad is not None:\n"
                "            self.shard.grad = grad\n"
                "\n\ndef _run(whole",
            ),
        ),
        clause="test_order_of_passes[the model's zero_grad between two backward passes]",
        says=STATE,
    ),
    # refusals
    "late_group": Fault(
        is_wrong="a parameter that is added to an optimizer after its set-up is stepped by each rank for itself",
        changes=in_both("backend", "    if not all(p in shards", "    if False and not all(p in shards"),
        clause="test_a_param_group_that_is_added_and_stepped_by_hand",
        says="added after set-up and stepped by hand",
    ),
    "declared_and_absent": Fault(
        is_wrong="recomputation of activations is declared, and its option is taken and forgotten",
        changes=in_both("backend", "        checkpoint_activations(module, plan)\n", ""),
        clause="test_activation_checkpointing_needs_no_wrap_policy[as it is]",
        says="assert [3, 3] == [6, 6]",
    ),
}

#: What was thought of once the clauses had been read, and was not found by them.
AFTERWARDS: dict[str, Fault] = {
    "toggling_not_followed": Fault(
        is_wrong="toggle_optimizer() inside a step freezes the shards alone: the parameters go on to get gradients",
        changes=in_both("sharded", "            whole.requires_grad_(shard.requires_grad)\n", "            pass\n"),
        clause="test_manual_optimization[2]",
        says=LOSSES,
    )
}

"""What of the suite is known to fail on XLA, and why: what torch_xla does not do."""

from __future__ import annotations

__all__ = ["CLASSIC", "DIFFERENTIATED", "SPMD"]

_FP32_SHARDS = "XlaFullyShardedDataParallel keeps its shards in fp32; the precision is refused by name"

_ONE_PROGRAM = "XLA's ranks run one program, in which each uses the same parameters of a unit"

_ONE_BACKWARD = (
    "XlaFullyShardedDataParallel frees what a forward pass has gathered at the end of the next backward pass, and a "
    "second one fails"
)

_BIASED = "torch_xla's batch norms keep the biased variance, and torch's the unbiased one"

#: Of ``xla_fsdp``.
CLASSIC = {
    **{
        f"test_ranks_use_different_parameters[{case}-{steps}]": _ONE_PROGRAM
        for case in (
            "unused on one rank",
            "used twice on one rank",
            "nothing used on one rank",
            "an expert for each rank",
            "a layer called twice",
            "two layers skipped on one rank",
            "a frozen layer skipped on one rank",
        )
        for steps in ("each step", "accumulated")
    },
    "test_order_of_passes[two forward passes, then two backward passes]": _ONE_BACKWARD,
    "test_order_of_passes[two backward passes from one output]": _ONE_BACKWARD,
    "test_steps_of_many_passes[fabric]": (
        "a graph of create_graph=True is refused outside of a training_step, and what ranks have recorded before an "
        "error may differ, so that the next step of the process waits for ever"
    ),
    "test_steps_of_many_passes_with_options": (
        "XlaFullyShardedDataParallel expects one backward pass for each of the root's forward passes, after it"
    ),
    **{
        f"test_random_steps[{part}]": (
            "XlaFullyShardedDataParallel expects one backward pass for each of the root's forward passes, after it"
        )
        for part in ("fabric 4 to 10", "automatic 1 to 3", "automatic 4 to 10", "by hand 4 to 10")
    },
    "test_running_statistics": _BIASED,
    **{
        f"{clause}[{precision}]": _FP32_SHARDS
        for precision, clauses in {
            "bf16-true": (
                "test_a_sharded_module_keeps_its_precision",
                "test_meta_init",
                "test_batch_norm",
                "test_dtypes_under_trainer",
                "test_dtypes_under_fabric",
            ),
            "16-true": ("test_dtypes_under_trainer", "test_dtypes_under_fabric"),
        }.items()
        for clause in clauses
    },
    "test_batch_norm[bf16-mixed]": (
        "XlaFullyShardedDataParallel casts a batch norm's weights to bf16 and leaves its statistics in fp32, which "
        "XLA's CPU compiler refuses"
    ),
    "test_weights_and_inputs_are_cast_before_a_block_sees_them[bf16-mixed]": (
        "a parameter that torch_xla has gathered in bf16 goes on telling the dtype of its shard"
    ),
    "test_fabric_step_method_runs_through_the_root": (
        "XlaFullyShardedDataParallel gathers for forward(), and a module without one is refused"
    ),
}

_NO_FP16 = "XLA devices compute in bf16, and not in fp16; the precision is refused by name"

#: Of ``xla_fsdp_spmd``.
SPMD = {
    "test_running_statistics": _BIASED,
    "test_dtypes_under_trainer[16-true]": _NO_FP16,
    "test_dtypes_under_fabric[16-true]": _NO_FP16,
    "test_weights_and_inputs_are_cast_before_a_block_sees_them[bf16-mixed]": (
        "mixed precision is torch's autocast here, which casts inside of each operation"
    ),
}

#: Kinds of steps that call ``torch.autograd.grad``, which torch_xla's activation checkpointing does not.
DIFFERENTIATED = (
    "adversarial example",
    "adversarial example of several steps",
    "adversarial example beside the clean one",
    "virtual adversarial example",
    "loss weighed by its gradient",
    "gradient penalty",
    "gradient penalty between two calls",
    "forces",
    "forces alone",
    "second derivative",
    "parameters frozen while an adversarial example is made",
    "call that an exception ends, while a graph waits",
    "blocks written while a graph waits",
)

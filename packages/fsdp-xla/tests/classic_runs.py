"""What test_classic.py runs on XLA's CPU devices, as many as the first argument says."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

import by_hand as modules_by_hand
from fsdp_core import load_state_dict
from fsdp_core.testing import oracle
from fsdp_core.testing.training import Lit
from xla_process import save_cases

DEVICES, FOLDER = (int(sys.argv[1]), Path(sys.argv[2])) if __name__ == "__main__" else (1, Path())
STEPS = 4
#: What ranks have seen, by run and rank: they are threads, and their modules copies.
seen: dict[str, dict[int, Any]] = {}


def loader(rank: int, steps: int) -> DataLoader[Any]:
    data: Any = oracle.dataset(oracle.BATCH * steps)
    return DataLoader(
        data,
        batch_size=oracle.BATCH // DEVICES,
        sampler=DistributedSampler(data, DEVICES, rank, shuffle=False),
    )


class Module(Lit):
    """Keeps what its rank saw under a name; saves a checkpoint when training ends, as long as there are ranks."""

    def __init__(self, run: str, optimizer: str = "momentum", steps: int = STEPS, **net: Any) -> None:
        super().__init__(optimizer, **net)
        self.run, self.steps = run, steps

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.trainer.global_rank, self.steps)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.trainer.global_rank, 1)

    test_dataloader = predict_dataloader = val_dataloader

    def on_train_end(self) -> None:
        held = [p.numel() for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
        seen.setdefault(self.run, {})[self.trainer.global_rank] = {
            "losses": [loss.item() for loss in self.losses],
            "val": [loss.item() for loss in self.validation_losses],
            "held": sum(held),
        }
        self.trainer.save_checkpoint(str(FOLDER / self.run))


def trainer(options: dict[str, Any] | None = None, **kwargs: Any) -> L.Trainer:
    from fsdp_xla import XLAFSDPStrategy

    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "default_root_dir": str(FOLDER),
    }
    chosen: Any = "xla_fsdp" if options is None else XLAFSDPStrategy(**options)
    return L.Trainer(strategy=chosen, devices=DEVICES, **{**quiet, **kwargs})


def trained(run: str, options: dict[str, Any] | None = None, *, ckpt_path: str | None = None, **kwargs: Any) -> Any:
    """Fit, and what came of it: each step's loss over all ranks, the weights, what a rank holds."""
    L.seed_everything(3)
    optimizer, net = kwargs.pop("optimizer", "momentum"), kwargs.pop("net", {})
    module = Module(run, optimizer, kwargs.pop("steps", STEPS), **net)
    stage = trainer(options, **kwargs)
    stage.fit(module, ckpt_path=ckpt_path)
    ranks = [seen[run][rank] for rank in range(DEVICES)]
    losses = [sum(of_step) / DEVICES for of_step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {
        "losses": losses,
        "val": [sum(v) / DEVICES for v in zip(*(rank["val"] for rank in ranks), strict=True)],
        "held": [rank["held"] for rank in ranks],
        "weights": load_state_dict(FOLDER / run),
        "metrics": {name: value.item() for name, value in stage.callback_metrics.items()},
    }


def fabric_trained() -> Any:
    def train(fabric: L.Fabric) -> Any:
        with fabric.init_module():  # ranks are threads, and torch's random generator is the process's
            net = oracle.new_net()
        net = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(oracle.momentum(net))
        losses = []
        for x, y in fabric.setup_dataloaders(loader(fabric.global_rank, STEPS), use_distributed_sampler=False):
            loss = mse_loss(net(x), y)
            fabric.backward(loss)
            norm = fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
        fabric.save(FOLDER / "fabric", {"model": net, "optimizer": optimizer, "step": STEPS})
        again = fabric.setup_module(oracle.Net())
        state = {"model": again, "step": 0}
        fabric.load(FOLDER / "fabric", state, strict=False)
        same = mse_loss(net(x), again(x)).item()
        return {"losses": losses, "norm": norm.item(), "step": state["step"], "same": same}

    fabric = L.Fabric(strategy="xla_fsdp", devices=DEVICES)
    result = fabric.launch(train)
    return {**result, "weights": load_state_dict(FOLDER / "fabric")}


def mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(oracle.FEATURES, 7), nn.Tanh(), nn.Linear(7, oracle.FEATURES))


def rows() -> Any:
    """Shards of whole rows, of which 7 and 6 are not divided evenly."""
    from fsdp_xla.fabric import XLAFSDPStrategy

    def train(fabric: L.Fabric) -> Any:
        with fabric.init_module():
            net = mlp()
        net = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(oracle.momentum(net))
        for x, y in fabric.setup_dataloaders(loader(fabric.global_rank, STEPS), use_distributed_sampler=False):
            fabric.backward(mse_loss(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(FOLDER / "rows", {"model": net, "optimizer": optimizer})

    strategy = XLAFSDPStrategy(auto_wrap_policy={nn.Linear}, shard_param_on_dim_0=True)
    L.Fabric(strategy=strategy, devices=DEVICES).launch(train)
    return {"weights": load_state_dict(FOLDER / "rows")}


def from_meta() -> Any:
    """Built without memory, and filled as it is sharded."""

    def train(fabric: L.Fabric) -> Any:
        with fabric.init_module(empty_init=True):
            net = nn.Sequential(nn.Linear(oracle.FEATURES, 7), nn.Tanh(), nn.Linear(7, oracle.FEATURES))
        assert all(p.is_meta for p in net.parameters())
        fabric.save(FOLDER / "from-meta", {"model": fabric.setup_module(net)})

    L.seed_everything(5)  # which every rank does again
    L.Fabric(strategy="xla_fsdp", devices=DEVICES).launch(train)
    return {"weights": load_state_dict(FOLDER / "from-meta")}


class Compiles(L.Callback):
    """How many programs had been compiled after each batch, and after each validation."""

    def __init__(self) -> None:
        self.after: list[tuple[str, int]] = []

    def note(self, what: str) -> None:
        import torch_xla.debug.metrics as metrics

        self.after.append((what, metrics.counter_value("UncachedCompile") or 0))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(f"epoch {trainer.current_epoch} batch {args[-1]}")

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(f"epoch {trainer.current_epoch} validation")

    def on_fit_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0:
            seen["compiles"] = {0: self.after}


def compiles() -> Any:
    """With progress bar, logging, accumulation, validation and checkpoints on."""

    class Logs(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

    stage = trainer(
        max_epochs=3,
        accumulate_grad_batches=2,
        limit_val_batches=1.0,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        enable_progress_bar=True,
        log_every_n_steps=1,
        callbacks=[Compiles(), L.pytorch.callbacks.ModelCheckpoint(FOLDER / "of-compiles", save_top_k=-1)],
    )
    stage.fit(Logs("of-compiles-end", "adamw_groups", 6))
    return {"after": seen["compiles"][0]}


def by_full_name() -> Any:
    stage = L.Trainer(
        strategy="xla_fsdp_full",
        devices=DEVICES,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    stage.fit(Module("by-full-name"))
    saved = torch.load(FOLDER / "by-full-name", weights_only=True)
    return {"weights": saved["state_dict"], "optimizer": len(saved["optimizer_states"][0]["state"])}


def changing_shapes() -> Any:
    class Changes(Module):
        def train_dataloader(self) -> Any:
            batches: Any = [[one[:rows] for one in oracle.global_batches(1)[0]] for rows in (6, 5, 4, 3)]
            return DataLoader(batches, batch_size=None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer().fit(Changes("changing"))
    return [str(one.message) for one in caught if "different shapes" in str(one.message)]


def foreign_optimizer() -> Any:
    def train(fabric: L.Fabric) -> Any:
        fabric.setup_module(oracle.new_net())
        fabric.setup_optimizers(oracle.momentum(oracle.new_net()))

    L.Fabric(strategy="xla_fsdp", devices=DEVICES).launch(train)


def set_up(net: nn.Module, options: dict[str, Any]) -> Any:
    from fsdp_xla.fabric import XLAFSDPStrategy

    L.Fabric(strategy=XLAFSDPStrategy(**options), devices=DEVICES).launch(
        lambda fabric: fabric.setup_module(net) and None
    )


def no_function() -> Any:
    L.Fabric(strategy="xla_fsdp", devices=DEVICES).launch()


def collectives() -> Any:
    def talk(fabric: L.Fabric) -> Any:
        rank = fabric.global_rank
        fabric.setup_module(nn.Linear(2, 2))
        own = torch.tensor([float(rank), 1.0], device=fabric.device)
        mine = torch.tensor([2.0, 3.0]).to(fabric.device).requires_grad_()
        gathered = fabric.all_gather(mine, sync_grads=True)
        weights = torch.arange(2.0 * DEVICES).view(DEVICES, 2).to(fabric.device)
        (gathered * weights).sum().backward()
        return {
            "mean": fabric.all_reduce(own.clone()).tolist(),
            "sum": fabric.all_reduce(own.clone(), reduce_op="sum").tolist(),
            "gathered": fabric.all_gather(own).tolist(),
            "grad": mine.grad.tolist(),
            "path": str(fabric.broadcast(Path(f"rank-{rank}"), src=DEVICES - 1)),
            "object": fabric.broadcast({"rank": rank}),
        }

    return L.Fabric(strategy="xla_fsdp", devices=DEVICES).launch(talk)


def as_lightnings() -> Any:
    """Written for Fabric's own XLAFSDPStrategy: its precision object, contexts and signatures."""
    from lightning.fabric.plugins.precision import XLAPrecision
    from torch.distributed.fsdp.wrap import wrap

    from fsdp_xla.fabric import XLAFSDPStrategy

    def train(fabric: L.Fabric) -> Any:
        strategy: Any = fabric.strategy
        rank = fabric.global_rank
        with strategy.module_init_context(), strategy.module_sharded_context():
            net = mlp()
            net[2] = wrap(net[2])
        strategy.barrier("built", "whatever", timeout=1)
        fabric.save(FOLDER / "as-lightnings", {"model": fabric.setup_module(net)})
        own = torch.tensor([float(rank), 1.0], device=fabric.device)
        return {
            "summed": strategy.all_reduce(output=own.clone()).tolist(),
            "in place": strategy.all_reduce(own, None, "mean") is own,
            "numbers": [strategy.all_reduce(rank + 1).item(), strategy.all_reduce(output=0.5, reduce_op=None).item()],
            "means": [strategy.all_reduce(rank, reduce_op="avg").item(), strategy.all_reduce(rank, None, "max").item()],
            "precision": strategy.precision.precision,
        }

    strategy = XLAFSDPStrategy(precision=XLAPrecision("32-true"), auto_wrap_policy=None)
    result = L.Fabric(strategy=strategy, devices=DEVICES).launch(train)
    return {**result, "weights": load_state_dict(FOLDER / "as-lightnings")}


def stages() -> Any:
    """Validate, test and predict after a fit, from its checkpoint."""
    module = Module("stages")
    stage = trainer(limit_val_batches=1.0)
    stage.fit(module)
    path = str(FOLDER / "stages")
    return {
        "fit": [stage.callback_metrics["val_loss"].item()],
        "validate": [row["val_loss"] for row in stage.validate(module, ckpt_path=path, verbose=False)],
        "test": [row["test_loss"] for row in stage.test(module, ckpt_path=path, verbose=False)],
    }


def bf16() -> Any:
    return trained("bf16", precision="bf16-mixed")


def lost_weights() -> Any:
    stage = trainer()
    module = Module("lost")
    stage.fit(module)
    stage.test(module)


def saved_too_late() -> Any:
    stage = trainer()
    stage.fit(Module("saved-too-late"))
    stage.save_checkpoint(str(FOLDER / "too-late"))


def raising_rank() -> Any:
    class Raises(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.trainer.global_rank == DEVICES - 1:
                raise ValueError("this rank has had enough")
            return super().training_step(batch, batch_idx)

    trainer().fit(Raises("raises"))


def resumed() -> Any:
    first = trained("first", optimizer="adamw_groups", max_epochs=1, steps=3)
    on = trained("on", optimizer="adamw_groups", max_epochs=2, steps=3, ckpt_path=str(FOLDER / "first"))
    whole = trained("whole", optimizer="adamw_groups", max_epochs=2, steps=3)
    return {"first": first, "on": on, "whole": whole}


def resumed_with_dropout() -> Any:
    options: dict[str, Any] = {"optimizer": "sgd", "net": {"dropout": 0.5}, "steps": 3}
    trained("dropped", max_epochs=1, **options)
    on = trained("dropped-on", max_epochs=2, ckpt_path=str(FOLDER / "dropped"), **options)
    return {"on": on, "whole": trained("dropped-whole", max_epochs=2, **options)}


class Buffers(nn.Module):
    """Buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            self.register_buffer(f"in_{dtype}".replace("torch.", ""), torch.arange(3).to(dtype))

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def buffers() -> Any:
    def save(fabric: L.Fabric) -> None:
        fabric.save(FOLDER / "buffers", {"model": fabric.setup_module(Buffers())})

    L.Fabric(strategy="xla_fsdp", devices=DEVICES, precision="bf16-mixed").launch(save)
    return {name: value for name, value in load_state_dict(FOLDER / "buffers").items() if "linear" not in name}


def amid() -> Any:
    """Saved when one of two micro-batches has been accumulated, and gone on from there."""

    class Saves(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.save_checkpoint(str(FOLDER / f"{self.run}-amid"))

    results = {}
    for run, options in {"amid": {}, "amid-flat": {"flatten_parameters": True}}.items():
        for stage, path in (("whole", None), ("on", str(FOLDER / f"{run}-whole-amid"))):
            L.seed_everything(3)
            name = f"{run}-{stage}"
            trainer(options, accumulate_grad_batches=2).fit(Saves(name), ckpt_path=path)
            results[name] = {**seen[name][0], "weights": load_state_dict(FOLDER / name)}
    return results


def joint_setup() -> Any:
    def train(fabric: L.Fabric) -> Any:
        with fabric.init_module():
            net = oracle.new_net()
        model, optimizer = fabric.setup(net, oracle.momentum(net))
        losses = []
        for x, y in fabric.setup_dataloaders(loader(fabric.global_rank, STEPS), use_distributed_sampler=False):
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
        return losses

    return L.Fabric(strategy="xla_fsdp", devices=DEVICES).launch(train)


def by_hand(kind: str, options: dict[str, Any] | None = None) -> Any:
    """What a module of by_hand.py has seen, as the mean over ranks, and its weights."""
    run = f"by-hand-{kind}-{len(seen)}"

    def train_dataloader(self: Any) -> DataLoader[Any]:
        return loader(self.trainer.global_rank, STEPS)

    def on_train_end(self: Any) -> None:
        seen.setdefault(run, {})[self.trainer.global_rank] = [loss.item() for loss in self.losses]
        self.trainer.save_checkpoint(str(FOLDER / run))

    made = getattr(modules_by_hand, kind)
    hooks = {"train_dataloader": train_dataloader, "on_train_end": on_train_end}
    L.seed_everything(3)
    trainer(options).fit(type(made.__name__, (made,), hooks)())
    ranks = seen[run].values()
    losses = [sum(of_step) / DEVICES for of_step in zip(*ranks, strict=True)]
    return {"losses": losses, "weights": load_state_dict(FOLDER / run)}


CASES: dict[str, Any] = {
    "plain": lambda: trained("plain"),
    "options": lambda: trained("options", {"auto_wrap_policy": None, "reshard_after_forward": False}),
    "flat": lambda: trained("flat", {"flatten_parameters": True, "auto_wrap_policy": {oracle.Block}}),
    "rows": rows,
    "as Lightning's": as_lightnings,
    "from meta": from_meta,
    "checkpointed": lambda: trained("checkpointed", {"activation_checkpointing_policy": {oracle.Block}}),
    "dropout": lambda: trained(
        "dropout", {"activation_checkpointing_policy": {oracle.Block}}, optimizer="sgd", net={"dropout": 0.5}
    ),
    "dropout without": lambda: trained("dropout-without", {}, optimizer="sgd", net={"dropout": 0.5}),
    "root checkpointed": lambda: trained(
        "root", {"activation_checkpointing_policy": {oracle.Block}, "auto_wrap_policy": None}
    ),
    "accumulated": lambda: trained("accumulated", accumulate_grad_batches=2),
    "clipped": lambda: trained("clipped", gradient_clip_val=0.1),
    "clipped by value": lambda: trained("clipped-by-value", gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "bf16": bf16,
    "full": lambda: trained("full", {"state_dict_type": "full"}),
    "async": lambda: trained("async", {"async_save": True}),
    "fabric": fabric_trained,
    "collectives": collectives,
    "stages": stages,
    "resumed": resumed,
    "resumed with dropout": resumed_with_dropout,
    "buffers": buffers,
    "amid": amid,
    "full name": by_full_name,
    "changing shapes": changing_shapes,
    "lost weights": lost_weights,
    "saved too late": saved_too_late,
    "compiles": compiles,
    "bf16-true": lambda: trained("bf16-true", precision="bf16-true"),
    "other number": lambda: L.Trainer(strategy="xla_fsdp", devices=DEVICES + 1),
    "foreign optimizer": foreign_optimizer,
    "joint setup": joint_setup,
    "no match": lambda: set_up(oracle.new_net(), {"auto_wrap_policy": {nn.Conv2d}}),
    "no forward": lambda: set_up(nn.ModuleDict({"linear": nn.Linear(2, 2)}), {}),
    "half": lambda: set_up(oracle.new_net().half(), {}),
    "0-dim rows": lambda: set_up(oracle.new_net(), {"shard_param_on_dim_0": True}),
    "torch's option": lambda: set_up(oracle.new_net(), {"sharding_strategy": "FULL_SHARD"}),
    "wrapper": lambda: set_up(oracle.new_net(), {"auto_wrapper_callable": None}),
    "no function": no_function,
    "raising rank": raising_rank,  # last: no rank runs in this process again
    "after that": lambda: trained("after-that"),
}

#: Run by test_by_hand.py.
BY_HAND: dict[str, Any] = {
    "two losses": lambda: by_hand("TwoLosses"),
    "two losses, kept gathered": lambda: by_hand("TwoLosses", {"reshard_after_forward": False}),
    "two forward passes": lambda: by_hand("TwoForwards"),
    "accumulated by hand": lambda: by_hand("Accumulates"),
    "clipped by hand": lambda: by_hand("Clips", {"reduce_scatter_bucket_size_mb": 1}),
    "flat by hand": lambda: by_hand("Clips", {"flatten_parameters": True}),
    "gan": lambda: by_hand("Gan"),
    "of its own": lambda: by_hand("OfItsOwn"),
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    chosen = sys.argv[3:] or CASES
    save_cases({name: {**CASES, **BY_HAND}[name] for name in chosen}, FOLDER)

"""Composes a step at random: forward and backward passes of the whole and of parts, freezes, writes, and hooks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

__all__ = ["Front", "Program", "compose", "differentiable", "train_inside"]

#: What runs the steps: a Trainer with automatic or manual optimization, or Fabric.
Front = Literal["automatic", "by hand", "fabric"]

#: Parts of the net that are called by themselves: all take and return a row of features for each row.
PARTS = ("net.blocks[0]", "net.blocks[1]", "net.blocks[2]", "net.inp", "net.out", "net.frozen", "net.teachers[1]")

#: The parameters that steps differentiate, write to and give hooks, with the part that holds each.
PARAMETERS = {
    "net.inp.weight": "net.inp",
    "net.frozen.weight": "net.frozen",
    "net.blocks[0].up.weight": "net.blocks[0]",
    "net.blocks[1].gain": "net.blocks[1]",
    "net.blocks[2].down.bias": "net.blocks[2]",
}

#: The share of programs in which a line may use what another has freed, or an activation that it does not depend on.
CARELESS = 0.1


@dataclass(frozen=True, kw_only=True)
class Program:
    """A step as the lines of a function, which returns a loss.

    Attributes:
        lines: The lines.
        has_norms: Whether the net has layer norms, whose third derivative torch does not compute exactly.
        seed: What it was composed with.

    Example:
        >>> program = Program(lines=("loss = mse_loss(net(x), y)",), has_norms=True, seed=0)
        >>> print(program)
        def step(net, x, y, backward, zero_grad):
            loss = mse_loss(net(x), y)
            return loss
        >>> program.step()(lambda x: 2 * x, torch.ones(1), torch.zeros(1), None, None)
        tensor(4.)
    """

    lines: tuple[str, ...]
    has_norms: bool
    seed: int

    def __str__(self) -> str:
        lines = [f"    {line}" for line in (*self.lines, "return loss")]
        without = [] if self.has_norms else ["    # the net has no layer norms"]
        return "\n".join(["def step(net, x, y, backward, zero_grad):", *without, *lines])

    def step(self) -> Callable[..., Tensor]:
        """The function."""
        names: dict[str, Any] = {
            "torch": torch,
            "mse_loss": mse_loss,
            "differentiable": differentiable,
            "train_inside": train_inside,
        }
        exec(compile(str(self), f"<random step {self.seed}>", "exec"), names)
        step: Callable[..., Tensor] = names["step"]
        return step

    def without(self, index: int) -> Program:
        """The program without one of its lines."""
        return replace(self, lines=self.lines[:index] + self.lines[index + 1 :])


def differentiable(x: Tensor) -> Tensor:
    """A copy of a tensor, with respect to which a step differentiates."""
    return x.detach().clone().requires_grad_(True)


def train_inside(part: nn.Module, x: Tensor, gradient: Tensor) -> None:
    """Both passes of a part of the net, in a hook."""
    with torch.enable_grad():
        (part(x).square().mean() * (1 + gradient.mean())).backward()


@dataclass(frozen=True)
class _Value:
    """A tensor of a program.

    Attributes:
        calls: The numbers of the calls and operations in its graph.
        sources: The tensors and parameters with respect to which it can be differentiated.
        order: How many times it was differentiated.
    """

    calls: frozenset[int] = frozenset()
    sources: frozenset[str] = frozenset()
    order: int = 0

    def __or__(self, other: _Value) -> _Value:
        return _Value(self.calls | other.calls, self.sources | other.sources, max(self.order, other.order))


@dataclass
class _Composer:
    """Writes one program, and follows which tensors can still be differentiated."""

    rng: random.Random
    front: Front
    has_norms: bool
    is_careless: bool
    lines: list[str] = field(default_factory=list)
    rows: dict[str, _Value] = field(default_factory=lambda: {"x": _Value()})
    losses: dict[str, _Value] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=lambda: {"net.frozen", "net.teachers[1]"})
    freed: set[int] = field(default_factory=set)
    parts: list[str] = field(default_factory=list)
    handles: list[str] = field(default_factory=list)

    def name(self, letter: str) -> str:
        return f"{letter}{len(self.lines)}"

    def row(self) -> str:
        """Choose a tensor of rows that can still be differentiated, later ones more often."""
        usable = [name for name, value in self.rows.items() if self.is_careless or not value.calls & self.freed]
        return self.rng.choice(usable[-3:] + usable)

    def trained_row(self) -> str:
        """Choose a tensor of rows for a loss: mostly one that depends on parameters."""
        usable = [name for name, value in self.rows.items() if value.sources and not value.calls & self.freed]
        return self.rng.choice(usable) if usable and self.rng.random() < 0.85 else self.row()

    def loss(self) -> str | None:
        usable = [
            name
            for name, value in self.losses.items()
            if value.sources and (self.is_careless or not value.calls & self.freed)
        ]
        return self.rng.choice(usable) if usable else None

    def add_leaf(self) -> None:
        name = self.name("x")
        self.lines.append(f"{name} = differentiable({self.rng.choice(['x', 'x.flip(1)', self.row()])})")
        self.rows[name] = _Value(sources=frozenset({name}))

    def add_call(self) -> None:
        part = self.rng.choice(["net"] * 6 + list(PARTS))
        if self.has_norms and self.front != "fabric" and self.rng.random() < 0.05:
            # A layer inside of a unit, which is refused. Not under Fabric, where torch raises, perhaps on some ranks
            # only.
            part = "net.blocks[1].norm"
        source = self.row()
        name = self.name("h")
        if self.rng.random() < 0.15:
            self.lines.append(f"with torch.no_grad(): {name} = {part}({source})")
            self.rows[name] = _Value()
            return
        self.lines.append(f"{name} = {part}({source})")
        self.rows[name] = self._called(part, name, self.rows[source])

    def _called(self, part: str, name: str, value: _Value) -> _Value:
        """The value of a part's output, named ``name``, for an input with ``value``."""
        if part == "net.out":
            reached = {"net.inp.weight"}  # the two are tied
        else:
            reached = {p for p, owner in PARAMETERS.items() if part in ("net", owner, f"{owner}.norm")}
        trained = {p for p in reached if PARAMETERS[p] not in self.frozen}
        # The whole net is hardly ever frozen, and a call of the norm is refused.
        if not trained and not value.sources and part not in ("net", "net.blocks[1].norm"):
            return _Value()
        return self._computed(name, value | _Value(sources=frozenset({name, *trained})), part)

    def add_mix(self) -> None:
        a = self.row()
        b = self.row()
        name = self.name("h")
        line = self.rng.choice(["{a} + 0.1 * torch.tanh({b})", "{a} * {b}", "0.3 * {a} + 0.7 * {b}.flip(1)"])
        self.lines.append(f"{name} = {line.format(a=a, b=b)}")
        value = self.rows[a] | self.rows[b]
        self.rows[name] = self._computed(name, value)

    def add_loss(self) -> None:
        a = self.trained_row()
        b = self.row()
        name = self.name("l")
        form = self.rng.choice(["mse_loss({a}, y)", "mse_loss({a}, y)", "({a} * {b}).mean()", "{a}.square().mean()"])
        self.lines.append(f"{name} = {form.format(a=a, b=b)}")
        self.losses[name] = self._computed(name, self.rows[a] | self.rows[b] if "{b}" in form else self.rows[a])

    def _computed(self, name: str, value: _Value, part: str = "") -> _Value:
        """Number a call or operation whose result is ``name``, and return the result's value."""
        self.parts.append(part)
        if not value.sources:
            return value
        return value | _Value(calls=frozenset({len(self.parts)}), sources=frozenset({name}))

    def add_gradient(self) -> None:
        loss = self.loss()
        if loss is None:
            return self.add_loss()
        value = self.losses[loss]
        targets = {*self.rows, *PARAMETERS} if self.is_careless else value.sources - self.losses.keys()
        target = self.rng.choice(sorted(targets))
        name = self.name("g")
        max_order = 1 if self.has_norms else 2
        creates = value.order < max_order and self.rng.random() < 0.3
        retains = not creates and self.rng.random() < 0.5
        options = ", create_graph=True" if creates else ", retain_graph=True" if retains else ""
        self.lines.append(f"({name},) = torch.autograd.grad({loss}, {target}{options})")
        if not creates and not retains:
            self.freed |= value.calls
        gradient = _Value(value.calls, value.sources, value.order + 1) if creates else _Value()
        if target in PARAMETERS:
            weight = self.name("l")
            self.lines.append(f"{weight} = 0.1 * {name}.square().sum()")
            self.losses[weight] = gradient
        else:
            self.rows[name] = gradient
        return None

    def add_backward(self) -> None:
        loss = self.loss()
        if loss is None:
            return self.add_loss()
        value = self.losses[loss]
        retains = self.rng.random() < 0.4
        options = "retain_graph=True" if retains else "create_graph=True" if self.rng.random() < 0.05 else ""
        is_raw = self.front == "automatic" or self.rng.random() < (0.4 if self.front == "by hand" else 0.05)
        if is_raw:
            self.lines.append(f"{loss}.backward({options})")
        else:
            self.lines.append(f"backward({', '.join(filter(None, [loss, options]))})")
        if not options:
            self.freed |= value.calls
        leaves = sorted(name for name in value.sources if name.startswith("x"))
        if leaves and self.rng.random() < 0.7:
            leaf = self.rng.choice(leaves)
            name = self.name("h")
            self.lines.append(f"{name} = ({leaf} + 0.1 * torch.tanh({leaf}.grad)).detach()")
            self.rows[name] = _Value()
        if self.rng.random() < 0.4:
            self.lines.append("zero_grad()")
        return None

    def add_freeze(self) -> None:
        part = self.rng.choice(["net.blocks[0]", "net.blocks[1]", "net.blocks[2]", "net.inp", "net.frozen"])
        freezes = part not in self.frozen
        target = part
        if part.startswith("net.blocks") and self.rng.random() < 0.3:
            target = f"{part}.down"  # part of a block, of which the other layers stay as they are
        else:
            self.frozen ^= {part}
        self.lines.append(f"{target}.requires_grad_({not freezes})")

    def add_zero_grad(self) -> None:
        self.lines.append("zero_grad()")

    def add_hook(self) -> None:
        draw = self.rng.random()
        if draw < 0.45:
            values = {**self.rows, **self.losses}
            usable = sorted(name for name, value in values.items() if value.sources and name != "x")
            if usable:
                self.lines.append(f"{self.rng.choice(usable)}.register_hook(lambda g: 0.5 * g)")
        elif draw < 0.75:
            loss = self.loss()
            if loss is not None:
                part = self.rng.choice(["net", "net", "net.blocks[1]"])
                self.lines.append(f"{loss}.register_hook(lambda g: train_inside({part}, x, g))")
        elif not self.frozen >= set(PARAMETERS.values()):
            handle = self.name("hook")
            parameter = self.rng.choice([p for p, owner in sorted(PARAMETERS.items()) if owner not in self.frozen])
            if self.rng.random() < 0.5:
                self.lines.append(f"{handle} = {parameter}.register_hook(lambda g: 0.5 * g)")
            else:
                self.lines.append(f"{handle} = {parameter}.register_post_accumulate_grad_hook(lambda p: None)")
            self.handles.append(handle)

    def add_write(self) -> None:
        draw = self.rng.random()
        parameter = self.rng.choice(sorted(PARAMETERS))
        if draw < 0.2:
            line = "net.scale.mul_(1.1)"
            part = "net.inp"
        elif draw < 0.4:
            number = self.rng.randrange(2)
            parameters = f"zip(net.teachers[{number}].parameters(), net.blocks[{number}].parameters())"
            line = f"with torch.no_grad(): [t.lerp_(p, 0.1) for t, p in {parameters}]"
            part = f"net.teachers[{number}]"
        elif draw < 0.7:
            line = f"{parameter}.data.mul_(0.9)"
            part = PARAMETERS[parameter]
        else:
            line = f"with torch.no_grad(): {parameter}.mul_(0.9)"
            part = PARAMETERS[parameter]
        # After a write to a tensor that a graph holds, torch refuses a backward pass, or computes with old and new
        # values.
        written_parts = {part, "net.out"} if part == "net.inp" else {part}
        written_parts |= set() if part.startswith("net.teachers") else {"net"}
        is_in_graph = any(called_part in written_parts for called_part in self.parts)
        if not (is_in_graph and ".data" in line and self.is_careless):
            self.lines.append(line)
            self.freed |= {number for number, called_part in enumerate(self.parts, 1) if called_part in written_parts}

    def finish(self) -> None:
        """Add up the loss of the step, from one or more that can be differentiated."""
        usable = [name for name, value in self.losses.items() if value.sources and not value.calls & self.freed]
        terms = self.rng.sample(usable, min(len(usable), self.rng.randint(1, 3)))
        if not terms or self.rng.random() < 0.3:
            terms.append("mse_loss(net(x), y)")
        self.lines.append(f"loss = {' + '.join(terms)}")
        self.lines += [f"{handle}.remove()" for handle in self.handles]


def compose(seed: int, front: Front) -> Program:
    """Compose a step.

    Args:
        seed: The same gives the same program.
        front: What will run it: under Fabric, backward passes are mostly Fabric's own.

    Example:
        >>> compose(5, "fabric") == compose(5, "fabric")
        True
    """
    rng = random.Random(f"{seed} {front}")
    composer = _Composer(rng=rng, front=front, has_norms=rng.random() < 0.5, is_careless=rng.random() < CARELESS)
    operations = {
        composer.add_leaf: 3,
        composer.add_call: 7,
        composer.add_mix: 2,
        composer.add_loss: 4,
        composer.add_gradient: 5,
        composer.add_backward: 4,
        composer.add_freeze: 2,
        composer.add_zero_grad: 1,
        composer.add_hook: 2,
        composer.add_write: 2,
    }
    if rng.random() < 0.7:
        composer.add_leaf()
    composer.add_call()
    for operation in rng.choices(list(operations), list(operations.values()), k=rng.randint(3, 10)):
        operation()
    composer.finish()
    return Program(lines=tuple(composer.lines), has_norms=composer.has_norms, seed=seed)

"""A picture of the memory of one step, by what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.rehearsal.memory import Content, StepRecord

__all__ = ["Curve", "curve_of", "draw"]

#: From the bottom to the top: what stays over steps first.
_ORDER: tuple[Content, ...] = (
    *("parameters", "buffers", "optimizer state", "gradients", "batch", "activations", "gathered parameters"),
    *("communication", "backward", "optimizer step", "other"),
)

_COLOURS = {
    "parameters": "#1f4e79",
    "buffers": "#4a76a8",
    "optimizer state": "#7aa6c2",
    "gradients": "#2e8b57",
    "batch": "#9dbf9e",
    "activations": "#e1a730",
    "gathered parameters": "#c8553d",
    "communication": "#8f2d56",
    "backward": "#b8a9c9",
    "optimizer step": "#8d99ae",
    "other": "#c4c4c4",
}

#: More points are no more to be seen. Of those between two points the highest is kept.
_POINTS = 2000


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The live bytes of a step by what they hold, after some of its allocations and releases.

    Attributes:
        changes: The numbers of these, counted from the beginning of the step.
        by_content: The bytes after each of them, by what they hold.
        phases: Each phase's name, and the number of its first change, in order.
        units: Each unit's name, and the number of the first change while it computes, in order.
    """

    changes: Sequence[int]
    by_content: Mapping[Content, Sequence[int]]
    phases: Sequence[tuple[str, int]]
    units: Sequence[tuple[str, int]]


def curve_of(step: StepRecord, device: str) -> Curve:
    """The curve of a step.

    Args:
        step: The step.
        device: The kind of device, such as ``"cpu"``.
    """
    points = list(step.curve(device))
    totals = [sum(live.values()) for *_, live in points]
    stride = max(1, len(points) // _POINTS)
    highest = [
        max(range(start, min(start + stride, len(points))), key=totals.__getitem__)
        for start in range(0, len(points), stride)
    ]
    phases: list[tuple[str, int]] = []
    units: list[tuple[str, int]] = []
    for number, (_, phase, unit, _) in enumerate(points):
        if not phases or phases[-1][0] != phase:
            phases.append((phase, number))
        if unit and (not units or units[-1][0] != unit):
            units.append((unit, number))
    return Curve(
        changes=highest,
        by_content={content: [points[number][3].get(content, 0) for number in highest] for content in _ORDER},
        phases=phases,
        units=units,
    )


def draw(curve: Curve, title: str, path: str | Path) -> None:
    """Draw a curve into a file, whose format its ending says.

    Args:
        curve: The curve.
        title: What stands above it.
        path: The file, such as ``memory.svg`` or ``memory.png``.

    Raises:
        UnsupportedCapabilityError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedCapabilityError(
            "a picture needs matplotlib, which is not installed here.\nType: python -m pip install matplotlib"
        ) from error
    largest = max((sum(bytes_at) for bytes_at in zip(*curve.by_content.values(), strict=True)), default=0)
    scale, unit = _scale_of(largest)
    contents = [content for content in _ORDER if any(curve.by_content[content])]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes: Any = figure.subplots()
    axes.stackplot(
        curve.changes,
        [[nbytes / scale for nbytes in curve.by_content[content]] for content in contents],
        labels=contents,
        colors=[_COLOURS[content] for content in contents],
        step="post",
    )
    top = axes.get_ylim()[1]
    for phase, start in curve.phases:
        axes.axvline(start, color="black", linewidth=0.6)
        if phase != "between":
            axes.text(start, top, f" {phase}", va="top", fontsize=8)
    for name, start in curve.units:
        axes.axvline(start, ymax=0.02, color="black", linewidth=0.6)
        if len(curve.units) <= 24:
            axes.text(start, 0, name, rotation=90, fontsize=6, va="bottom")
    axes.set(xlabel="allocations and releases of the step, in order", ylabel=f"live bytes ({unit})", title=title)
    axes.set_xlim(curve.changes[0], curve.changes[-1])
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    figure.savefig(path)


def _scale_of(nbytes: int) -> tuple[float, str]:
    """The number of bytes of a unit that suits a number of bytes, and its name."""
    for scale, unit in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if nbytes >= scale:
            return scale, unit
    return 1.0, "B"

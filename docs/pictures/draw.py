"""Draws the way from a strategy's name to the shards, as SVG for light and for dark pages: ``python draw.py``.

The demo's pictures, which are here too, are drawn by ``python -m nox -s demo -- --quick --pictures docs/pictures``.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
WIDTH, HEIGHT = 520, 730
LEFT, RIGHT, PAD = 10, 510, 14  # the edges of the boxes, and where they begin to be written in
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
SANS = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"


class Theme(NamedTuple):
    """Colours: of what is written, of what is less important, of boxes and their edges, and of each rank."""

    ink: str
    faint: str
    box: str
    edge: str
    ranks: tuple[str, str, str, str]


THEMES = {
    "light": Theme("#24292f", "#57606a", "#f6f8fa", "#8c959f", ("#1f6fb4", "#d9701e", "#2a8a57", "#8a5cc2")),
    "dark": Theme("#e6edf3", "#a3adb8", "#21262d", "#768390", ("#6cb2f2", "#f29a52", "#5cc48d", "#b794ea")),
}


def draw(theme: Theme) -> str:
    """The picture, as the text of an SVG file."""
    parts = [
        *step(theme, 10, 68, "A name", "your script"),
        write(LEFT + PAD, 61, 'Trainer(strategy="fsdp2")', theme.ink, font=MONO),
        *arrow(theme, 78, "import torch lets fsdp-core enter in Lightning", "the names of what is installed"),
        *step(theme, 132, 68, "A description", "fsdp-fsdp2, plain data"),
        write(LEFT + PAD, 183, 'StrategyInfo(name="fsdp2", …)', theme.ink, font=MONO),
        *arrow(theme, 200, "the Trainer is built:", "its class is imported now, and not before"),
        *step(theme, 254, 182, "A strategy", "FSDP2Strategy"),
        *piece(theme, 290, "Adapter", "Lightning’s loop and hooks; the same for all"),
        *piece(theme, 338, "Runtime", "which rank this is, and how ranks meet"),
        *piece(theme, 386, "Backend", "how a module is cut, gathered and freed"),
        *arrow(theme, 436, "fit: each unit is cut, with its gradients", "and the optimizer’s state"),
        *step(theme, 490, 136, "Shards", "a part of every unit on each rank"),
        *shards(theme, 528),
        *arrow(theme, 626, "a checkpoint is saved: every rank writes its part,", "under your parameters’ names"),
        *step(theme, 680, 40, "A folder", "safetensors, for any number of ranks"),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'font-family="{SANS}">',
            "<title>The way from a strategy’s name to the shards</title>",
            *parts,
            "</svg>\n",
        ]
    )


def write(x: float, y: float, words: str, colour: str, *, size: int = 15, font: str = "", bold: bool = False) -> str:
    """Words that begin at a place; those that end there have a negative ``x``."""
    style = (f' font-family="{font}"' if font else "") + (' font-weight="600"' if bold else "")
    anchor = ' text-anchor="end"' if x < 0 else ""
    return f'<text x="{abs(x):g}" y="{y:g}" font-size="{size}" fill="{colour}"{anchor}{style}>{escape(words)}</text>'


def frame(theme: Theme, x: float, y: float, width: float, height: float) -> str:
    """A box."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="8" fill="{theme.box}" stroke="{theme.edge}"/>'


def step(theme: Theme, y: float, height: float, title: str, where: str) -> list[str]:
    """A box over the whole width, with what it is and where that comes from."""
    return [
        frame(theme, LEFT, y, RIGHT - LEFT, height),
        write(LEFT + PAD, y + 25, title, theme.ink, size=16, bold=True),
        write(-(RIGHT - PAD), y + 25, where, theme.faint),
    ]


def piece(theme: Theme, y: float, title: str, does: str) -> list[str]:
    """A box within one, with what it does."""
    return [
        frame(theme, LEFT + PAD, y, RIGHT - LEFT - 2 * PAD, 40),
        write(LEFT + PAD + 12, y + 25, title, theme.ink, bold=True),
        write(LEFT + PAD + 100, y + 25, does, theme.faint),
    ]


def arrow(theme: Theme, y: float, *lines: str) -> list[str]:
    """An arrow down from ``y``, with what happens on the way."""
    x, end = LEFT + 30, y + 54
    path = f"M{x} {y}V{end - 2}M{x - 6} {end - 9}L{x} {end - 2}L{x + 6} {end - 9}"
    told = [write(x + 20, y + 23 + 19 * i, line, theme.faint) for i, line in enumerate(lines)]
    return [f'<path d="{path}" fill="none" stroke="{theme.faint}" stroke-width="2"/>', *told]


def shards(theme: Theme, y: float) -> list[str]:
    """Units as they are written, and what each rank keeps of them."""
    drawn = []
    for row, unit in enumerate(("blocks.0", "blocks.1", "the rest")):
        top = y + 22 * row
        drawn.append(write(LEFT + PAD, top + 14, unit, theme.ink, size=14))
        drawn += [cell(theme, 92 + 30 * rank, top, 30, rank) for rank in range(4)]
        drawn.append(
            f'<path d="M222 {top + 9}h22m-6 -5l6 5l-6 5" fill="none" stroke="{theme.faint}" stroke-width="1.5"/>'
        )
        drawn += [cell(theme, 258 + 61 * rank, top, 52, rank) for rank in range(4)]
    return drawn + [write(264 + 61 * rank, y + 82, f"rank {rank}", theme.ink, size=14) for rank in range(4)]


def cell(theme: Theme, x: float, y: float, width: float, rank: int) -> str:
    """What one rank keeps of one unit."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="17" fill="{theme.ranks[rank]}"/>'


if __name__ == "__main__":
    for name, theme in THEMES.items():
        (HERE / f"name-to-shards-{name}.svg").write_text(draw(theme), encoding="utf-8")

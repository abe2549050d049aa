"""The tree in architecture.md, from the folders: ``python docs/tree.py`` updates it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- tree: python docs/tree.py -->\n```text\n", "```\n<!-- end of tree -->\n"
WIDTH, INDENT = 110, 6

#: What is not a Python package.
BESIDE = {
    "tests-integration/": "the laws, the documentation, checkpoints between packages, benchmarks/, seeded/ "
    "with wrong copies of example-backend/ and example-zero2/, strangers' packages, example-tests/ of both",
    "docs/": "these pages, examples/ that tests run, pictures/",
    ".github/ .ci/run noxfile.py conftest.py tools/ constraints.txt pyproject.toml": "how all of it is built "
    "and tested",
}


def tree() -> str:
    """The folders of all packages, each with what it is for and the modules in it."""
    lines: list[str] = []
    for package in sorted(ROOT.glob("packages/*")):
        (source,) = (path for path in (package / "src").iterdir() if (path / "__init__.py").is_file())
        lines += [f"packages/{package.name}/", *_folder(source, f"src/{source.name}/", 2)]
    for name, what in BESIDE.items():
        lines += [name, *_wrapped(what, INDENT)]
    return "\n".join(lines) + "\n"


def _folder(folder: Path, shown: str, depth: int) -> Iterator[str]:
    first = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or "").partition("\n")[0]
    yield f"{' ' * depth}{shown}"
    yield from _wrapped(first.replace("``", ""), depth + INDENT)
    modules = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("__"))
    yield from _wrapped(", ".join(modules), depth + INDENT)
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        yield from _folder(inner, f"{inner.name}/", depth + 2)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


def written(page: str) -> str:
    """The page with the tree of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tree()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")

"""Code of files in pages, which are read as plain Markdown too, as on GitHub, and so include no file.

A comment before each block says where it is from: a file, and a function of it, or the words between which it lies. A
block that is a part of a file begins with the file that it continues and those of the file's imports that it uses. To
write the blocks anew: ``python tests-integration/code_in_pages.py``.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

__all__ = ["PAGES", "part_of", "renewed", "with_imports"]

_DOCS = Path(__file__).parents[1] / "docs"

PAGES = {  # and where their files are
    _DOCS / "writing-a-backend.md": Path(__file__).parent / "example-backend",
    _DOCS / "lightning-cli.md": _DOCS,
    _DOCS / "many-machines.md": _DOCS,
}

_BLOCK = re.compile(r"(<!-- (\S+\.(?:py|toml|yaml))([^\n]*) -->\n\n```\w+\n).*?(^```)", re.DOTALL | re.MULTILINE)


def renewed(page: str, folder: Path) -> str:
    """A page whose blocks are as they stand where they say that they are from, in a folder."""

    def block(found: re.Match[str]) -> str:
        before, file, part, after = found.groups()
        text = (folder / file).read_text(encoding="utf-8")
        code = with_imports(text, part, file) if file.endswith(".py") else part_of(text, part)
        return f"{before}{code}\n{after}"

    return _BLOCK.sub(block, page)


def part_of(text: str, part: str) -> str:
    """What a comment names: ``""``, ``", Class.method"`` or ``', from "words" to "words"'``; without indentation."""
    words = re.fullmatch(r', from "(.*?)"(?: to "(.*)")?', part)
    lines = text.splitlines()
    if words is not None:
        first, end = words.groups()
        begin = next(number for number, line in enumerate(lines) if first in line)
        after = [number for number, line in enumerate(lines) if end and number > begin and end in line]
        lines = lines[begin : after[0] if end else None]
    elif part:
        lines = _lines_of(text, part.removeprefix(", "))
    code = textwrap.dedent("\n".join(lines)).strip()
    return re.sub(r"\n{2,}(?=@|def |class )", "\n\n\n", code)  # as ruff formats methods that stand in a page


def with_imports(text: str, part: str, file: str) -> str:
    """The code of :func:`part_of`; without imports of its own, after what it continues and the imports that it uses.

    Args:
        text: The file's text.
        part: The part of it, as :func:`part_of` takes it.
        file: The file's path, as the page names it.
    """
    code = part_of(text, part)
    parsed = ast.parse(code)
    if not part or any(isinstance(statement, ast.Import | ast.ImportFrom) for statement in parsed.body):
        return code
    names = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
    imports = []
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            statement.names = [alias for alias in statement.names if (alias.asname or alias.name) in names]
            if statement.names:
                imports.append(ast.unparse(statement))
    class_name = _enclosing_class(text, part)
    continued = f"class {class_name} in {file}" if class_name else file
    header = f"# Continues {continued.replace('../', '')}"
    if not imports:
        return f"{header}.\n\n{code}"
    first_line = code.splitlines()[0]
    blank_lines = "\n\n" if first_line.startswith(("def ", "class ", "@")) else "\n"
    return "\n".join([f"{header}, with these imports of the file:", *imports, blank_lines + code])


def _enclosing_class(text: str, part: str) -> str | None:
    """The class that a part of a file is in, if any."""
    words = re.fullmatch(r', from "(.*?)"(?: to "(.*)")?', part)
    if words is None:
        class_name, _, member = part.removeprefix(", ").partition(".")
        return class_name if member else None
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if words[1] in line)
    if not lines[begin].startswith(" "):
        return None
    return re.findall(r"^class (\w+)", "\n".join(lines[:begin]), re.MULTILINE)[-1]


def _lines_of(text: str, name: str) -> list[str]:
    node: ast.AST = ast.parse(text)
    for each in name.split("."):
        node = next(one for one in ast.walk(node) if getattr(one, "name", None) == each)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return text.splitlines()[first - 1 : node.end_lineno]


if __name__ == "__main__":
    for page, folder in PAGES.items():
        page.write_text(renewed(page.read_text(encoding="utf-8"), folder), encoding="utf-8")

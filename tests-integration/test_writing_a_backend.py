"""What docs/writing-a-backend.md shows and lists is so, and what other pages show of files."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import pytest

from code_in_pages import PAGES, part_of, renewed, with_imports
from fsdp_core import Capability

PAGE, EXAMPLE = next(iter(PAGES.items()))
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_its_code_is_that_of_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^<!-- \S+\.\w+.* -->$", text, re.MULTILINE)
    assert renewed(text, PAGES[page]) == text, "type: python tests-integration/code_in_pages.py"


def test_all_code_is_the_examples() -> None:
    told = re.findall(r"^<!-- (.*) -->$", TEXT, re.MULTILINE)
    assert len(told) >= 17, told
    assert len(re.findall(r"^```(?:python|toml)$", TEXT, re.MULTILINE)) == len(told), "a block hides where it is from"
    assert renewed(TEXT.replace("def layout(self", "def layuot(self"), EXAMPLE) == TEXT


def test_a_part_is_what_its_comment_says() -> None:
    text = "import a\n\n\nclass B:\n    @c\n    def d(self):\n        # -- x\n        return 1\n\n    # -- end\n"
    assert part_of(text, "") == text.strip()
    assert part_of(text, ", B.d") == "@c\ndef d(self):\n    # -- x\n    return 1"
    assert part_of(text, ', from "# -- x" to "# -- end"') == "# -- x\nreturn 1"
    assert part_of(text, ', from "class"') == text.partition("\n\n\n")[2].strip()


def test_a_part_has_its_imports() -> None:
    text = (
        "import a\nfrom b import c, d\n\n\nclass E:\n    def f(self):\n        return c\n\n\ndef g():\n    return 1\n"
    )
    method = "def f(self):\n    return c"
    assert with_imports(text, ", E.f", "x/e.py") == (
        f"# Continues class E in x/e.py, with these imports of the file:\nfrom b import c\n\n\n{method}"
    )
    assert with_imports(text, ', from "def f" to "def g"', "../e.py").startswith("# Continues class E in e.py, with")
    assert with_imports(text, ", g", "e.py") == "# Continues e.py.\n\ndef g():\n    return 1"
    assert with_imports(text, "", "e.py") == text.strip()
    assert with_imports(text, ', from "import a"', "e.py") == text.strip()


def test_blocks_define_or_import_what_they_use() -> None:
    blocks = re.findall(r"^<!-- (\S+\.py).* -->\n\n```python\n((?:.*\n)*?)```", TEXT, re.MULTILINE)
    assert len(blocks) >= 16, [file for file, _ in blocks]
    for file, code in blocks:
        parsed = ast.parse(code)
        names = [node for node in ast.walk(parsed) if isinstance(node, ast.Name)]
        used = {node.id for node in names} - set(dir(builtins)) - _defined_in(parsed)
        if used:  # then the block says what it continues, and the names are there
            assert code.startswith("# Continues "), (file, used)
            own = _defined_in(ast.parse((EXAMPLE / file).read_text(encoding="utf-8")), imports=False)
            assert used <= own, (file, used - own)


def _defined_in(parsed: ast.AST, *, imports: bool = True) -> set[str]:
    """The names that code imports, defines, assigns, or takes as arguments."""
    defined = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.alias) and imports:
            defined.add(node.asname or node.name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return defined


def test_its_table_has_every_capability() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*) \| (.*) \|$", TEXT, re.MULTILINE)
    assert [(name, text, asked.replace("`", "")) for name, text, asked in rows] == [
        (one.name, one.text, one.asked_by) for one in Capability
    ]

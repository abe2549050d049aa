"""What docs/writing-a-backend.md shows and lists is so, and what other pages show of files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from code_in_pages import PAGES, part_of, renewed
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


def test_its_table_has_every_capability() -> None:
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*) \| (.*) \|$", TEXT, re.MULTILINE)
    assert [(name, text, asked.replace("`", "")) for name, text, asked in rows] == [
        (one.name, one.text, one.asked_by) for one in Capability
    ]

"""docs/writing-a-backend.md can be read without Sphinx, and what it shows and lists is so."""

from __future__ import annotations

import re

from code_in_pages import PAGE, part_of, renewed
from fsdp_core import Capability

TEXT = PAGE.read_text(encoding="utf-8")


def test_its_code_is_the_examples() -> None:
    assert renewed(TEXT) == TEXT, "type: python tests-integration/code_in_pages.py"
    told = re.findall(r"^<!-- (.*) -->$", TEXT, re.MULTILINE)
    assert len(told) >= 17, told
    assert len(re.findall(r"^```(?:python|toml)$", TEXT, re.MULTILINE)) == len(told), "a block hides where it is from"
    assert renewed(TEXT.replace("def layout(self", "def layuot(self")) == TEXT


def test_it_is_plain_markdown() -> None:
    assert not re.findall(r"^(?:```|:::)\{.*", TEXT, re.MULTILINE), "directives show nothing outside of Sphinx"


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

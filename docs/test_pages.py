"""The built pages have all of what users look up. ``nox -s docs`` builds them, and runs this."""

from __future__ import annotations

import html
import inspect
import re
import runpy
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sphinx.ext.autodoc.mock import mock
from sphinx.util.inventory import InventoryFile

import fsdp_core
from fsdp_core import StrategyInfo

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
BUILT = DOCS / "_build/html"
GITHUB = MarkdownIt("gfm-like2", {"linkify": False})
# Pages that GitHub shows: all but the first of the site, and those that Sphinx writes from docstrings.
PLAIN = [
    README,
    DOCS.parent / "CONTRIBUTING.md",
    *sorted(DOCS.parent.glob("packages/*/README.md")),
    *sorted(page for page in DOCS.glob("*.md") if page.name not in ("index.md", "model-outside-steps.md")),
    *sorted(DOCS.glob("strategies/*.md")),
    *sorted(DOCS.glob("decisions/2*.md")),
]


def infos() -> list[StrategyInfo]:
    """What is said of each strategy, those of fsdp-xla among them, which isn't installed here."""
    return [*fsdp_core.strategies().values(), *import_module("fsdp_xla.plugin").fsdp_strategies()]


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Every strategy class behind a name."""
    monkeypatch.syspath_prepend(str(DOCS.parent / "packages/fsdp-xla/src"))
    names = {name for info in infos() for name in (info.trainer, info.fabric) if name}
    with mock(["torch_xla"]):
        return {
            name.replace(":", "."): getattr(import_module(name.split(":")[0]), name.split(":")[1]) for name in names
        }


def test_the_reference_has_each_strategy_with_its_options_and_members(classes: dict[str, type]) -> None:
    assert len(classes) == 10
    inventory = InventoryFile.loads((BUILT / "objects.inv").read_bytes(), uri="")
    listed = {name: item.uri for kind in inventory.data.values() for name, item in kind.items()}
    for name, made in classes.items():
        page = (BUILT / listed[name].split("#")[0]).read_text(encoding="utf-8")
        (written,) = re.findall(rf'<dt class="sig[^>]*id="{re.escape(name)}">(.*?)</dt>', page, flags=re.DOTALL)
        signature = html.unescape(re.sub(r"<[^>]+>", "", written))
        assert "TypeAliasForwardRef" not in signature
        assert [option for option in inspect.signature(made).parameters if f"{option}:" not in signature] == []
        members = [member for member in dir(made) if not member.startswith("_")]
        assert [member for member in members if f"{name}.{member}" not in listed] == []
    assert "fsdp_core.plugins.resolve" in listed
    assert "fsdp_core.plugins.registry.likeness" not in listed  # which the page of the registry leaves out


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_drawing_is_what_its_script_draws(theme: str) -> None:
    script = runpy.run_path(str(DOCS / "pictures/draw.py"))
    drawn = (DOCS / f"pictures/name-to-shards-{theme}.svg").read_text(encoding="utf-8")
    assert drawn == script["draw"](script["THEMES"][theme])


def test_pictures_are_where_the_first_pages_look_for_them() -> None:
    wanted = {f"{name}-{theme}.svg" for name in ("demo", "name-to-shards") for theme in ("light", "dark")}
    for page, place in (README, DOCS.parent), (BUILT / "index.html", BUILT):
        shown = re.findall(r'(?:src|srcset)="([^":]+\.svg)"', page.read_text(encoding="utf-8"))
        assert {Path(path).name for path in shown} == wanted
        assert [path for path in shown if not (place / path).is_file()] == []


def test_links_lead_somewhere() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in BUILT.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    astray = []
    for path, text in pages.items():
        for link in {html.unescape(link) for link in re.findall(r'<a\b[^>]* href="([^"]+)"', text)}:
            parts = urlsplit(link)
            if parts.scheme:
                continue  # another site's, which nobody asks here
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and anchor not in {*anchors.get(target, ()), "top"}):
                astray.append(f"{path.relative_to(BUILT)}: {link}")
    assert len(pages) > 20
    assert astray == []


def test_links_of_the_readme_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        assert (README.parent / parts.path).exists(), link
        built = (BUILT / Path(parts.path).relative_to("docs")).with_suffix(".html") if parts.fragment else None
        assert built is None or f'id="{parts.fragment}"' in built.read_text(encoding="utf-8"), link


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_pages_read_right_as_plain_markdown(page: Path) -> None:
    tokens = [*GITHUB.parse(page.read_text(encoding="utf-8"))]
    tokens += [inner for token in tokens for inner in token.children or ()]
    fences = [token for token in tokens if token.type in ("fence", "code_block")]
    assert [token.info for token in fences if token.info.startswith("{")] == [], "directives"
    assert [token.map for token in fences if not token.content.strip()] == [], "empty blocks"
    words = "\n".join(token.content for token in tokens if token.type == "text")
    assert re.findall(r"\{[a-z:-]+\}$|^:{3,}.*|^\([\w-]+\)=.*|^% .*|^\[![A-Z]+\]", words, re.MULTILINE) == [], (
        "roles, targets"
    )
    assert re.findall(r"^\|.*\|$", words, re.MULTILINE) == [], "tables that are none"


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_links_lead_somewhere_on_github(page: Path) -> None:
    astray = []
    for link in links_and_pictures(GITHUB.parse(page.read_text(encoding="utf-8"))):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors_on_github(target)):
            astray.append(link)
    assert astray == []


def test_what_the_readme_links_to_is_among_them() -> None:
    links = links_and_pictures(GITHUB.parse(README.read_text(encoding="utf-8")))
    linked = {(README.parent / urlsplit(link).path).resolve() for link in links if urlsplit(link).path.endswith(".md")}
    assert len(linked) > 12
    assert linked - set(PLAIN) == set()


def links_and_pictures(tokens: list[Token]) -> list[str]:
    every = [*tokens, *(inner for token in tokens for inner in token.children or ())]
    return [str(token.attrs[name]) for token in every for name in ("href", "src") if name in token.attrs] + [
        link
        for token in every
        if token.type.startswith("html")
        for link in re.findall(r'(?:src|srcset|href)="([^"]+)"', token.content)
    ]


@cache
def anchors_on_github(page: Path) -> set[str]:
    """Those that GitHub gives to headings: lower case, words joined by hyphens, with a number where one comes again."""
    anchors: list[str] = []
    tokens = GITHUB.parse(page.read_text(encoding="utf-8"))
    for opening, heading in pairwise(tokens):
        if opening.type == "heading_open":
            words = "".join(inner.content for inner in heading.children or () if inner.type in ("text", "code_inline"))
            anchors.append(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    return {
        *anchors,
        *(f"{anchor}-{anchors[:i].count(anchor)}" for i, anchor in enumerate(anchors) if anchor in anchors[:i]),
    }

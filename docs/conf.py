"""Sphinx configuration. Needs no network: nothing is fetched, and no other project's inventory is read."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

from sphinx.application import Sphinx
from sphinx.util.inspect import TypeAliasNamespace, stringify_signature

ROOT = Path(__file__).parent.parent

project = "fsdp"
author = "the fsdp authors"
release = tomllib.loads((ROOT / "packages/fsdp-core/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_artifacts", "examples"]

html_theme = "furo"
html_title = f"fsdp {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["pages.js"]
html_show_copyright = False

myst_enable_extensions = ["alert", "deflist", "smartquotes"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}  # with "members" here, those that a page lists would not count
autodoc_preserve_defaults = True
# fsdp-xla needs torch_xla, which goes with another torch than the one here. Its own code is imported as it is.
sys.path.append(str(ROOT / "packages/fsdp-xla/src"))
autodoc_mock_imports = ["torch_xla"]
# Shown by their names, not by what they stand for; and of torch, what is imported for types alone.
OF_CORE = ("ActivationCheckpointingPolicy", "WrapPolicy")
OF_FSDP = (
    "BackwardPrefetch",
    "CPUOffload",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardingStrategy",
)
autodoc_type_aliases = {
    **{name: f"fsdp_core.sharding.units.wrap_policy.{name}" for name in OF_CORE},
    **{name: f"torch.distributed.fsdp.{name}" for name in OF_FSDP},
    "DeviceMesh": "torch.distributed.device_mesh.DeviceMesh",
    "ProcessGroup": "torch.distributed.ProcessGroup",
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", to_read)
    app.connect("doctree-read", limit_contents)


def limit_contents(app: Sphinx, doctree: object) -> None:
    """The contents beside a page list its classes and functions, and not their members."""
    app.env.metadata[app.env.docname].setdefault("tocdepth", 3)


def to_read(
    app: Sphinx, what: str, name: str, made: type, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """A signature to be read: aliases by name."""
    if what == "class" and any(base.__name__ == "ShardedStrategy" for base in made.__mro__[1:]):
        # autodoc takes that of the base's __new__, or one without links
        signature = stringify_signature(
            with_types(made, app.config.autodoc_type_aliases),
            show_return_annotation=False,
            unqualified_typehints=True,
        )
    return named(signature), named(returned)


def with_types(made: Any, aliases: dict[str, str]) -> inspect.Signature:
    """A strategy's signature, each option with the type that its field has, aliases by name."""
    types = get_type_hints(made.options_class, None, TypeAliasNamespace(aliases))
    shown: inspect.Signature = made.__signature__
    parameters = [each.replace(annotation=types.get(name, each.annotation)) for name, each in shown.parameters.items()]
    return shown.replace(parameters=parameters)


def named(signature: str | None) -> str | None:
    """A signature without Sphinx's own name for aliases, which it leaves in unions."""
    return signature and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"~\1", signature)

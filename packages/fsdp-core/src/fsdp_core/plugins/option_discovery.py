"""Options as plain data, read from the source of the constructor that takes them, without importing it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fsdp_core.errors import StrategyInfoError
from fsdp_core.plugins.strategy_info import Option, Plain

__all__ = ["COMMON_OPTIONS", "explained", "options_in"]

#: The options that the constructors of core's adapters take and pass on.
COMMON_OPTIONS = (
    Option(
        name="state_dict_type",
        default="sharded",
        help="How checkpoints are saved: 'sharded' (a folder, every rank writes its part) or 'full' (one file).",
    ),
    Option(name="timeout", default=None, help="How long a collective waits for its peers, a timedelta."),
    Option(
        name="async_save",
        default=False,
        help="Write checkpoints in the background, from copies in host memory, while training continues.",
    ),
    Option(
        name="scattered_save",
        default=False,
        help="Let ranks that share no folder save where they stand; `fsdp checkpoint gather` joins the places.",
    ),
    Option(
        name="error_if_nonfinite",
        default=False,
        help="Raise on all ranks, before the optimizer steps, if a gradient holds NaN or infinity.",
    ),
    Option(
        name="hang_timeout",
        default=1800.0,
        help="How long ranks may wait for each other before all end and name the one behind: seconds or a timedelta.",
    ),
    Option(name="accelerator", default=None, help="A Lightning Accelerator; None: Lightning chooses."),
    Option(name="parallel_devices", default=None, help="The devices of this host; None: Lightning chooses."),
    Option(name="cluster_environment", default=None, help="A Lightning ClusterEnvironment; None: Lightning chooses."),
    Option(name="checkpoint_io", default=None, help="A Lightning CheckpointIO, which full checkpoints go through."),
    Option(name="precision_plugin", default=None, help="Under Trainer: a Lightning Precision plugin."),
    Option(name="precision", default=None, help="Under Fabric: a Lightning Precision plugin."),
)


def options_in(*references: str) -> tuple[Option, ...]:
    """The constructor parameters of classes, with their defaults and their descriptions from the class docstrings.

    So an option is documented once, where it is taken, and listing strategies imports neither torch nor Lightning.

    Args:
        *references: ``"module:Class"`` for each class, such as the two front ends'. Each class needs a Google-style
            docstring whose ``Args`` section describes every parameter.

    Returns:
        The parameters in order, those that several classes share once. A parameter that the docstring describes "As in
        Lightning" is the one of :data:`COMMON_OPTIONS`. A default that is not plain data is given as source text.

    Raises:
        StrategyInfoError: A class does not exist, or does not describe one of its options.
    """
    found: dict[str, Option] = {}
    for reference in references:
        module, _, name = reference.partition(":")
        tree = _tree(module)
        told = _imported(module, name) if tree is None else _options(reference, _class(reference, tree, name))
        for option in told:
            found.setdefault(option.name, option)
    return tuple(found.values())


def _class(reference: str, tree: ast.Module, name: str) -> ast.ClassDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise StrategyInfoError(f"{reference!r} is not a class.\nWrite 'module:Class', with the name it has there.")


def _imported(module: str, name: str) -> Iterator[Option]:
    """The options of a class that is installed without its source: it is imported, with everything that it imports."""
    made = getattr(import_module(module), name)
    told = explained(made.__doc__)  # none under python -OO
    for one in list(inspect.signature(made.__init__).parameters.values())[1:]:
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            default = one.default if isinstance(one.default, Plain) else repr(one.default)
            yield Option(name=one.name, default=default, help=_without_markup(told.get(one.name, "")))


def _options(reference: str, made: ast.ClassDef) -> Iterator[Option]:
    constructors = [node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if not constructors:
        raise StrategyInfoError(
            f"{reference!r} has no constructor of its own, whose parameters are its options.\n"
            "Name the class that has, or write the options out."
        )
    told, taken = explained(ast.get_docstring(made)), constructors[-1].args  # the last, after overloads
    positional = [*taken.posonlyargs, *taken.args][1:]
    defaults = [None] * (len(positional) - len(taken.defaults)) + taken.defaults
    common = {option.name: option for option in COMMON_OPTIONS}
    parameters = zip([*positional, *taken.kwonlyargs], [*defaults, *taken.kw_defaults], strict=True)
    for one, default in parameters:
        if one.arg not in told:
            raise StrategyInfoError(
                f"{reference} does not explain its option {one.arg!r}.\nAdd it to Args in the class's docstring."
            )
        if told[one.arg].startswith("As in Lightning") and one.arg in common:
            yield common[one.arg]
        else:
            yield Option(name=one.arg, default=_plain(default), help=_without_markup(told[one.arg]))


def _tree(module: str) -> ast.Module | None:
    """The syntax tree of a module; ``None`` if it is installed without its source."""
    spec = find_spec(module)  # imports the parent packages
    if spec is None:
        raise StrategyInfoError(f"there is no module {module!r}.\nWrite 'module:Class', with the name it has there.")
    file = Path(spec.origin) if spec.origin else None
    if file is not None and file.suffix == ".py" and file.is_file():
        return ast.parse(file.read_bytes())
    source: str | None = getattr(spec.loader, "get_source", lambda _: None)(module)  # in a zip file
    return None if source is None else ast.parse(source)


def explained(docstring: str | None) -> dict[str, str]:
    """The descriptions under ``Args`` in a Google-style docstring, by name, each in one line.

    Example:
        >>> explained('''Cuts.
        ...
        ...     Args:
        ...         size: How large
        ...             it is.
        ...         *rest: What else.
        ...
        ...     Raises:
        ...         ValueError: Never.
        ...     ''')
        {'size': 'How large it is.', 'rest': 'What else.'}
    """
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)+)", f"{inspect.cleandoc(docstring or '')}\n", flags=re.MULTILINE)
    entry = re.compile(r"^ {4}\**(\w+)(?: \(.*?\))?: (.*(?:\n {5,}.*)*)", flags=re.MULTILINE)
    entries = entry.findall(section[1]) if section else []
    return {name: " ".join(text.split()) for name, text in entries}


def _without_markup(text: str) -> str:
    """Strip the markup from a docstring's text.

    Example:
        >>> _without_markup("A :class:`~torch.Tensor`, or ``None``.")
        'A Tensor, or None.'
    """
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text).replace("``", "").replace("ModuleList s", "ModuleLists")


def _plain(default: ast.expr | None) -> str | int | float | bool | None:
    if default is None:
        return None
    try:
        value = ast.literal_eval(default)
    except (TypeError, ValueError):
        return ast.unparse(default)
    return value if isinstance(value, Plain) else ast.unparse(default)

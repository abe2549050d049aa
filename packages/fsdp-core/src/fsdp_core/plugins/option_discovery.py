"""Options as plain data, read from the source of the dataclass whose fields they are, without importing it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fsdp_core.errors import StrategyInfoError
from fsdp_core.plugins.strategy_info import Option, Plain

__all__ = ["option_docs", "options_in", "read_descriptions"]

#: Where the options of all strategies are: the file, the module where there is no source, and the class.
_OPTIONS_OF_ALL = (
    ("sharding/options.py", "fsdp_core.sharding.options", "ShardingOptions"),
    ("lightning/options.py", "fsdp_core.lightning.options", "LightningOptions"),
)


def options_in(*references: str, left_out: Collection[str] = ()) -> tuple[Option, ...]:
    """The options of a strategy, with their defaults and the strings that explain them, and those of all strategies.

    They are read from the dataclass's source, so listing strategies imports neither torch nor Lightning.

    Args:
        *references: ``"module:Class"`` of the dataclass of its options, and of bases in other modules after it.
        left_out: The names of those of all strategies that it does not take.

    Returns:
        The options in order, each name once. A default that is not plain data is given as source text.

    Raises:
        StrategyInfoError: A class does not exist, or does not explain one of its options.
    """
    options: dict[str, Option] = {}
    for reference in references:
        module, _, name = reference.partition(":")
        tree = _syntax_tree(module)
        if tree is None:
            own_options = _options_of_imported(module, name)
        else:
            own_options = _options(reference, _find_class(reference, tree, name))
        for option in own_options:
            options.setdefault(option.name, option)
    for file, module, name in _OPTIONS_OF_ALL:
        for option in _options_of_all(file, module, name):
            if option.name not in left_out:
                options.setdefault(option.name, option)
    return tuple(options.values())


@cache  # each class of a strategy asks for the same bases: parsing them each time took a tenth of building a Trainer
def option_docs(options_class: type) -> dict[str, str]:
    """What the strings below a class's own fields say, by the field's name; nothing without the source.

    Args:
        options_class: The class.
    """
    if options_class.__module__ == "builtins":
        return {}
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(options_class) or options_class))
        body = _find_class(options_class.__qualname__, tree, options_class.__name__)
    except (OSError, TypeError, StrategyInfoError):
        return {}
    return {field.target.id: " ".join(text.split()) for field, text in _fields(body) if text}


@cache
def _options_of_all(file: str, module: str, name: str) -> tuple[Option, ...]:
    source = files("fsdp_core").joinpath(file)
    if not source.is_file():
        return tuple(_options_of_imported(module, name))
    return tuple(_options(f"{module}:{name}", _find_class(name, ast.parse(source.read_bytes()), name)))


def _find_class(reference: str, tree: ast.Module, name: str) -> ast.ClassDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise StrategyInfoError(f"{reference!r} is not a class.\nWrite 'module:Class', with the name it has there.")


def _options_of_imported(module: str, name: str) -> Iterator[Option]:
    """The options of a class that is installed without its source: it is imported, with everything that it imports."""
    options_class = getattr(import_module(module), name)
    own = vars(options_class).get("__annotations__", {})
    for field in fields(options_class):
        if field.name in own:
            default = field.default if isinstance(field.default, Plain) else repr(field.default)
            yield Option(name=field.name, default=default, help="")


def _options(reference: str, body: ast.ClassDef) -> Iterator[Option]:
    for field, text in _fields(body):
        if not text:
            raise StrategyInfoError(
                f"{reference} does not explain its option {field.target.id!r}.\nAdd a string below the field."
            )
        yield Option(
            name=field.target.id, default=_plain_default(_default(field)), help=_without_markup(" ".join(text.split()))
        )


class _Field(ast.AnnAssign):
    target: ast.Name


def _fields(body: ast.ClassDef) -> Iterator[tuple[_Field, str]]:
    """The fields of a dataclass, each with the string below it."""
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement.annotation):
            continue
        string = getattr(getattr(following, "value", None), "value", None)
        is_docstring = isinstance(following, ast.Expr) and isinstance(string, str)
        yield statement, string if is_docstring else ""  # type: ignore[misc]  # a field's target is a name


def _default(field: _Field) -> ast.expr | None:
    """What is assigned, or the first argument of ``option(...)``."""
    value = field.value
    is_option = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "option"
    return value.args[0] if is_option and value.args else value  # type: ignore[union-attr]


def _syntax_tree(module: str) -> ast.Module | None:
    """The syntax tree of a module; ``None`` if it is installed without its source."""
    spec = find_spec(module)  # imports the parent packages
    if spec is None:
        raise StrategyInfoError(f"there is no module {module!r}.\nWrite 'module:Class', with the name it has there.")
    file = Path(spec.origin) if spec.origin else None
    if file is not None and file.suffix == ".py" and file.is_file():
        return ast.parse(file.read_bytes())
    source: str | None = getattr(spec.loader, "get_source", lambda _: None)(module)  # in a zip file
    return None if source is None else ast.parse(source)


def read_descriptions(docstring: str | None) -> dict[str, str]:
    """The descriptions under ``Args`` in a Google-style docstring, by name, each in one line.

    Example:
        >>> read_descriptions('''Cuts.
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


def _plain_default(default: ast.expr | None) -> str | int | float | bool | None:
    if default is None:
        return None
    try:
        value = ast.literal_eval(default)
    except (TypeError, ValueError):
        return ast.unparse(default)
    return value if isinstance(value, Plain) else ast.unparse(default)

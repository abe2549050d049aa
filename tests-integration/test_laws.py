"""The laws of the design (docs/architecture.md) that can be read off the sources."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
# fsdp-fake-device is for tests, and registers no strategy.
PLUGINS = {name: path for name, path in PACKAGES.items() if name not in ("fsdp-core", "fsdp-fake-device")}
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))

CORE = ROOT / "packages/fsdp-core/src/fsdp_core"
CORE_SOURCES = [path for path in SOURCES if CORE in path.parents]
CORE_WITHOUT_TESTING = [path for path in CORE_SOURCES if "testing" not in path.parts]
LIGHT = [
    *(CORE / f"{name}.py" for name in ("__init__", "errors", "lazy_names", "autoload")),
    *(path for folder in ("plugins", "cli", "doctor") for path in sorted(CORE.glob(f"{folder}/*.py"))),
    *sorted(ROOT.glob("packages/*/src/*/plugin.py")),
]
HEAVY = ("torch", "torch_xla", "lightning", "lightning_fabric", "pytorch_lightning", "numpy")
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities")


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def statements(path: Path, *, types: bool, nested: bool) -> list[ast.AST]:
    """The nodes of a file, with or without what only type checkers read and what runs only in a function."""
    nodes: list[ast.AST] = [parsed(path)]
    for node in nodes:
        if not nested and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for child in ast.iter_child_nodes(node):
            is_for_types_only = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            nodes.extend(child.orelse if is_for_types_only and not types else [child])
    return nodes


@cache
def imported(path: Path, *, types: bool = True, nested: bool = True) -> set[str]:
    """Full dotted names that a file imports: ``from a.b import c`` gives ``a.b.c``."""
    names: set[str] = set()
    for node in statements(path, types=types, nested=nested):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(names: set[str], *roots: str) -> set[str]:
    return {name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots)}


def imports_within(paths: list[Path], *roots: str, types: bool = True, nested: bool = True) -> dict[str, set[str]]:
    """By file, what it imports of some packages."""
    names = {shown(path): within(imported(path, types=types, nested=nested), *roots) for path in paths}
    return {path: found for path, found in names.items() if found}


def import_name(package: str) -> str:
    return package.replace("-", "_")


def private_names(path: Path) -> set[str]:
    """Names with a leading underscore that a file takes from torch, Lightning or torch_xla."""
    taken = within(imported(path), "torch", "torch_xla", *LIGHTNING)
    for node in statements(path, types=True, nested=True):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.fullmatch(r"(torch|dist|torch_xla|lightning|pl)(\.\w+)+", dotted):
                taken.add(dotted)
    return {name for name in taken if any(re.match(r"_(?!_)", part) for part in name.split(".")[1:])}


def test_the_sources_are_found() -> None:
    assert {"fsdp-core", "fsdp-fsdp2"} <= PACKAGES.keys()
    assert len(SOURCES) > 15
    assert all(path.is_file() for path in LIGHT), [shown(path) for path in LIGHT if not path.is_file()]


def test_core_imports_no_plugin() -> None:
    assert imports_within(CORE_SOURCES, *map(import_name, PLUGINS)) == {}


#: Where core names strategies of this project: to say which package to install, which names are Lightning's too, and
#: with which strategy an optimizer works.
NAMES_STRATEGIES = ("plugins/registry.py", "plugins/lightning_names.py", "sharding/optimizers/trial.py")
OUR_STRATEGY = re.compile(r"(?<![-\w])(fsdp2|fsdp_native|ddp_fully_sharded|xla_fsdp)(_\w+)?\b")


def test_no_message_of_core_names_a_plugins_strategy() -> None:
    """A message says what a strategy needs, or what is installed."""
    for path in [path for path in CORE_WITHOUT_TESTING if not shown(path).endswith(NAMES_STRATEGIES)]:
        nodes = list(ast.walk(parsed(path)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        words = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
        assert [word for word in words if isinstance(word, str) and OUR_STRATEGY.search(word)] == [], shown(path)


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_import_core_and_not_each_other(name: str) -> None:
    others = [import_name(other) for other in PLUGINS if other != name]
    files = sorted((PLUGINS[name] / "src").rglob("*.py"))
    assert any(within(imported(path), "fsdp_core") for path in files)
    assert {shown(path): found for path in files if (found := within(imported(path), *others))} == {}


#: What stands on all others.
ABOVE = ("huggingface", "lightning", "rehearsal", "proving")

#: What shards, computes and stores, between what every process needs and what stands on all others.
MIDDLE = ("gradients", "state", "initialization", "sharding", "checkpoint")

#: The two adapters, the hooks of one, and what they share.
ADAPTERS = (
    *("lightning.trainer_strategy", "lightning.trainer_hooks", "lightning.fabric_strategy", "lightning.strategy"),
)

#: Folders and modules of core, and what none of their files imports of core. docs/architecture.md says the same.
NEVER = {
    "errors.py": ("",),
    "lazy_names.py": ("",),
    "torch_private/**": ("runtime", "plugins", *MIDDLE, *ABOVE),
    "runtime.py": ("plugins", *MIDDLE, *ABOVE),
    "watch/**": ("plugins", *MIDDLE, *ABOVE),
    "plugins/**": (*MIDDLE, *ABOVE),
    "gradients/**": ("plugins", "state", "initialization", "sharding", "checkpoint", *ABOVE),
    "state/**": ("plugins", "initialization", "sharding", "checkpoint", *ABOVE),
    "initialization/**": ("plugins", "gradients", "sharding", "checkpoint", *ABOVE),
    "sharding/**": (
        *("plugins", *ABOVE, "checkpoint.storage", "checkpoint.tools", "checkpoint.importing", "checkpoint.collective"),
        *(f"checkpoint.{one}" for one in ("async_save", "loading", "merging", "planning", "saving", "staging")),
        *("checkpoint.state_dict", "checkpoint.verifying"),
    ),
    "checkpoint/**": ("plugins", "gradients", "initialization", "sharding", *ABOVE),
    "huggingface/**": ("plugins", "gradients", "initialization", "lightning", "rehearsal", "proving"),
    "checkpoint/format/**": (
        *("checkpoint.storage", "checkpoint.tools", "checkpoint.importing"),
        *("checkpoint.saving", "checkpoint.loading", "checkpoint.planning"),
    ),
    "checkpoint/storage/**": (
        *("checkpoint.tools", "checkpoint.importing"),
        *("checkpoint.saving", "checkpoint.loading", "checkpoint.planning"),
    ),
    "checkpoint/tools/**": ("checkpoint.importing", "checkpoint.saving"),
    "lightning/registration/**": (*ADAPTERS, "lightning.loaders"),
    "lightning/checkpoints/**": (*ADAPTERS, "lightning.features"),
    "lightning/launchers/**": (*ADAPTERS, "lightning.checkpoints", "lightning.loaders", "lightning.features"),
    "lightning/loaders/**": (
        *ADAPTERS,
        *("lightning.checkpoints", "lightning.outside_steps", "lightning.registration", "lightning.features"),
    ),
    "lightning/outside_steps/**": (
        *ADAPTERS,
        *("lightning.checkpoints", "lightning.loaders", "lightning.registration", "lightning.features"),
    ),
    "rehearsal/**": ("huggingface", "initialization", "watch", "proving"),
    "proving/**": ("checkpoint", "gradients", "huggingface", "initialization", "watch"),
    "doctor/**": (*MIDDLE, *ABOVE),
    "cli/**": ("gradients", "state", "initialization", "sharding"),
}
#: What plugins import of core: these, and nothing below.
PUBLIC = {
    *("fsdp_core", "fsdp_core.plugins", "fsdp_core.state", "fsdp_core.sharding", "fsdp_core.checkpoint"),
    *("fsdp_core.huggingface", "fsdp_core.lightning", "fsdp_core.testing", "fsdp_core.testing.suite"),
}


def files_of(pattern: str) -> list[Path]:
    return sorted(path for path in CORE.glob(f"{pattern}/*.py" if pattern.endswith("**") else pattern))


@pytest.mark.parametrize("pattern", NEVER)
def test_folders_of_core_import_what_is_below_them(pattern: str) -> None:
    forbidden = [f"fsdp_core.{name}".rstrip(".") for name in NEVER[pattern]]
    files = files_of(pattern)
    assert files, f"nothing matches {pattern}"
    assert {shown(path): found for path in files if (found := within(imported(path), *forbidden))} == {}


#: From how many modules of ours the adapters import at most. What they would need more for is a feature's business.
MODULES_OF_ADAPTERS = {"trainer_strategy.py": 15, "trainer_hooks.py": 12, "strategy.py": 12, "fabric_strategy.py": 12}


def modules_imported(path: Path) -> set[str]:
    """The modules of this project that a file imports from, in functions and for type checkers too."""
    named = within(imported(path), *map(import_name, PACKAGES))
    files = [shown(file).partition("/src/")[2].removesuffix(".py").removesuffix("/__init__") for file in SOURCES]
    modules = {file.replace("/", ".") for file in files}
    return {name if name in modules else name.rpartition(".")[0] for name in named}


@pytest.mark.parametrize("name", MODULES_OF_ADAPTERS)
def test_adapters_import_from_few_modules(name: str) -> None:
    modules = modules_imported(CORE / "lightning" / name)
    assert len(modules) > 5
    assert len(modules) <= MODULES_OF_ADAPTERS[name], sorted(modules)


def test_features_know_their_adapter_by_its_type_alone() -> None:
    adapters = [f"fsdp_core.lightning.{Path(name).stem}" for name in MODULES_OF_ADAPTERS]
    assert files_of("lightning/features/**")
    assert imports_within(files_of("lightning/features/**"), *adapters, types=False) == {}


def test_every_folder_of_core_has_its_law() -> None:
    folders = {path.name for path in CORE.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    named = {pattern.partition("/")[0] for pattern in NEVER}
    assert folders - named == {"lightning", "testing"} - named  # above all others


def test_two_modules_of_core_know_kinds_of_devices() -> None:
    # what is CUDA's own: the device's capability that float8 needs, and what a plan knows of its memory
    sources = {
        CORE / "devices.py",
        CORE / "device_names.py",
        CORE / "rehearsal/cuda_rules.py",
        ROOT / "packages/fsdp-fsdp2/src/fsdp_fsdp2/computation/float8.py",
    }
    knowing = {
        path
        for path in SOURCES
        if re.search(r"\bcuda\b|\bis_cuda\b|\bnccl\b", path.read_text(encoding="utf-8").replace("fsdp-cuda-native", ""))
        if CORE in path.parents or "fsdp_fsdp2" in path.parts
    }
    assert knowing == sources, sorted(map(shown, knowing ^ sources))


def test_only_the_tests_use_the_testing_kit() -> None:
    assert imports_within(CORE_WITHOUT_TESTING, "fsdp_core.testing") == {}


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_import_public_modules_of_core(name: str) -> None:
    deep: dict[str, set[str]] = defaultdict(set)
    for path in sorted((PLUGINS[name] / "src").rglob("*.py")):
        for node in statements(path, types=True, nested=True):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fsdp_core":
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module not in PUBLIC or names & PUBLIC:
                    deep[shown(path)].add(str(node.module))
    assert deep == {}


def test_in_core_only_the_front_ends_and_what_tries_them_know_lightning() -> None:
    knowing = ("lightning", "rehearsal", "proving")
    others = [path for path in CORE_WITHOUT_TESTING if path.relative_to(CORE).parts[0] not in knowing]
    assert imports_within(others, *LIGHTNING) == {}


#: Files of these names are front ends, wherever they are.
FRONT_ENDS = {"trainer.py", "fabric.py", "trainer_strategy.py", "fabric_strategy.py", "fairscale.py", "constructor.py"}


def knows_lightning(path: Path) -> bool:
    """Whether a file of a plugin may: the front ends, and what is in a folder for it.

    ``cpu_ranks`` makes ranks of threads, for which Lightning keeps its rank in a global.
    """
    return path.name in FRONT_ENDS or bool({"lightning", "cpu_ranks", "testing"} & {*path.parts})


def test_what_shards_imports_no_lightning() -> None:
    paths = [path for path in SOURCES if CORE not in path.parents and not knows_lightning(path)]
    assert imports_within(paths, *LIGHTNING, "fsdp_core.lightning", types=False) == {}


def test_front_ends_import_no_fsdp_class() -> None:
    classes = (
        "FullyShardedDataParallel",
        "FSDPModule",
        "fully_shard",
    )  # and not the options' classes, which users write
    sharding = ("torch.distributed._composable", "torch_xla", *(f"torch.distributed.fsdp.{name}" for name in classes))
    assert imports_within([path for path in SOURCES if path.name in FRONT_ENDS], *sharding, types=False) == {}


def test_only_fsdp_xla_imports_torch_xla() -> None:
    assert imports_within([path for path in SOURCES if "fsdp-xla" not in path.parts], "torch_xla") == {}


def test_listing_names_imports_nothing_heavy() -> None:
    assert imports_within(LIGHT, *HEAVY, types=False, nested=False) == {}


def private_home(path: Path) -> Path:
    """The file, or the folder of files, that private names are taken in."""
    return next((parent for parent in path.parents if parent.name.endswith("_private")), path)


@pytest.mark.parametrize("name", PACKAGES)
def test_private_names_of_a_library_are_taken_in_one_place(name: str) -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for path in sorted((PACKAGES[name] / "src").rglob("*.py")):
        for private in private_names(path):
            library = private.split(".")[0]
            library = "lightning" if library in (*LIGHTNING, "pl") else "torch" if library == "dist" else library
            places[library].add(shown(private_home(path)))
    assert {library: found for library, found in places.items() if len(found) > 1} == {}


#: Private attributes of others' objects that are used where they are, with the reason.
KNOWN_ATTRIBUTES = {
    "": {
        *("_parameters", "_modules"),  # of nn.Module: what is under which name
        *("_exit", "_getframe", "_current_frames"),  # of Python's os and sys, documented
        "_optimizer",  # of Lightning's wrappers of optimizers: the user's optimizer
    },
    "initialization/deferred_init.py": {"_opname", "_schema"},  # of operators, which tell what a call writes
    "initialization/materialize.py": {"_reset_parameters"},  # of nn.MultiheadAttention and nn.Transformer
    "checkpoint/async_save.py": {"_register_atexit"},  # of threading: before the interpreter waits for threads
    "checkpoint/storage/local_or_remote_folder.py": {"_cache"},  # of fsspec's file systems, which a fork must not share
    "huggingface/stored_names.py": {  # of transformers' models: what they store, and under which names
        *("_tied_weights_keys", "_keys_to_ignore_on_save", "_keys_to_ignore_on_load_unexpected"),
        "_checkpoint_conversion_mapping",
    },
    "fsdp_fsdp2/tensor_parallel/styles.py": {"_tp_plan"},  # of transformers' models: the plan that they bring
    # of transformers' configurations: which attention
    "fsdp_fsdp2/context_parallel/transformers_models.py": {"_attn_implementation"},
    "sharding/sequence.py": {"_fields"},  # of named tuples, documented
    "fsdp_fsdp2/trainer.py": {"_device_mesh"},  # of LightningModule, whose public property can't be set
    "autoload.py": {"_initializing"},  # of a module that is being imported
    "state/block_quantised.py": {"_subclass_zeros"},  # of torchao's optimizers: makes the kind of state that one keeps
    "state/fqn.py": {"_orig_mod", "_non_persistent_buffers_set"},  # where torch.compile keeps the module; of nn.Module
    "outside_steps/exporting.py": {"_original_module"},  # where Fabric keeps it
    "features/callbacks_over_shards.py": {"_average_model"},  # of Lightning's WeightAveraging
    "features/late_param_groups.py": {"_restarting"},  # of Lightning's BaseFinetuning: to restore groups again
    "checkpoints/patched_io.py": {
        "_fs",
        "_find_last_checkpoints",
        "_hpc_resume_path",
        "_CheckpointConnector",
    },  # of Lightning's search for the last
    "lightning/trainer_strategy.py": {"_layer_sync", "_reset_optimizers_and_schedulers"},  # what a strategy inherits
    "classic/trainer.py": {"_layer_sync"},
    "lightning/host_metrics.py": {"_results", "_defaults", "_logger_connector", "_first_loop_iter"},  # of the loops
    "lightning/launchers.py": {"_version"},  # of a tensor: how often it was written
    "fsdp_cuda_native/options.py": {"_HYBRID_SHARD_ZERO2"},  # a strategy of FSDP1's, which its docs name
    "cpu_ranks/host_operators.py": {"_destroy"},  # of torch.library
    "cpu_ranks/lockstep.py": {  # replaces what torch_xla does for one rank, and has to call it
        *("_xla_get_default_device", "_set_all_reduce_token", "_clear_pending_irs", "_xla_step_marker"),
        *("_run_step_closures", "_xla_counter_value", "_xla_get_num_cached_compilation_graph", "_get_xla_tensors_text"),
    },
}


@cache
def own_names(package: Path) -> set[str]:
    """What a package defines itself, or sets on its own objects."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        for node in statements(path, types=True, nested=True):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                found.add(node.attr)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize("name", PACKAGES)
def test_private_attributes_of_others_are_used_where_private_names_are(name: str) -> None:
    sources = PACKAGES[name] / "src"
    own = own_names(sources) | own_names(CORE)
    used: dict[str, set[str]] = defaultdict(set)
    for path in sorted(sources.rglob("*.py")):
        if "private" in private_home(path).stem or "testing" in path.parts:
            continue
        known = set().union(
            *(names for end, names in KNOWN_ATTRIBUTES.items() if path.as_posix().endswith(end or ".py"))
        )
        for node in statements(path, types=True, nested=True):
            asked = None
            if isinstance(node, ast.Attribute):
                asked = node.attr
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            ):
                asked = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if isinstance(asked, str) and re.match(r"_(?!_|fsdp_core)", asked) and asked not in own | known:
                used[shown(path)].add(asked)
    assert used == {}


def test_files_are_named_for_what_they_hold() -> None:
    assert {path.stem for path in SOURCES} & {"utils", "util", "common", "helpers", "base", "misc"} == set()


#: Messages between the ranks of one run, as in torch.distributed, and what a rank that was forked from a notebook
#: returns to it, in a folder of its own; no checkpoint goes through them.
UNPICKLE_MESSAGES = (
    "packages/fsdp-xla/src/fsdp_xla/ranks/messages.py",
    "packages/fsdp-core/src/fsdp_core/lightning/launchers/notebooks.py",
)

#: Other libraries' checkpoints, whose names become records: nothing is imported, looked up or called.
UNPICKLES_RECORDS = "packages/fsdp-core/src/fsdp_core/checkpoint/importing/unpickling.py"


def test_nothing_is_unpickled() -> None:
    writing = {"pickle.Pickler"}  # a pickle may be written, for those who read one
    for path in [path for path in SOURCES if shown(path) not in UNPICKLE_MESSAGES]:
        allowed = writing | {"pickle.Unpickler"} if shown(path) == UNPICKLES_RECORDS else writing
        unpickling = within(imported(path) - allowed, "pickle", "dill", "cloudpickle", "marshal", "shelve")
        assert not unpickling, shown(path)
        for node in statements(path, types=False, nested=True):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.load"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") not in (None, "None", "False"), f"{shown(path)}, line {node.lineno}"


def test_the_unpickler_of_imports_finds_no_class() -> None:
    """It is used as a base alone, whose finder and whose persistent ids are its own, and asks the base for neither."""
    tree = ast.parse((ROOT / UNPICKLES_RECORDS).read_text())
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "Unpickler"]
    (recorder,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases == uses)
    methods = {node.name: ast.unparse(node) for node in recorder.body if isinstance(node, ast.FunctionDef)}
    assert {"find_class", "persistent_load"} <= set(methods)
    assert not [name for name, text in methods.items() if name != "__init__" and "super" in text]
    assert "import_module" not in ast.unparse(tree)
    assert "__import__" not in ast.unparse(tree)


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_stands_alone(name: str) -> None:
    folder = PACKAGES[name]
    pyproject = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    assert project["name"] == name
    assert (folder / "src" / import_name(name) / "py.typed").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    assert len((folder / "README.md").read_text(encoding="utf-8")) > 500
    assert f"## [{project['version']}]" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_architecture_page_shows_the_folders_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    tree = importlib.import_module("tree")
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert page == tree.written(page), "run: python docs/tree.py"


def test_the_architecture_page_names_files_that_are_there() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_0-9/]+/[a-z_0-9]+\.py)`", page))
    there = [shown(path) for path in [*SOURCES, *ROOT.glob("tests-integration/*.py")]]
    assert len(named) > 10
    assert {name for name in named if not any(path.endswith(f"/{name}") or path == name for path in there)} == set()


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_register_through_the_public_entry_point(name: str) -> None:
    project = tomllib.loads((PLUGINS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert list(project["entry-points"]["fsdp.strategies"].values()) == [f"{import_name(name)}.plugin"]
    assert [word for word in project["dependencies"] if word.startswith("fsdp-")] != []

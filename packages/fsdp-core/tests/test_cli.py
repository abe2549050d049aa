from __future__ import annotations

import json
import shutil
import sysconfig

import pytest

from conftest import Site
from fsdp_core.testing.refusals import assert_says

CPU = 'accelerators=("cpu",)'
NOTHING_HEAVY = "heavy: []\n"


@pytest.fixture
def full_site(site: Site) -> Site:
    """One plugin of every kind."""
    site.provide(
        "good-plugin",
        f"""name="good", summary="Shards well.", trainer="good_impl:Good", {CPU}, requires=["click>=8"],
            capabilities=[Capability.CLIP_BY_NORM, Capability.CPU_OFFLOAD], presets={{"level": 3}},
            options=[Option(name="level", default=1, help="How much."), Option(name="mode", default="a b"),
                     Option(name="float8"), Option(name="sharding_strategy"), Option(name="device_mesh")]""",
        'name="tpu_only", summary="Shards elsewhere.", fabric="a:B", accelerators=("tpu", "cuda"), probe="probes:no"',
        f'name="erring", summary="Asks wrongly.", fabric="a:B", {CPU}, probe="probes:err"',
        version="2.5",
        good_impl="raise ImportError('listing must not import this')\nclass Good: ...",
        probes="def no():\n    return 'there is no TPU'\n\ndef err():\n    return 1 / 0",
    )
    site.provide("one-plugin", f'name="twice", summary="", trainer="a:B", {CPU}')
    site.provide("two-plugin", f'name="twice", summary="", trainer="a:B", {CPU}')
    site.plugin("bad-plugin", "import my_dep")
    return site


def test_list(full_site: Site) -> None:
    done = full_site.fsdp("list")
    table, _, rest = done.stdout.partition("\n\nNot installed:\n")
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines() if line.strip()]
    assert rows == [
        ["Name", "Package", "Version", "Accelerators", "Runs here"],
        [
            "erring",
            "good-plugin",
            "2.5",
            "cpu",
            "no: strategy 'erring' can't say whether it runs here: the probe of good-plugin 2.5 failed: "
            "ZeroDivisionError: division by zero Report this to the authors of good-plugin, or type: "
            "pip install --upgrade good-plugin",
        ],
        ["good", "good-plugin", "2.5", "cpu", "yes"],
        ["tpu_only", "good-plugin", "2.5", "tpu, cuda", "no: there is no TPU"],
    ]
    assert rest == (
        "  ddp_fully_sharded, fsdp_native, fsdp_native_full_shard_offload → pip install fsdp-cuda-native\n"
        "  fsdp2, fsdp2_cpu_offload → pip install fsdp-fsdp2\n"
        "  xla_fsdp, xla_fsdp_full, xla_fsdp_spmd → pip install fsdp-xla\n"
        "\n"
        "Ambiguous:\n"
        "  strategy 'twice' is ambiguous: one-plugin 1.0 and two-plugin 1.0 provide it.\n"
        "  Uninstall all but one; type: pip uninstall one-plugin or pip uninstall two-plugin\n"
        "\n"
        "Broken:\n"
        "  bad-plugin 1.0 (bad_plugin) failed to load: ModuleNotFoundError: No module named 'my_dep'\n"
        "  Fix it, or type: pip install --upgrade --force-reinstall bad-plugin\n"
        "\n"
        'To let a fit choose one of these, or DDP, by what fits: strategy="fsdp_auto"\n'
    )
    assert done.stderr == NOTHING_HEAVY


def test_list_as_json(full_site: Site) -> None:
    done = full_site.fsdp("list", "--json")
    seen = json.loads(done.stdout)
    statuses = [("erring", "broken", False), ("good", "available", True), ("tpu_only", "unavailable", False)]
    assert [(row["name"], row["status"], row["runs_here"]) for row in seen["strategies"]] == statuses
    assert seen["strategies"][2] == {
        "name": "tpu_only",
        "package": "good-plugin",
        "version": "2.5",
        "accelerators": ["tpu", "cuda"],
        "runs_here": False,
        "status": "unavailable",
        "reason": "there is no TPU",
        "summary": "Shards elsewhere.",
    }
    assert {"name": "xla_fsdp", "package": "fsdp-xla", "install": "pip install fsdp-xla"} in seen["not_installed"]
    (broken,) = seen["broken"]
    assert [broken[key] for key in ("name", "package", "version")] == ["bad_plugin", "bad-plugin", "1.0"]
    assert broken["error"] == "ModuleNotFoundError: No module named 'my_dep'"
    assert broken["remedy"] == "pip install --upgrade --force-reinstall bad-plugin"
    assert len(broken) == 5
    (twice,) = seen["duplicates"]
    assert (twice["name"], twice["packages"]) == ("twice", ["one-plugin 1.0", "two-plugin 1.0"])
    assert done.stderr == NOTHING_HEAVY


def test_list_notices_classes_that_are_not_there_and_names_that_lightning_keeps(site: Site) -> None:
    site.provide(
        "odd-plugin",
        f'name="no_module", summary="", trainer="odd.no.impl:Class", {CPU}',
        f'name="no_class", summary="", trainer="a:B", fabric="odd.impl:Clas", {CPU}',
        f'name="no_python", summary="", trainer="odd.wrong:Class", {CPU}, probe="odd.probes:no"',
        f'name="conditional", summary="", trainer="odd.impl:Class", fabric="odd.any:Class", {CPU}',
        f'name="ddp", summary="", trainer="a:B", fabric="a:B", {CPU}',
        f'name="dp", summary="", trainer="a:B", fabric="a:B", {CPU}',
        **{
            "odd.__init__": "raise ImportError('listing must not import this')",
            "odd.impl": "try:\n    import torch\nexcept ImportError:\n    pass\nelse:\n    class Class: ...",
            "odd.any": "def __getattr__(name): ...",
            "odd.wrong": "class Class(:",
        },
    )
    rows = {row["name"]: row for row in json.loads(site.fsdp("list", "--json").stdout)["strategies"]}
    broken = ("no_class", "no_module", "no_python")
    statuses = {"conditional": "available", "ddp": "kept", "dp": "available", **dict.fromkeys(broken, "broken")}
    assert {name: row["status"] for name, row in rows.items()} == statuses
    assert [rows[name]["reason"].partition(" Report this")[0] for name in broken] == [
        "strategy 'no_class' names a Fabric class that does not exist: 'odd.impl:Clas' (odd.impl has no 'Clas')",
        "strategy 'no_module' names a Trainer class that does not exist: 'odd.no.impl:Class' "
        "(no module named 'odd.no')",
        "strategy 'no_python' names a Trainer class that does not exist: 'odd.wrong:Class' "
        "(SyntaxError: invalid syntax (odd.wrong, line 1))",
    ]
    done = site.fsdp("list")
    assert (
        "\nLightning's own:\n"
        "  Lightning keeps the name 'ddp' for its own strategy under Trainer and Fabric, "
        "and ignores odd-plugin 1.0's.\n"
        "  Have its authors choose another name; to remove it, type: pip uninstall odd-plugin\n"
        "  Lightning keeps the name 'dp' for its own strategy under Fabric, and ignores odd-plugin 1.0's.\n"
        "  Have its authors choose another name; to remove it, type: pip uninstall odd-plugin\n"
    ) in done.stdout
    assert done.stderr == NOTHING_HEAVY


def test_list_where_nothing_is_installed(site: Site) -> None:
    done = site.fsdp("list")
    assert done.stdout.startswith("No strategy is installed.\n\nNot installed:\n  ddp_fully_sharded, ")
    assert json.loads(site.fsdp("list", "--json").stdout)["strategies"] == []


def test_describe(full_site: Site) -> None:
    done = full_site.fsdp("describe", "GOOD")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    assert lines == [
        "good (good-plugin 2.5)",
        "Shards well.",
        "Runs here yes",
        "Accelerators cpu",
        "Trainer class good_impl:Good",
        "Fabric class none",
        "Requires click>=8",
        "Fixes level=3",
        "Can do What it is",
        "clip_by_norm Gradients are clipped by their norm over all ranks. Asked for by Trainer(gradient_clip_val=…),",
        "fabric.clip_gradients(max_norm=…)",
        "cpu_offload Shards and optimizer state stay in host memory.",
        "float8 Linear layers compute in float8. Asked for by float8=True",
        "hybrid_sharding Groups of ranks hold replicas of the shards. Asked for by sharding_strategy='HYBRID_SHARD'",
        "Option Default What it does",
        "level 1 How much.",
        "mode 'a b'",
        *(f"{option} None" for option in ("float8", "sharding_strategy", "device_mesh")),
    ]
    assert done.stderr == NOTHING_HEAVY


def test_describe_of_a_name_that_fixes_no_option(full_site: Site) -> None:
    done = full_site.fsdp("describe", "tpu_only")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    assert lines == [
        "tpu_only (good-plugin 2.5)",
        "Shards elsewhere.",
        "Runs here no: there is no TPU",
        "Accelerators tpu, cuda",
        "Trainer class none",
        "Fabric class a:B",
        "Requires none",
        "Can do none",
    ]


def test_describe_as_json(full_site: Site) -> None:
    done = full_site.fsdp("describe", "good", "--json")
    seen = json.loads(done.stdout)
    assert seen["options"][:2] == [
        {"name": "level", "default": 1, "help": "How much."},
        {"name": "mode", "default": "a b", "help": ""},
    ]
    assert list(seen["features"]) == ["float8", "hybrid_sharding"]
    assert (seen["presets"], seen["package"], seen["runs_here"]) == ({"level": 3}, "good-plugin", True)
    assert done.stderr == NOTHING_HEAVY


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "goood",
            "no strategy named 'goood'. Did you mean 'good'?\nInstalled: erring, good, tpu_only (good-plugin 2.5).",
        ),
        (
            "FSDP",
            "'fsdp' is Lightning's own strategy, and none of these packages': lightning.pytorch.Trainer and "
            "lightning.fabric.Fabric take it as it is, and Lightning's documentation describes it. "
            "Did you mean 'fsdp2'?\nInstalled: erring, good, ",
        ),
    ],
)
def test_our_errors_are_shown_without_a_traceback(full_site: Site, name: str, message: str) -> None:
    done = full_site.fsdp("describe", name, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(NOTHING_HEAVY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lsit"], "Error: No such command 'lsit'."),
        (["describe"], "Error: Missing argument 'NAME'."),
        (["list", "--yaml"], "Error: No such option"),
    ],
)
def test_wrong_usage(site: Site, arguments: list[str], message: str) -> None:
    done = site.fsdp(*arguments, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_help_and_version(site: Site) -> None:
    shown = " ".join(site.fsdp("--help").stdout.split())
    assert "list Show the strategies, and which can run here." in shown
    assert "describe Show what a strategy can do, and its options." in shown
    assert "checkpoint Look into checkpoints, compare and convert them." in shown
    assert "doctor Look for what is broken here, for you and for bug reports." in shown
    explained = " ".join(site.fsdp("doctor", "--help").stdout.split())
    assert "Exit status: 0, or 1 if something is broken." in explained
    assert "Print JSON, for programs to read." in site.fsdp("describe", "--help").stdout
    assert site.fsdp("--version").stdout.startswith("fsdp (fsdp-core) ")


def test_the_installed_command_on_a_terminal_that_is_not_utf_8(full_site: Site) -> None:
    command = shutil.which("fsdp", path=sysconfig.get_path("scripts"))
    assert command is not None
    done = full_site.run(command, "list", PYTHONIOENCODING="cp1252")
    assert_says(done.stdout, "  fsdp2, fsdp2_cpu_offload ? pip install fsdp-fsdp2", "no: there is no TPU")


def test_the_last_column_is_folded_to_the_terminal(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    words = " ".join(f"word{number}" for number in range(40))
    site.provide(
        "good-plugin", f'name="good", summary="", trainer="a:B", {CPU}, options=[Option(name="o", help="{words}")]'
    )
    for columns, width, count in ("", 120, 3), ("60", 60, 7), ("wide", 120, 3):
        monkeypatch.setenv("COLUMNS", columns)
        table = site.fsdp("describe", "good").stdout.splitlines()[-count:]
        assert all(width - 20 < len(line) <= width for line in table[:-1])
        assert " ".join(" ".join(table).split()).endswith(f"o None {words}")

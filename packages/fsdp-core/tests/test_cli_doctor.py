"""``fsdp doctor`` says what is here and what is broken, whatever is broken. Bad plugins: see test_bad_plugins.py."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from conftest import Site

CPU = 'accelerators=("cpu",), summary="s"'
MAIN = "from fsdp_core.cli import main; main()"
LIGHT = {"torch": "raise OSError('libcudart.so.12: cannot open shared object file')", "lightning": ""}
HEALTHY_TORCH = """
    __version__ = "2.99.0"

    class version:
        cuda, hip = None, None

    def get_num_threads():
        return 3

    class Tensor:
        pass

    class device:
        type = "cuda"

        def __init__(self, name):
            pass

    class Event:
        pass

    class accelerator:
        def current_accelerator():
            return device("cuda")

        def is_available():
            return True

        def device_count():
            return 1

    def get_device_module(kind):
        return cuda

    class cuda:
        def get_device_properties(index):
            class properties:
                name, total_memory, major, minor = "H999", 80_000_000_000, 9, 9
            return properties

        class nccl:
            def version():
                return (2, 99, 1)
"""
SAYS_NOTHING = """
        @hookimpl
        def fsdp_strategies():
            return []
"""
DISTRIBUTED = """
    class Backend:
        backend_list = ["undefined", "gloo", "nccl", "mpi", "ucc", "hccl"]

    def is_available():
        return True

    def is_gloo_available():
        return True

    is_nccl_available = is_gloo_available
"""


def doctor(site: Site, *arguments: str, status: int, **environment: str) -> dict[str, Any]:
    done = site.run(sys.executable, "-c", MAIN, "doctor", "--json", *arguments, check=False, **environment)
    assert done.returncode == status, done.stderr + done.stdout
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["failed"] == {}
    return seen


def what_is(level: str, seen: dict[str, Any]) -> list[str]:
    return [f"{one['what']} → {one['remedy']}" for one in seen["findings"] if one["level"] == level]


def bound(site: Site) -> None:
    """Have every plugin of the site say which fsdp-core it was built for."""
    for metadata in site.path.glob("*.dist-info/METADATA"):
        metadata.write_text(metadata.read_text() + "Requires-Dist: fsdp-core>=0.1,<99\n")


@pytest.fixture
def light_site(site: Site) -> Site:
    """A site whose torch can't be loaded and whose Lightning is empty, for both take seconds to import."""
    site.distribution("stand-ins", modules=LIGHT)
    site.provide("good-plugin", f'name="good", trainer="a:B", {CPU}')
    bound(site)
    return site


def test_where_all_is_well_but_a_name_that_lightning_keeps(site: Site) -> None:
    site.provide(
        "good-plugin",
        f'name="good", trainer="a:B", fabric="a:B", {CPU}',
        f'name="elsewhere", trainer="a:B", {CPU}, probe="probes:no"',
        f'name="ddp", trainer="a:B", {CPU}',
        version="2.5",
        probes="def no():\n    return 'there is no TPU'",
    )
    bound(site)
    driver = site.path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 570.10\necho 570.10\n")
    driver.chmod(0o755)
    path = os.pathsep.join([str(site.path), os.environ["PATH"]])
    seen = doctor(site, status=1, PATH=path, RANK="0", NCCL_DEBUG="INFO", TORCH_HUB_TOKEN="secret", HOME_OF_NOBODY="no")
    assert what_is("broken", seen) == [  # and not once more as Lightning's warning
        "Lightning keeps the name 'ddp' for its own strategy under Trainer and Fabric, and ignores "
        "good-plugin 2.5's. → Have its authors choose another name; to remove it, type: pip uninstall good-plugin"
    ]
    assert not [note for note in what_is("note", seen) if "passed over" in note]
    assert seen["contract"] == "1.0"
    import torch

    assert (seen["torch"]["version"], seen["torch"]["error"]) == (torch.__version__, None)
    assert seen["torch"]["process_groups"]["gloo"] is True
    assert len(seen["torch"]["devices"]) == torch.accelerator.device_count()
    assert seen["machine"]["nvidia_driver"] == "570.10"
    unused = [
        note for note in what_is("note", seen) if note.startswith("there is an NVIDIA driver (570.10), but torch")
    ]
    assert len(unused) == (0 if torch.cuda.is_available() else 1)
    assert seen["versions"]["python"] == sys.version.split()[0]
    assert seen["versions"]["lightning"][0].isdigit()
    assert seen["machine"]["cpus"] >= seen["machine"]["usable_cpus"] >= 1
    assert {"good", "elsewhere"} <= set(seen["lightning"]["trainer"]["ours"])
    assert {"ddp"} <= set(seen["lightning"]["trainer"]["lightnings"])
    (plugin,) = seen["plugins"]
    assert (plugin["package"], plugin["version"], plugin["module"]) == ("good-plugin", "2.5", "good_plugin_plugin")
    assert plugin["requires_core"] == "<99,>=0.1"
    assert 0 < plugin["seconds"] < 60
    assert {row["name"]: (row["status"], row["reason"]) for row in plugin["strategies"]} == {
        "good": ("available", None),
        "elsewhere": ("unavailable", "there is no TPU"),
        "ddp": ("kept", "Lightning keeps this name for its own strategy"),
    }
    shown = {name: seen["environment"][name] for name in ("RANK", "NCCL_DEBUG", "TORCH_HUB_TOKEN")}
    assert shown == {"RANK": "0", "NCCL_DEBUG": "INFO", "TORCH_HUB_TOKEN": "(hidden)"}
    assert "HOME_OF_NOBODY" not in seen["environment"]


def test_names_that_are_not_entered_by_themselves(light_site: Site) -> None:
    (light_site.path / "torch.py").unlink()
    modules = {"torch.__init__": HEALTHY_TORCH, "torch.distributed": DISTRIBUTED}
    light_site.distribution("healthy-torch", modules=modules)
    seen = doctor(light_site, status=1, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (
        "our names are not entered in Lightning by themselves: TORCH_DEVICE_BACKEND_AUTOLOAD=0 → "
        "write `import fsdp_core.lightning` in the script, or unset the variable"
    ) in what_is("note", seen)
    card = {"name": "cuda:0", "model": "H999", "memory": 80_000_000_000, "capability": "9.9"}
    assert seen["torch"]["devices"] == [card]
    groups = seen["torch"]["process_groups"]
    assert list(groups) == ["gloo", "nccl", "mpi", "ucc", "xccl", "hccl"]
    assert [name for name, is_there in groups.items() if is_there is True] == ["gloo", "nccl", "hccl"]
    assert [name for name, is_there in groups.items() if is_there is False] == ["mpi", "ucc", "xccl"]
    assert seen["torch"]["libraries"] == {"nccl": "2.99.1"}
    (broken,) = what_is("broken", seen)
    assert broken.startswith("lightning: ModuleNotFoundError: No module named 'lightning.pytorch'")
    shown = light_site.run(sys.executable, "-c", MAIN, "doctor", check=False).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]  # columns are as wide as what is installed here
    assert {"cuda:0 H999, 80.0 GB, compute capability 9.9", "nccl yes (2.99.1)"} <= set(lines)


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        (LIGHT["torch"], "torch: OSError: libcudart.so.12: cannot open shared object file → mend that first"),
        ("import os; os.abort()", "torch: the process that imports it was ended by signal 6 → mend that first"),
        ("raise SystemExit(3)", "torch: SystemExit: 3 → mend that first"),
        ("import time; time.sleep(600)", "torch: the process that imports it was stopped: it had not ended after"),
    ],
    ids=["raises", "crashes", "exits", "hangs"],
)
def test_a_torch_that_is_broken(light_site: Site, source: str, finding: str) -> None:
    (light_site.path / "torch.py").write_text(source)
    seen = doctor(light_site, *(["--timeout", "10"] if "sleep" in source else []), status=1)
    assert any(one.startswith(finding) for one in what_is("broken", seen)), what_is("broken", seen)
    (plugin,) = seen["plugins"]
    assert [(row["name"], row["status"]) for row in plugin["strategies"]] == [("good", "available")]


def test_neither_torch_nor_lightning(site: Site) -> None:
    blocker = """
        import sys

        class Blocker:
            def find_spec(name, path=None, target=None):
                if name in ("torch", "lightning"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Blocker)
    """
    site.distribution("blocker", modules={"sitecustomize": blocker})
    seen = doctor(site, status=1)
    assert what_is("broken", seen) == [
        "torch is not installed, and no strategy runs without → pip install torch",
        next(one for one in what_is("broken", seen) if one.startswith("lightning is not installed")),
    ]
    assert what_is("note", seen) == [
        "no package with strategies is installed → "
        "pip install fsdp-cuda-native or pip install fsdp-fsdp2 or pip install fsdp-xla"
    ]


def test_plugins_that_need_mending(light_site: Site) -> None:
    light_site.plugin("bad-plugin", "import my_dep")
    light_site.provide("one-plugin", f'name="twice", trainer="a:B", {CPU}')
    light_site.provide(
        "two-plugin", f'name="twice", trainer="a:B", {CPU}, probe="probes:err"', probes="def err(): 1 / 0"
    )
    light_site.plugin("new-plugin", "")
    light_site.provide("hollow-plugin", f'name="hollow", trainer="a:C", {CPU}')
    for package, required in {"new": ">=99", "one": ">=0.1", "two": ""}.items():
        (metadata,) = light_site.path.glob(f"{package}_plugin-*/METADATA")
        metadata.write_text(f"{metadata.read_text()}Requires-Dist: fsdp-core{required}\n")
    seen = doctor(light_site, status=1)
    broken = what_is("broken", seen)
    for finding in (
        "bad-plugin 1.0 (bad_plugin) failed to load: ModuleNotFoundError: No module named 'my_dep' → "
        "pip install --upgrade --force-reinstall bad-plugin",
        "new-plugin 1.0 (new_plugin) failed to load: ContractVersionError: it was built for fsdp-core>=99, but "
        f"fsdp-core {seen['versions']['fsdp-core']} is installed; fsdp-core is the one to upgrade → "
        'pip install --upgrade "fsdp-core>=99"',
        "strategy 'twice' is ambiguous: one-plugin 1.0 and two-plugin 1.0 provide it. → "
        "Uninstall all but one; type: pip uninstall one-plugin or pip uninstall two-plugin",
        "strategy 'twice' can't say whether it runs here: the probe of two-plugin 1.0 failed: ZeroDivisionError: "
        "division by zero → Report this to the authors of two-plugin, or type: pip install --upgrade two-plugin",
        "strategy 'hollow' names a Trainer class that does not exist: 'a:C' (a has no 'C') → "
        "Report this to the authors of hollow-plugin, or type: pip install --upgrade hollow-plugin",
    ):
        assert finding in broken
    says = ", so that one with another contract would load it too"
    assert [note.partition(says)[0] for note in what_is("note", seen) if says in note] == [
        "hollow-plugin 1.0 (hollow_plugin) does not say which fsdp-core it requires",
        "one-plugin 1.0 (one_plugin) requires fsdp-core>=0.1, without an upper bound",
        "two-plugin 1.0 (two_plugin) requires fsdp-core of any version, without an upper bound",
    ]


def test_a_plugin_is_slow_only_if_it_is_slow_alone(light_site: Site) -> None:
    """Others are not its fault: these are slow while Lightning has yet to be asked, or beside another of them."""
    (light_site.path / "lightning.py").write_text("open(__file__ + '.asked', 'w').close()")
    waits = """
        import os, time
        here = os.path.dirname(__file__)
        try:
            os.mkdir(f"{here}/loading")
            alone = True
        except FileExistsError:
            alone = False
        time.sleep(0.2 if alone and os.path.exists(f"{here}/lightning.py.asked") else 1.2)
        if alone:
            os.rmdir(f"{here}/loading")
    """
    for name in ("first-plugin", "second-plugin", "third-plugin"):
        light_site.plugin(name, waits + SAYS_NOTHING)
    light_site.plugin("slow-plugin", "        import time; time.sleep(1.2)\n" + SAYS_NOTHING)
    bound(light_site)
    seen = doctor(light_site, status=1)
    slow = [note for note in what_is("note", seen) if " s to load" in note]
    assert [note.partition(" takes 1.")[0] for note in slow] == ["slow-plugin 1.0 (slow_plugin)"]
    seconds = {one["name"]: one["seconds"] for one in seen["plugins"]}
    assert seconds.keys() == {f"{name}_plugin" for name in ("first", "good", "second", "slow", "third")}
    assert [name for name, taken in seconds.items() if taken >= 1] == ["slow_plugin"]


def test_text_output_fits_a_bug_report(light_site: Site) -> None:
    light_site.plugin("bad-plugin", "raise ValueError('word ' * 60)")
    done = light_site.run(sys.executable, "-c", MAIN, "doctor", check=False, MASTER_ADDR="10.0.0.1")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "Versions:",
        "Plugins:",
        "Strategies:",
        "Devices:",
        "Process-group backends:",
        "Our names in Lightning:",
        "Environment variables:",
    ]
    squeezed = " ".join(done.stdout.split())
    for text in (
        "s bad_plugin = bad_plugin_plugin broken, see below",
        "good good-plugin cpu yes",
        "MASTER_ADDR 10.0.0.1",
        "broken torch: OSError: libcudart.so.12: cannot open shared object file → mend that first",
    ):
        assert text in squeezed, text
    assert "Findings: 2 broken, 0 to note" in lines


def test_failed_questions_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsdp_core.cli.doctor
    import fsdp_core.doctor.facts

    def fail(*arguments: object) -> None:
        raise OSError("no such\x1b[2J thing")

    for name in ("_plugins", "_ask_child", "_machine", "_versions", "environment_variables"):
        monkeypatch.setattr(fsdp_core.doctor.facts, name, fail)
    for arguments in ([], ["--json"]):
        done = CliRunner().invoke(fsdp_core.cli.doctor.doctor, arguments)
        assert done.exit_code == 1, done.output
        assert isinstance(done.exception, SystemExit)
    found = json.loads(done.stdout)
    subjects = ["plugins", "torch", "lightning", "machine", "versions", "environment"]
    assert list(found["failed"]) == subjects
    assert [one["what"] for one in found["findings"]] == [
        f"fsdp doctor could not look at {subject}: OSError: no such?[2J thing" for subject in subjects
    ]

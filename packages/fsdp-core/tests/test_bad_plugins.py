"""Whatever a plugin does, the others work, `import torch` and `fsdp list` too, and it is named with what to do."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from conftest import IMPLEMENTATION, Site

if TYPE_CHECKING:
    from subprocess import CompletedProcess

CPU = 'accelerators=("cpu",), summary="s"'
HOOK = f'\n@hookimpl\ndef fsdp_strategies():\n    return [StrategyInfo(name="bad", trainer="a:B", {CPU})]\n'
MAIN = "from fsdp_core.cli import main; main()"

# Plugins that give no strategy: the source, and the error.
BROKEN = {
    "missing dependency": ("import my_dep", "ModuleNotFoundError: No module named 'my_dep'"),
    "wrong syntax": ("def", "SyntaxError: invalid syntax (bad_01_plugin.py, line 2)"),
    "exit": ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "no hook": (
        "def fsdp_strategies():\n    return []",
        "StrategyInfoError: bad_03_plugin implements no fsdp_strategies hook. "
        "Define fsdp_strategies() there and decorate it with @fsdp_core.hookimpl.",
    ),
    "misspelt hook": (
        "@hookimpl\ndef fsdp_strategy():\n    return []",
        "PluginValidationError: unknown hook 'fsdp_strategy' in plugin <module 'bad_04_plugin' from",
    ),
    "bad info": (HOOK.replace('"bad"', '"Bad"'), "StrategyInfoError: a strategy can't be called 'Bad'. Use a"),
    "None": ("@hookimpl\ndef fsdp_strategies():\n    pass", "fsdp_strategies() returned a NoneType; return a list of"),
    "a dict": (
        f"@hookimpl\ndef fsdp_strategies():\n    return {{'bad': StrategyInfo(name='bad', trainer='a:B', {CPU})}}",
        "fsdp_strategies() returned a dict; return a list of StrategyInfo.",
    ),
    "a string": (
        "@hookimpl\ndef fsdp_strategies():\n    return 'bad'",
        "fsdp_strategies() returned a str; return a list of",
    ),
    "another class": (
        "class StrategyInfo:\n    name = 'bad'\n\n@hookimpl\ndef fsdp_strategies():\n    return [StrategyInfo()]",
        "fsdp_strategies() returned a StrategyInfo instead of a StrategyInfo.",
    ),
    "a generator that raises midway": (
        f"@hookimpl\ndef fsdp_strategies():\n    yield StrategyInfo(name='bad', trainer='a:B', {CPU})\n    1 / 0",
        "ZeroDivisionError: division by zero",
    ),
    "an error that can't be shown": (
        "class Odd(Exception):\n    def __str__(self):\n        raise OSError\n\nraise Odd",
        "Odd: (its message can't be shown: OSError)",
    ),
    "an error that moves the cursor": (r"raise ValueError('\x1b[2Jgone' + 'x' * 9000)", "ValueError: ?[2Jgonexxxxx"),
    "a summary that JSON can't hold": (
        HOOK.replace('summary="s"', "summary=object()"),
        "strategy 'bad' has an invalid description: summary is a object. Write one sentence, as a string.",
    ),
    "options of another class": (
        HOOK.replace('summary="s"', 'summary="s", options=[("level", 1)]'),
        "options holds a tuple instead of a Option. Give a tuple of Option.",
    ),
}

# Plugins that do more than to list their names: the source before the hook, and what is said of them.
MEDDLING = {
    "imports torch": ("import torch", "imports torch", "it should name its classes by string in StrategyInfo"),
    "prints": ("print('hello')", "prints to stdout", "it should log, or print nothing"),
    "replaces stdout": ("import sys; sys.stdout = None", "replaces sys.stdout", "leave that as it is"),
    "changes the environment": (
        "import os; os.environ['FSDP_TESTS_MARK'] = 'bad'; del os.environ['FSDP_TESTS_KEPT']",
        "changes os.environ (FSDP_TESTS_KEPT, FSDP_TESTS_MARK)",
        "it should do that when a strategy is built",
    ),
    "changes the path": ("import sys; sys.path[:] = ['/nowhere']", "changes sys.path", "install its modules with its"),
    "changes the folder": ("import os; os.chdir('/')", "changes the working directory", "leave that to users"),
    "replaces atexit.register": (
        "import atexit; atexit.register = None",
        "replaces atexit.register",
        "leave that as it",
    ),
    "an exit handler that raises": (
        "import atexit\ndef handler():\n    raise RuntimeError('at exit')\natexit.register(handler)",
        "registers exit handlers (bad_plugin_plugin.handler)",
        "it should do that when a strategy starts",
    ),
    "an exit handler that ends the process": (
        "import atexit, os\ndef handler():\n    os._exit(7)\natexit.register(handler)",
        "registers exit handlers (bad_plugin_plugin.handler)",
        "it should do that when a strategy starts",
    ),
    "a thread that never ends": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='sleeper').start()",
        "starts threads (sleeper)",
        "it should start them when a strategy starts, and stop them with it",
    ),
}

PROBE = """
    import atexit, os, sys

    def probe():
        wrong = []
        if os.environ.get("FSDP_TESTS_MARK") or os.environ.get("FSDP_TESTS_KEPT") != "kept":
            wrong.append("os.environ")
        if "/nowhere" in sys.path or os.getcwd() == "/" or sys.stdout is None or not callable(atexit.register):
            wrong.append("the process")
        return ", ".join(wrong) or None
"""


def run_list(site: Site, *arguments: str) -> CompletedProcess[str]:
    return site.run(sys.executable, "-c", MAIN, "list", *arguments, FSDP_TESTS_KEPT="kept")


def require(site: Site, distribution: str, *requirements: str) -> None:
    """Have an installed distribution require something, as its metadata say."""
    (metadata,) = site.path.glob(f"{distribution.replace('-', '_')}-*.dist-info/METADATA")
    lines = "".join(f"Requires-Dist: {one}\n" for one in requirements)
    metadata.write_text(metadata.read_text() + lines)


@pytest.fixture
def good_site(site: Site) -> Site:
    """A strategy whose probe says whether the plugin that is loaded before it has changed anything."""
    site.provide("good-plugin", f'name="good", trainer="a:B", probe="good_probe:probe", {CPU}', good_probe=PROBE)
    return site


def test_invalid_results_of_hooks(good_site: Site) -> None:
    for number, (source, _) in enumerate(BROKEN.values()):
        good_site.plugin(f"bad-{number:02}", source, version=f"0.{number}")
    seen = json.loads(run_list(good_site, "--json").stdout)
    assert [(row["name"], row["status"]) for row in seen["strategies"]] == [("good", "available")]
    for number, ((case, (_, error)), broken) in enumerate(zip(BROKEN.items(), seen["broken"], strict=True)):
        assert error in broken["error"], (case, broken["error"])
        assert len(broken["error"]) < 600, case
        names = [broken[key] for key in ("package", "version", "name")]
        assert names == [f"bad-{number:02}", f"0.{number}", f"bad_{number:02}"], case
        assert broken["remedy"] == f"pip install --upgrade --force-reinstall bad-{number:02}", case


@pytest.mark.parametrize("case", MEDDLING)
def test_a_plugin_that_does_more_than_to_list_its_names(good_site: Site, case: str) -> None:
    source, what, remedy = MEDDLING[case]
    if case == "imports torch":
        good_site.distribution("torch-stand-in", modules={"torch": ""})  # the real one takes seconds
    good_site.plugin("bad-plugin", f"{source}\n{HOOK}")
    seen = json.loads(run_list(good_site, "--json").stdout)
    assert [(row["name"], row["status"], row["reason"]) for row in seen["strategies"]] == [
        ("bad", "available", None),
        ("good", "available", None),
    ]
    (effect,) = seen["side_effects"]
    assert effect["what"] == what
    assert remedy in effect["remedy"]
    assert f"  bad-plugin 1.0 (bad_plugin) {what}; " in run_list(good_site).stdout


def test_output_of_libraries_is_kept_out_of_json(good_site: Site) -> None:
    # As C code does, which knows no sys.stdout; and when the process ends.
    source = "import ctypes, os\nos.write(1, b'banner')\nctypes.CDLL(None).puts(b'banner')\n"
    good_site.plugin("bad-plugin", source + HOOK)
    done = run_list(good_site, "--json")
    assert [row["name"] for row in json.loads(done.stdout)["strategies"]] == ["bad", "good"]
    assert done.stderr.count("banner") == 2


#: What a plugin for another contract requires: the remedy, and which package it upgrades.
REQUIREMENTS = {
    "fsdp-core>=99,<100": ('pip install --upgrade "fsdp-core<100,>=99"', "fsdp-core"),
    "FSDP_Core ~= 99.1": ('pip install --upgrade "fsdp-core~=99.1"', "fsdp-core"),
    "fsdp-core==99.*": ('pip install --upgrade "fsdp-core==99.*"', "fsdp-core"),
    "fsdp-core>=0.0.1,<0.0.9": ("pip install --upgrade bad-3", "bad-3"),
    "fsdp-core==0.0.1": ("pip install --upgrade bad-4", "bad-4"),
}


def test_a_plugin_for_another_contract_is_refused_before_it_is_imported(good_site: Site) -> None:
    for number, requirement in enumerate(REQUIREMENTS):
        good_site.plugin(f"bad-{number}", "print('it was imported')" + HOOK)
        require(good_site, f"bad-{number}", requirement, "click")
    done = run_list(good_site, "--json")
    assert "it was imported" not in done.stderr
    seen = json.loads(done.stdout)
    assert [row["name"] for row in seen["strategies"]] == ["good"]
    resolving = "print(failure(lambda: fsdp_core.resolve(f'bad_{number}', 'trainer')))"
    errors = good_site.python(f"import fsdp_core\nfor number in range({len(REQUIREMENTS)}):\n    {resolving}")
    for number, (broken, (remedy, which)) in enumerate(zip(seen["broken"], REQUIREMENTS.values(), strict=True)):
        assert broken["error"].startswith("ContractVersionError: it was built for fsdp-core")
        assert broken["error"].endswith(f" is installed; {which} is the one to upgrade")
        assert broken["remedy"] == remedy
        error, then = errors.stdout.splitlines()[2 * number : 2 * number + 2]
        assert error.startswith(
            f"BrokenStrategyError: strategy 'bad_{number}' can't be used: bad-{number} 1.0 failed to"
        )
        assert then == f"Fix it, or type: {remedy}"


def test_a_plugin_that_does_not_rule_this_core_out_is_loaded(good_site: Site) -> None:
    elsewhere = ("fsdp-core[testing]>=99; extra == 'test'", "fsdp-core>=99; sys_platform == 'no'")
    for number, requirement in enumerate(("fsdp-core", "fsdp-core>=0.0.1", *elsewhere, "??")):
        good_site.plugin(f"bad-{number}", HOOK.replace('"bad"', f'"bad_{number}"'))
        require(good_site, f"bad-{number}", requirement)
    seen = json.loads(run_list(good_site, "--json").stdout)
    assert [row["name"] for row in seen["strategies"]] == ["bad_0", "bad_1", "bad_2", "bad_3", "bad_4", "good"]


def test_a_damaged_distribution_hides_nobody(good_site: Site) -> None:
    good_site.distribution("damaged", plugins="no equals sign")
    good_site.distribution("undecodable")
    (info,) = good_site.path.glob("undecodable-*.dist-info")
    (info / "entry_points.txt").write_bytes(b"[fsdp.strategies]\n\xff\xfe = x\n")
    seen = json.loads(run_list(good_site, "--json").stdout)
    assert [row["name"] for row in seen["strategies"]] == ["good"]


def test_a_probe_that_meddles_changes_nothing(good_site: Site) -> None:
    meddling = "def probe():\n    import os\n    print('hello')\n    os.environ['FSDP_TESTS_MARK'] = 'bad'\n"
    good_site.provide("bad-plugin", f'name="bad", trainer="a:B", probe="bad_probe:probe", {CPU}', bad_probe=meddling)
    seen = json.loads(run_list(good_site, "--json").stdout)
    assert [(row["name"], row["status"]) for row in seen["strategies"]] == [("bad", "available"), ("good", "available")]


def test_training_goes_on_beside_all_of_them(site: Site) -> None:
    """And importing torch and Lightning loads none of them, so a slow one slows neither."""
    site.provide("good-plugin", f'name="good", trainer="tiny_impl:ForTrainer", {CPU}', tiny_impl=IMPLEMENTATION)
    for number, (source, *_) in enumerate([*BROKEN.values(), *MEDDLING.values()]):
        if "os._exit" not in source and "sleeper" not in source:
            hook = "" if "hookimpl" in source else HOOK.replace('"bad"', f'"bad_{number}"')
            site.plugin(f"bad-{number}", f"{source}\n{hook}")
    site.plugin("slow-plugin", "import time; time.sleep(1.5)" + HOOK.replace('"bad"', '"slow"'))
    done = site.forked(
        """
        import atexit, os, sys, time
        import torch
        import lightning.pytorch
        import lightning.fabric
        plugins = [name for name in sys.modules if name.endswith("_plugin") and "." not in name]
        assert plugins == [], plugins

        before = dict(os.environ), list(sys.path), os.getcwd(), atexit.register, sys.stdout
        started = time.monotonic()
        trainer = lightning.pytorch.Trainer(strategy="good", accelerator="cpu", logger=False)
        assert time.monotonic() - started > 1.5 and "slow_plugin_plugin" in sys.modules
        assert type(trainer.strategy).__qualname__ == "ForTrainer"
        after = dict(os.environ), list(sys.path), os.getcwd(), atexit.register, sys.stdout
        assert after == before
        message = failure(lambda: lightning.pytorch.Trainer(strategy="bad_0", accelerator="cpu"))
        assert message.startswith("BrokenStrategyError: strategy 'bad_0' can't be used: bad-0 1.0 failed to load: ")
        print("done")
        """,
        warn=["error::RuntimeWarning"],
        FSDP_TESTS_KEPT="kept",
    )
    assert done.stdout == "done\n"


# For `fsdp doctor`, which loads each in a process of its own: what list can't survive, too.
DEADLY = {
    "exits-at-once": ("import os; os._exit(3)", "failed to load: the process that loads it ended with status 3"),
    "never-answers": (
        "import time; time.sleep(600)",
        "failed to load: the process that loads it was stopped: it had not",
    ),
    "crashes": ("import os; os.abort()", "failed to load: the process that loads it was ended by signal 6"),
    "slow-plugin": ("import time; time.sleep(1.2)" + HOOK, "takes 1."),
    "raises-at-exit": (MEDDLING["an exit handler that raises"][0] + HOOK, "ends with: RuntimeError: at exit"),
    "ends-at-exit": (MEDDLING["an exit handler that ends the process"][0] + HOOK, "it ended with status 7"),
    "stays": (
        MEDDLING["a thread that never ends"][0] + HOOK,
        "the process that loads it was stopped: it had not ended",
    ),
    "heavy": ("import torch" + HOOK, "imports torch"),
    "loud": ("print('hello')" + HOOK, "prints to stdout"),
    "interrupts": ("raise KeyboardInterrupt", "failed to load: the process that loads it was ended by signal 2"),
}


def test_doctor_names_them_all(good_site: Site) -> None:
    # Torch and Lightning have tests of their own in test_cli_doctor.py.
    good_site.distribution("torch-stand-in", modules={"torch": "", "lightning": "raise ImportError('no Lightning')"})
    for name, (source, _) in DEADLY.items():
        good_site.plugin(name, source.replace('"bad"', f'"{name}"'))
    command = (sys.executable, "-c", MAIN, "doctor", "--json", "--timeout", "10")
    done = good_site.run(*command, check=False, FSDP_TESTS_KEPT="kept")
    assert done.returncode == 1, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    for name, (_, message) in DEADLY.items():
        found = [one for one in seen["findings"] if one["what"].startswith(f"{name} 1.0 ({name.replace('-', '_')})")]
        assert any(message in one["what"] for one in found), (name, found)
        assert all(name in one["remedy"] for one in found), found
    (good,) = [plugin for plugin in seen["plugins"] if plugin["package"] == "good-plugin"]
    assert [(row["name"], row["status"]) for row in good["strategies"]] == [("good", "available")]
    assert {row["name"] for plugin in seen["plugins"] for row in plugin["strategies"]} >= {
        "slow-plugin",
        "stays",
        "loud",
    }

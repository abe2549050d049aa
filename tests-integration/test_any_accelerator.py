"""``strategy="fsdp2"`` on whatever device torch knows, shown on the fake one: by its name, by "auto", or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.testing.refusals import assert_says


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the runs of ``accelerator_runs.py``, in a process with two fake devices."""
    return run_script(tmp_path_factory.mktemp("runs"))


def run_script(directory: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """Run ``accelerator_runs.py`` with two fake devices. Returns what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}  # of tests before
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("accelerator_runs.py")), *arguments],
        cwd=directory,
        env={**kept, "FSDP_FAKE_DEVICES": "2", **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, run.stderr[-3000:]
    parsed: dict[str, Any] = json.loads(lines[0].removeprefix("ANSWERS "))
    return parsed


def test_it_is_found_by_its_name_and_by_auto(answers: dict[str, Any]) -> None:
    assert answers["found"] == {
        "by its name": "fake:1",
        "by auto": "fake:0",
        "the CPU by its name": "cpu",
        "Lightning's own strategy": "cpu",
        "Fabric": "fake:0",
        "how many": 2,
        "statistics": ["active.all.allocated"],
    }


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("another accelerator", ("knows fake", "Install torch_npu (pip install torch-npu)")),
        ("too many devices", ("torch sees 2 here", "Write devices=2 or fewer")),
        ("a device twice", ("[0, 0]", "each once")),
        ("Lightning's own strategy", ("Lightning's own strategies", "SingleDeviceStrategy(device='fake:0')")),
        ("an unknown kind", ("accelerator='fakee': neither", "Did you mean 'fake'?", "group torch.backends")),
    ],
)
def test_what_is_refused(answers: dict[str, Any], question: str, words: tuple[str, ...]) -> None:
    message = answers["refused"][question]
    assert message.startswith("StrategyUnavailableError")
    for each in words:
        assert each in message


def test_devices_that_a_launcher_hides_from_ranks(answers: dict[str, Any]) -> None:
    assert_says(
        answers["hidden"],
        "devices=4 asks for a rank on each of fake [0, 1, 2, 3], and torch sees 2 here.",
        "SLURM has started 4 ranks on this host",
        "Let all of them see the same 4 devices: under SLURM by --gpus-per-node=4, and without --gpus-per-task.",
    )


def test_a_line_of_the_log_names_the_device(answers: dict[str, Any]) -> None:
    used = "fake available: True, used: True (1 device: fake device)"
    assert answers["announced"] == [used, "fake available: True, used: False", used]


def test_gradients_are_scaled_on_the_device_without_a_warning(answers: dict[str, Any]) -> None:
    refused = answers["scaled"].pop("disabled")
    assert_says(refused, "scaler is disabled, and not for 'fake'", "torch.amp.GradScaler('fake')")
    assert answers["scaled"] == {"scales": [2.0**16, 2.0**16], "warnings": []}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("collectives", "no process-group backend is registered with torch for this kind of device"),
        ("random state", "no torch.fake.get_rng_state(device), and dropout and exact resumes need it"),
        ("streams", "no torch.Stream(device), and gathers and reductions run on streams beside computation"),
    ],
)
def test_what_a_device_lacks_is_named(answers: dict[str, Any], part: str, words: str) -> None:
    message = answers["lacking"][part]
    assert message.startswith("StrategyUnavailableError")
    assert words in message
    assert "`fsdp doctor --device fake`" in message


def test_without_pinned_memory_copies_wait(answers: dict[str, Any]) -> None:
    device, *messages = answers["without pinned memory"]
    assert device == "fake:0"
    assert ["pin_memory=True) gives no host memory that 'fake' devices copy from" in each for each in messages] == [
        True
    ]


def test_a_step_waits_for_the_device_no_more_than_one_by_hand(answers: dict[str, Any]) -> None:
    by_hand = answers["waits"]["by hand"]
    assert answers["waits"] == dict.fromkeys(("by hand", "Fabric", "Trainer"), by_hand)


def test_a_checkpoint_moves_between_devices(answers: dict[str, Any]) -> None:
    # weight and bias, and of each two moments and the number of steps
    assert answers["moved"] == {"fake to cpu": [["cpu"], 8, True], "cpu to fake": [["fake"], 8, True]}


def test_what_dtensors_cache_in_the_thread_of_a_device_is_forgotten_with_its_groups(answers: dict[str, Any]) -> None:
    """Results in backward passes named process groups of a former run, which are gone or are others."""
    assert answers["two worlds"] == [True, False, True, False]


def test_a_rank_whose_script_ends_does_first_what_others_wait_for(tmp_path: Path) -> None:
    held_back = {"FSDP_FAKE_DEVICE_DELAY": "1000", "FSDP_FAKE_DEVICE_HELD": "all"}
    assert run_script(tmp_path, "step_and_end", **held_back) == {"finite": [True, True, True, True]}


def test_the_doctor_tries_a_device() -> None:
    command = [sys.executable, "-m", "fsdp_core", "doctor", "--json", "--device"]
    environment = {**os.environ, "FSDP_FAKE_DEVICES": "1"}
    run = subprocess.run([*command, "fake"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    rows = json.loads(run.stdout)["requirements"]
    assert {row["name"]: row["result"] for row in rows if row["result"] != "there"} == {}
    assert run.returncode == 0
    run = subprocess.run([*command, "npu"], env=environment, capture_output=True, text=True, timeout=300, check=False)
    first = json.loads(run.stdout)["requirements"][0]
    assert "torch's accelerator in this process is fake" in first["result"]
    assert run.returncode == 1

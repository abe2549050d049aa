"""Machines that vanish: kill -9 of all ranks, in training and in a save, with the checkpoints in a bucket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
import yaml
from undisturbed import losses_of_one_process
from werkzeug.serving import make_server

from fsdp_core.checkpoint import load, verify
from fsdp_core.testing.launching.forking import start_script
from fsdp_core.testing.launching.processes import fresh_environment
from fsdp_core.testing.oracle import FP32_TOLERANCE

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
BUCKET, RUN = "spot", "runs/1"
SECONDS = 240  # for what takes ten
STEPS = 12


@dataclass
class Bucket:
    """A bucket on an S3 server of this process, which calls a function before each object is put."""

    endpoint: str
    client: Any = None
    before_put: Callable[[str], None] = lambda key: None
    put: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """What it holds."""
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=RUN).get("Contents", ())
        return sorted(entry["Key"].removeprefix(f"{RUN}/") for entry in listed)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], respond: Any) -> Any:
        key = environ["PATH_INFO"].strip("/").partition("/")[2].removeprefix(f"{RUN}/")
        if environ["REQUEST_METHOD"] == "PUT" and key:
            made.before_put(key)
            made.put.append(key)
        return moto(environ, respond)

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    made = Bucket(f"http://127.0.0.1:{server.port}")
    for name, value in {
        "AWS_ENDPOINT_URL": made.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    made.client = boto3.client("s3")
    made.client.create_bucket(Bucket=BUCKET)
    yield made
    for key in made.names():  # moto keeps them as long as this process lives
        made.client.delete_object(Bucket=BUCKET, Key=f"{RUN}/{key}")
    s3fs.S3FileSystem.clear_instance_cache()  # which knows this server
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


@dataclass
class Job:
    """The example, in a session of its own with its ranks."""

    process: BaseProcess
    output: Path

    def kill(self) -> None:
        """Kill all ranks at once, as a machine that vanishes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)

    def end(self) -> int | None:
        """Wait for the end."""
        self.process.join(timeout=SECONDS)
        self.kill()
        return self.process.exitcode

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait until something has happened, while it runs."""
        deadline = time.monotonic() + SECONDS
        while not happened():
            assert self.process.exitcode is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def losses(self) -> list[tuple[int, float]]:
        """The steps that rank 0 has told of, and their losses."""
        lines = [json.loads(line) for line in self.output.read_text().splitlines() if re.fullmatch(r"\{.*\}", line)]
        return [(line["step"], line["loss"]) for line in lines]


def launched(strategy: str, output: Path, pause: float = 0.0) -> Job:
    """Start the example with two ranks."""
    words = (f"s3://{BUCKET}/{RUN}", "--accelerator=cpu", "--devices=2", f"--pause={pause}", f"--strategy={strategy}")
    environment = {**fresh_environment(), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    output.touch()
    script = EXAMPLES / "spot.py"
    return Job(start_script(script, *words, folder=EXAMPLES, output=output, environment=environment, ranks=2), output)


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_killed_in_training_and_in_a_save_it_goes_on_from_the_last_complete_checkpoint(
    bucket: Bucket, tmp_path: Path, strategy: str
) -> None:
    manifest = "last.ckpt/manifest.json"
    want = losses_of_one_process(epochs=3)
    told: list[list[tuple[int, float]]] = []

    first = launched(strategy, tmp_path / "first.txt", pause=0.2)
    first.wait_for(lambda: len(first.losses()) == 4)  # after the save of step 3
    first.kill()
    first.end()
    told.append(first.losses())
    assert manifest in bucket.names()
    saved = verify_at(bucket)

    job: list[Job] = []
    reached = threading.Event()

    def vanish(key: str) -> None:
        """Kill it as it writes a file of shards, when it has written another one."""
        if job and "-rank-" in key and any("-rank-" in one for one in bucket.put[before:]):
            job[0].kill()
            reached.set()

    before = len(bucket.put)
    bucket.before_put = vanish
    job.append(launched(strategy, tmp_path / "second.txt"))
    job[0].end()
    bucket.before_put = lambda key: None
    assert reached.is_set(), job[0].output.read_text()
    told.append(job[0].losses())
    assert told[1][0][0] == saved + 1
    assert verify_at(bucket) == saved, "a save that was killed has replaced the last complete one"
    left = set(bucket.names())

    third = launched(strategy, tmp_path / "third.txt")
    assert third.end() == 0, third.output.read_text()
    told.append(third.losses())
    assert told[2][0][0] == saved + 1
    assert told[2][-1][0] == STEPS
    for losses in told:
        for step, loss in losses:
            assert loss == pytest.approx(want[step], abs=FP32_TOLERANCE), f"step {step}"
    assert verify_at(bucket) == STEPS
    assert not left & set(bucket.names()) - {manifest}, "what the killed save left is still there"


def verify_at(bucket: Bucket) -> int:
    """Check the checkpoint in the bucket, and return the step that it is of."""
    url = f"s3://{BUCKET}/{RUN}/last.ckpt"
    verify(url)
    return int(load(url)["trainer"]["global_step"])


def test_the_job_of_skypilot_is_one() -> None:
    job = yaml.safe_load((EXAMPLES / "sky.yaml").read_text())
    assert job.keys() == {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
    assert job["resources"]["use_spot"] is True
    assert "spot.py $CHECKPOINTS" in job["run"]
    assert job["envs"]["CHECKPOINTS"].startswith("s3://")
    script = job["setup"] + job["run"]
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr

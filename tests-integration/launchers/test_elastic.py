"""torchrun with a number of hosts that changes: one is lost, and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from example import GLOBAL_BATCH, assert_as_one_process, said
from hosts import TORCHRUN, Host, Run

from fsdp_core.checkpoint import load

#: torchrun waits half a minute for further hosts, and as long until it takes one for lost.
QUICKLY = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_a_host_is_lost_and_comes_back(hosts: tuple[Host, Host], tmp_path: Path, strategy: str) -> None:
    """Two hosts, then one, then two: in the end each row was trained on as one process does, once."""
    steady, other = hosts
    # torchrun keeps the first round's address of rank 0, which a host that comes back would wait for
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GATES": "2:5,1:8", "GATES_IN": str(tmp_path)}
    script = (str(Path(__file__).parent / "gated.py"), strategy, "--folder", str(tmp_path / "runs"), "--steps=12")
    # as pods do: torchrun's options are variables too
    variables |= {"PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "1", "PET_MAX_RESTARTS": "3", "PET_RDZV_CONF": QUICKLY}
    variables |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{steady.name}:29400", "PET_RDZV_ID": "run"}

    def start(host: Host) -> Run:
        rounds = 3  # each with a rank of its own
        return host.start(TORCHRUN, *script, folder=tmp_path, environment=variables, ranks=rounds)

    first, second = start(steady), start(other)
    for run in (first, second):
        run.until("waits at 2:5")
    other.lose()  # at step 5, after the checkpoint of step 4
    (tmp_path / "2-5").touch()
    first.until("waits at 1:8")
    third = start(other)  # the steady host's rank gets SIGTERM at step 8, does it, saves, and both go on
    assert first.ended() == 0, first.told[-8000:]
    assert third.ended() == 0, third.told[-8000:]

    last = load(tmp_path / "runs" / strategy / "trainer/last.ckpt")
    attempts = last["trainer"]["fsdp_core"]["attempts"]
    assert [(one["ranks"], one["samples"]) for one in attempts] == [
        (2, GLOBAL_BATCH),
        (1, GLOBAL_BATCH),
        (2, GLOBAL_BATCH),
    ]
    of_first = said(first.told, "trainer")
    began_alone = next(at for at, one in enumerate(of_first) if one["step"] < of_first[max(at - 1, 0)]["step"])
    begins = [one["step"] for one in attempts]
    assert begins == [0, of_first[began_alone]["step"], 9], "the host that came back has cost a step"
    assert begins[1] == 4, "it has not gone on from the newest checkpoint"
    together = of_first[:began_alone] + said(second.told, "trainer")
    alone = [one for one in of_first[began_alone:] if one["step"] < 9]
    at_last = [one for one in of_first[began_alone:] if one["step"] >= 9] + said(third.told, "trainer")
    # what went on of each attempt is all that one process does, each row once
    assert_as_one_process(together, range(4))
    assert_as_one_process(alone, range(4, 9))
    assert_as_one_process(at_last, range(9, 12))
    assert {one["step"] for one in alone + at_last} == set(range(4, 12))

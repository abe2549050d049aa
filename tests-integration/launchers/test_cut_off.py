"""Two hosts whose cable is cut amid training: each learns that the other does not answer, and ends."""

from __future__ import annotations

from pathlib import Path

from hosts import Host

SCRIPT = Path(__file__).parents[1] / "a_rank_is_gone.py"


def test_hosts_that_are_cut_off_name_each_other(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The kernel tries for a minute; half an hour's hang_timeout is not waited for."""
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "run"}
    variables |= {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": "29400", "HANG_SECONDS": "1800"}
    runs = [
        host.start(
            SCRIPT,
            *("cut-off", "0", "fabric"),
            folder=tmp_path,
            environment={**variables, "RANK": str(number), "GROUP_RANK": str(number)},
        )
        for number, host in enumerate(hosts)
    ]
    for run in runs:
        run.until("is at the step")
    hosts[1].do("ip", "link", "set", "cable", "down")
    (tmp_path / "cut").touch()
    for number, run in enumerate(runs):
        assert run.ended() == 1, run.told[-6000:]
        assert f"rank {1 - number} on host-{'ba'[number]} (process " in run.told
        assert "was lost at step 5: its host has not answered for a minute" in run.told, run.told[-6000:]
    assert not any(host.processes() for host in hosts)

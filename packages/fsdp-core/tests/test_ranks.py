"""The launcher that every multi-rank test stands on."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_core.testing import RankError, RankPool
from fsdp_core.testing.launching.forking import PATIENCE
from fsdp_core.testing.launching.one_process_ranks import OneProcessRanks
from fsdp_core.testing.refusals import refusal


def leave_variables() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["OMP_NUM_THREADS"] = "7"
    del os.environ["PATH"]


def variables() -> tuple[str | None, str, bool, str]:
    return os.environ.get("LEFT_BEHIND"), os.environ["OMP_NUM_THREADS"], "PATH" in os.environ, os.environ["RANK"]


def test_environment_variables_are_taken_back() -> None:
    with RankPool() as ranks:
        ranks.run(2, leave_variables)
        assert ranks.run(2, variables) == [(None, "1", True, "0"), (None, "1", True, "1")]


def meet_at_the_port() -> tuple[bool, int]:
    """Whether a stranger could have taken the port before rank 0 did, and how many ranks met at it."""
    with socket.socket() as stranger:
        try:
            stranger.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            taken = True
        except OSError:
            taken = False
    dist.init_process_group("gloo")
    together = torch.ones(())
    dist.all_reduce(together)
    return taken, int(together)


def test_nobody_takes_the_port_at_which_ranks_meet() -> None:
    with RankPool() as ranks:
        assert ranks.run(2, meet_at_the_port) == [(False, 2), (False, 2)]


def tensors() -> list[torch.Tensor]:
    whole = torch.arange(6.0).view(2, 3)
    others = [
        whole.bfloat16(),
        whole > 2,
        whole.to_sparse(),
        whole.clone().requires_grad_(True),
        torch.ones(1, device="meta"),
    ]
    return [whole, whole.T, whole[0, 1], whole[:0], whole.double(), whole.long(), *others]


def test_tensors_of_any_kind_are_returned() -> None:
    with RankPool() as ranks:
        (returned,) = ranks.run(1, tensors)
    for got, want in zip(returned, tensors(), strict=True):
        assert (got.dtype, got.device, got.requires_grad) == (want.dtype, want.device, want.requires_grad)
        assert want.is_meta or torch.equal(got.detach().to_dense(), want.detach().to_dense())
    returned[0].add_(1)  # its memory can be written to


class Refusal(Exception):
    """One that goes on."""


def fail_on(rank: int, error: BaseException) -> None:
    if int(os.environ["RANK"]) == rank:
        raise error
    time.sleep(1.0)
    raise ConnectionError("the other rank is gone")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("weight differs"), "ValueError: weight differs"),
        (Refusal("can't do that.\nLeave it out."), "test_ranks.Refusal: can't do that."),
        (AssertionError(), "AssertionError"),
        (SyntaxError("invalid syntax", ("model.py", 1, 1, "x = = 1")), "SyntaxError: invalid syntax"),
    ],
    ids=["one line", "goes on", "says nothing", "comes after its place"],
)
def test_an_error_begins_with_what_the_first_rank_that_failed_has_raised(
    rank: int, error: BaseException, summary: str
) -> None:
    with RankPool() as ranks:
        rest = assert_begins_with_cause(refusal(RankError, lambda: ranks.run(2, fail_on, rank, error)), summary, rank)
    assert rest.count("Traceback (most recent call last):") == 2
    assert "ConnectionError: the other rank is gone" in rest


def assert_begins_with_cause(message: str, summary: str, rank: int) -> list[str]:
    """The first lines of an error of two ranks say what has failed where; gives the others, which are of both ranks."""
    first, where, *rest = message.splitlines()
    assert (first, where) == (summary, f"on rank {rank} of 2, in fail_on:")
    assert [line for line in rest if line.startswith("---")] == ["--- rank 0 of 2", "--- rank 1 of 2"]
    return rest


def leave(status: int) -> None:
    os._exit(status)


def answer_with(value: object) -> object:
    return lambda: value


def assert_names_what_became_of_ranks(kind: type[RankPool | OneProcessRanks]) -> None:
    with kind() as ranks:
        for call, message in (
            (lambda: ranks.run(1, leave, 3), r"the process died with exit code 3\n"),
            (lambda: ranks.run(1, time.sleep, 60, timeout=0.5), r"no answer within 0.5 s\n"),
            (lambda: ranks.run(1, answer_with, 1), r"(\w+\.)*(AttributeError|PicklingError): Can't pickle"),
        ):
            with pytest.raises(RankError, match=f"^{message}"):
                call()


def test_an_error_begins_with_what_has_become_of_a_rank_that_raised_nothing() -> None:
    assert_names_what_became_of_ranks(RankPool)


def test_a_time_limit_can_be_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """For slow devices, by whoever runs the suite."""
    monkeypatch.setenv(PATIENCE, "0.001")
    with RankPool() as ranks, pytest.raises(RankError, match=r"^no answer within 0.1 s\n"):
        ranks.run(1, time.sleep, 60, timeout=100)


def crash(told: str) -> None:
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
    signal.raise_signal(signal.SIGSEGV)


def test_a_rank_that_crashes_says_where(tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    with RankPool() as ranks, pytest.raises(RankError, match=r"^the process died with exit code -11\n"):
        ranks.run(1, crash, str(told))
    assert re.search(r"Segmentation fault\n(.*\n)+.*, line \d+ in crash\n", told.read_text())


#: What gloo says where a peer closes a connection while ranks connect; it can't be made to happen each time.
NOT_MET = "Gloo connectFullMesh failed with [.../gloo/transport/tcp/pair.cc:554] Connection closed by peer"


def meet_after(failed: int, folder: str) -> tuple[int, int]:
    """Which attempt this is, and the sum over the ranks; in the first ones rank 1 is not connected."""
    rank = os.environ["RANK"]
    attempts = Path(folder, rank)
    attempts.write_text((attempts.read_text() if attempts.exists() else "") + "x")
    attempt = len(attempts.read_text())
    if attempt <= failed and rank == "1":
        raise RuntimeError(NOT_MET)
    dist.init_process_group("gloo")  # where rank 0 waits for rank 1
    together = torch.ones(())
    dist.all_reduce(together)
    return attempt, int(together)


def test_ranks_that_gloo_does_not_connect_meet_again(tmp_path: Path) -> None:
    with (
        RankPool() as ranks,
        pytest.warns(UserWarning, match=r"gloo failed to connect the ranks \(RuntimeError: Gloo connectFull"),
    ):
        assert ranks.run(2, meet_after, 1, str(tmp_path)) == [(2, 2), (2, 2)]


def fail_always(folder: str, error: str) -> None:
    with Path(folder, os.environ["RANK"]).open("a") as file:
        file.write("x")
    raise RuntimeError(error)


@pytest.mark.filterwarnings("ignore:gloo failed to connect")
@pytest.mark.parametrize(("error", "attempts"), [(NOT_MET, 3), ("something else", 1)])
def test_nothing_else_is_tried_again_and_not_for_ever(tmp_path: Path, error: str, attempts: int) -> None:
    with RankPool() as ranks, pytest.raises(RankError, match=f"^RuntimeError: {re.escape(error)}"):
        ranks.run(1, fail_always, str(tmp_path), error)
    assert len((tmp_path / "0").read_text()) == attempts

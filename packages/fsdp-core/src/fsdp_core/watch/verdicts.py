"""Why a run can't go on, and the message that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fsdp_core.watch.locations import Location

__all__ = [
    "PATIENCE",
    "Member",
    "Report",
    "Verdict",
    "describe_slow_wait",
    "describe_unanswered",
    "name_ranks",
    "verdict_of_error",
    "verdict_of_hang",
    "verdict_of_loss",
]

#: How many times ``hang_timeout`` ranks wait for what one rank does alone, such as a download in ``prepare_data()``.
PATIENCE = 12

_RESUME_ADVICE = (
    "Start the same command again to go on from the last complete checkpoint: trainer.fit(..., ckpt_path='last'), or "
    "fabric.load() of it."
)

_COLLECTIVE_ADVICE = (
    "All ranks must call what communicates, equally often: nothing of it under `if rank == 0:`, and as many batches on "
    "each. hang_timeout=timedelta(hours=2) gives them longer; hang_timeout=None lets them wait."
)

_WAITING_ADVICE = (
    f"Ranks wait {PATIENCE} times hang_timeout for what one does alone in prepare_data() and rank_zero_first(): "
    "hang_timeout=timedelta(hours=2) gives it a day, hang_timeout=None lets them wait. What takes longer is done "
    "before the ranks start."
)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank as the others see it."""

    rank: int
    host: str
    pid: int
    started: str = ""

    def described(self) -> str:
        """The rank in words.

        Example:
            >>> Member(rank=2, host="node-b", pid=4711).described()
            'rank 2 on node-b (process 4711)'
        """
        return f"rank {self.rank} on {self.host} (process {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank answers when others have waited for too long: how far it is, and where it stands."""

    progress: str
    location: Location


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the ranks end.

    Attributes:
        kind: ``"lost"``, ``"raised"`` or ``"hang"``.
        message: The one message that is written.
        kill: Ranks that can't end by themselves.
    """

    kind: str
    message: str
    kill: tuple[Member, ...] = field(default=())


def name_ranks(members: Collection[Member]) -> str:
    """Several ranks in words.

    Example:
        >>> name_ranks([Member(rank=2, host="b", pid=4), Member(rank=3, host="b", pid=5)])
        'rank 2 on b (process 4), rank 3 on b (process 5)'
    """
    return ", ".join(member.described() for member in sorted(members, key=lambda member: member.rank))


def verdict_of_loss(members: Collection[Member], progress: str, *, host_is_silent: bool = False) -> Verdict:
    """Ranks whose processes have ended without a word, or whose host does not answer.

    Args:
        members: The ranks.
        progress: How far the rank that notices it is, in words.
        host_is_silent: Whether their host has not answered for a minute.
    """
    verb, their, processes = ("was", "its", "process") if len(members) == 1 else ("were", "their", "processes")
    cause = (
        f"{their} {processes} ended without a word, as after a kill, when memory runs out, or when gloo aborts because "
        "ranks exchange different things (gloo::EnforceNotMet in its log)"
    )
    if host_is_silent:
        cause = f"{their} host has not answered for a minute"
    return Verdict(
        kind="lost",
        message=(
            f"{name_ranks(members)} {verb} lost {progress}: {cause}. The others end too: they can't train without "
            f"{their} shards.\n{_RESUME_ADVICE} The log of {their} host, or of the scheduler, may say why (dmesg, for "
            "memory)."
        ),
    )


def verdict_of_error(member: Member, error: str, progress: str, advice: str = "") -> Verdict:
    """A rank that an exception has ended.

    Args:
        member: The rank.
        error: The exception, in one line.
        progress: How far the rank was, in words.
        advice: What the exception itself says to do, without which it would come again.
    """
    return Verdict(
        kind="raised",
        message=(
            f"{member.described()} has ended {progress} with {error.rstrip('.')}. The others end too: they can't train "
            "without its shards.\n"
            f"{advice or f'Mend what the traceback that it wrote tells of. {_RESUME_ADVICE}'}"
        ),
    )


def verdict_of_hang(
    members: Collection[Member],
    reports: Mapping[int, Report],
    ended: Collection[int],
    waited: float,
) -> Verdict:
    """Ranks that have waited for others for too long.

    The rank that is behind is the one that did not answer, or that has ended, or that does not wait; otherwise the one
    that has entered the fewest collectives; otherwise the one that waits at the place where the fewest ranks wait. If
    several places have the fewest, as with two ranks, none is called behind, and the message names all places.

    Args:
        members: All ranks that were watched.
        reports: Their reports, by rank, without those that did not answer.
        ended: Ranks whose script has ended.
        waited: For how many seconds.
    """
    silent = [member for member in members if member.rank not in reports and member.rank not in ended]
    ended_members = [member for member in members if member.rank in ended]
    running = [member for member in members if member.rank in reports and not reports[member.rank].location.waits]
    kill: tuple[Member, ...] = ()
    if silent:
        behind = silent
        kill = tuple(silent)  # they can't end by themselves
        state = "does not answer: its process is stopped, or a call in it holds Python's lock"
    elif ended_members:
        behind = ended_members
        state = "has ended its script"
    elif running:
        behind = _with_fewest_collectives(running, reports)
        state = _describe_location(reports[behind[0].rank])
    else:
        behind = _find_behind(members, reports)
        if not behind:
            return Verdict(kind="hang", message=_describe_all_locations(members, reports, waited))
        state = f"{_describe_location(reports[behind[0].rank])}, {_describe_collective(reports[behind[0].rank])}"
    answered = [member for member in members if member.rank in reports and member not in behind]
    is_awaited = any(reports[member.rank].location.awaited for member in answered)
    waiting = (
        sorted((member for member in answered if reports[member.rank].location.waits), key=lambda member: member.rank)
        or answered
    )
    waiters = ""
    if waiting:
        waiting_report = reports[waiting[0].rank]
        waiters = (
            f" Rank {', '.join(str(member.rank) for member in waiting[:8])}{', …' if len(waiting) > 8 else ''} "
            f"{'waits' if len(waiting) == 1 else 'wait'} "
            f"{_describe_location(waiting_report).removeprefix('stands ')} {waiting_report.progress}, "
            f"{_describe_collective(waiting_report)}."
        )
    first = behind[0]
    progress = f" {reports[first.rank].progress}" if first.rank in reports else ""
    more = f" So do {name_ranks(behind[1:])}." if len(behind) > 1 else ""
    return Verdict(
        kind="hang",
        message=(
            f"ranks have waited for each other for {waited:g} s. {first.described()} is behind{progress}: it {state}."
            f"{more}{waiters}\n"
            f"Every rank that could has written its stack above. Look at what that rank does there. "
            f"{_WAITING_ADVICE if is_awaited else _COLLECTIVE_ADVICE}"
        ),
        kill=kill,
    )


def describe_slow_wait(members: Collection[Member], reports: Mapping[int, Report], waited: float) -> str:
    """What is written while ranks go on waiting for what another one does alone.

    Args:
        members: All ranks that are watched.
        reports: Their reports, by rank, without those that did not answer.
        waited: For how many seconds.
    """
    waiting = [member for member in members if member.rank in reports and reports[member.rank].location.awaited]
    silent = [member for member in members if member.rank not in reports]
    busy = [member for member in members if member.rank in reports and not reports[member.rank].location.waits]
    if not waiting or not (silent or busy):
        return ""
    descriptions = [f"{member.described()} {_describe_location(reports[member.rank])}" for member in busy]
    if silent:
        descriptions.append(f"{name_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    awaited = reports[waiting[0].rank].location.awaited
    return (
        f"{name_ranks(waiting[:8])}{', …' if len(waiting) > 8 else ''} {'has' if len(waiting) == 1 else 'have'} waited "
        f"for {waited:g} s for {awaited}: {'; '.join(descriptions)}. The run ends if that takes {PATIENCE * waited:g} "
        "s.\n"
        f"{_WAITING_ADVICE}"
    )


def describe_unanswered(member: Member, first: Member, waited: str, *, may_go_on: bool) -> str:
    """What a rank writes about rank 0, which does not answer.

    Args:
        member: The rank.
        first: Rank 0.
        waited: For how long, how far it is and for what, in words.
        may_go_on: Whether the ranks go on waiting.
    """
    advice = _WAITING_ADVICE
    if not may_go_on:
        advice = (
            "See the stacks above. hang_timeout=timedelta(hours=2) gives it longer; hang_timeout=None lets ranks wait."
        )
    return (
        f"rank {member.rank} has waited for {waited}, and {first.described()} does not answer: its process is stopped, "
        f"or a call in it holds Python's lock.\n{advice}"
    )


def _describe_location(report: Report) -> str:
    return f"stands at {report.location.described()}"


def _describe_collective(report: Report) -> str:
    location = report.location
    if not location.collective:
        return "in a collective"
    return f"and the last collective that it has entered is {location.collective}"


def _with_fewest_collectives(members: Collection[Member], reports: Mapping[int, Report]) -> list[Member]:
    ordered = sorted(members, key=lambda member: (reports[member.rank].location.sequence, member.rank))
    fewest = reports[ordered[0].rank].location.sequence
    return [member for member in ordered if reports[member.rank].location.sequence == fewest]


def _find_behind(members: Collection[Member], reports: Mapping[int, Report]) -> list[Member]:
    """Of ranks that all wait: those that have entered fewer collectives, or those at the place with fewest ranks."""
    fewest = _with_fewest_collectives(members, reports)
    if len(fewest) < len(members):
        return fewest
    rarest, *larger = sorted(_group_by_location(members, reports), key=len)
    return rarest if larger and len(larger[0]) > len(rarest) else []


def _group_by_location(members: Collection[Member], reports: Mapping[int, Report]) -> list[list[Member]]:
    """The ranks at each place: the user's line, and the collective."""
    groups: dict[tuple[str, str], list[Member]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        location = reports[member.rank].location
        groups.setdefault((location.user_line, location.collective), []).append(member)
    return list(groups.values())


def _describe_all_locations(members: Collection[Member], reports: Mapping[int, Report], waited: float) -> str:
    descriptions = []
    for group in _group_by_location(members, reports):
        report = reports[group[0].rank]
        verb = "waits" if len(group) == 1 else "wait"
        location = _describe_location(report).removeprefix("stands ")
        descriptions.append(
            f"{name_ranks(group[:8])}{', …' if len(group) > 8 else ''} {verb} {report.progress}, {location}, "
            f"{_describe_collective(report)}."
        )
    if len(descriptions) == 1:
        distribution, explanation = (
            "all at one place",
            "The network between them may be gone, or they exchange different shapes.",
        )
    else:
        distribution = "at different places"
        explanation = (
            "Some have left out a call that the others have made, such as backward(), or made one alone, as in a loop "
            "that each rank ends by its own values: look at what comes before these places."
        )
    return (
        f"ranks have waited for each other for {waited:g} s, {distribution}. {' '.join(descriptions)}\n"
        f"{explanation} Every rank has written its stack above. {_COLLECTIVE_ADVICE}"
    )

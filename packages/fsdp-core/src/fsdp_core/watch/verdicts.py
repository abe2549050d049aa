"""Why a run can't go on, and the message that says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fsdp_core.watch.locations import Location

__all__ = ["PATIENCE", "Member", "Report", "Verdict", "hang", "lost", "named", "raised", "slow", "unanswered"]

#: How many times ``hang_timeout`` ranks wait for what one does alone, such as a download in ``prepare_data()``.
PATIENCE = 12

_GO_ON = (
    "Start the same command again to go on from the last complete checkpoint: trainer.fit(..., ckpt_path='last'), or "
    "fabric.load() of it."
)

_ALL_RANKS = (
    "All ranks must call what communicates, equally often: nothing of it under `if rank == 0:`, and as many batches on "
    "each. hang_timeout=timedelta(hours=2) gives them longer; hang_timeout=None lets them wait."
)

_ONE_ALONE = (
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
    """What a rank says when others have waited for too long: how far it is, and where it stands."""

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


def named(members: Collection[Member]) -> str:
    """Several ranks in words.

    Example:
        >>> named([Member(rank=2, host="b", pid=4), Member(rank=3, host="b", pid=5)])
        'rank 2 on b (process 4), rank 3 on b (process 5)'
    """
    return ", ".join(one.described() for one in sorted(members, key=lambda one: one.rank))


def lost(members: Collection[Member], progress: str, *, host_is_silent: bool = False) -> Verdict:
    """Ranks whose processes have ended without a word, or whose host does not answer.

    Args:
        members: The ranks.
        progress: How far the rank that notices it is, in words.
        host_is_silent: Whether their host has not answered for a minute.
    """
    was, its, process = ("was", "its", "process") if len(members) == 1 else ("were", "their", "processes")
    why = (
        f"{its} {process} ended without a word, as after a kill, when memory runs out, or when gloo aborts because "
        "ranks exchange different things (gloo::EnforceNotMet in its log)"
    )
    if host_is_silent:
        why = f"{its} host has not answered for a minute"
    return Verdict(
        kind="lost",
        message=(
            f"{named(members)} {was} lost {progress}: {why}. The others end too: they can't train without {its} "
            f"shards.\n{_GO_ON} The log of {its} host, or of the scheduler, may say why (dmesg, for memory)."
        ),
    )


def raised(member: Member, error: str, progress: str, advice: str = "") -> Verdict:
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
            f"{advice or f'Mend what the traceback that it wrote tells of. {_GO_ON}'}"
        ),
    )


def hang(
    members: Collection[Member],
    reports: Mapping[int, Report],
    ended: Collection[int],
    waited: float,
) -> Verdict:
    """Ranks that have waited for others for too long.

    The rank that is behind is the one that did not answer, or that has ended, or that does not wait; otherwise the one
    that has entered fewer collectives, or stands elsewhere than most. Where as many stand at one place as at another,
    as two ranks do, none is called behind, and all places are told.

    Args:
        members: All ranks that were watched.
        reports: What they have said, by rank; none of those that did not answer.
        ended: Ranks whose script has ended.
        waited: For how many seconds.
    """
    silent = [one for one in members if one.rank not in reports and one.rank not in ended]
    gone = [one for one in members if one.rank in ended]
    free = [one for one in members if one.rank in reports and not reports[one.rank].location.waits]
    kill: tuple[Member, ...] = ()
    if silent:
        behind, kill = silent, tuple(silent)
        what = "does not answer: its process is stopped, or a call in it holds Python's lock"
    elif gone:
        behind, what = gone, "has ended its script"
    elif free:
        behind = _fewest(free, reports)
        what = _standing(reports[behind[0].rank])
    else:
        behind = _apart(members, reports)
        if not behind:
            return Verdict(kind="hang", message=_at_their_places(members, reports, waited))
        what = f"{_standing(reports[behind[0].rank])}, {_last(reports[behind[0].rank])}"
    others = [one for one in members if one.rank in reports and one not in behind]
    is_awaited = any(reports[one.rank].location.awaited for one in others)
    waiting = sorted((one for one in others if reports[one.rank].location.waits), key=lambda one: one.rank) or others
    waiters = ""
    if waiting:
        shown = reports[waiting[0].rank]
        waiters = (
            f" Rank {', '.join(str(one.rank) for one in waiting[:8])}{', …' if len(waiting) > 8 else ''} "
            f"{'waits' if len(waiting) == 1 else 'wait'} {_standing(shown).removeprefix('stands ')} {shown.progress}, "
            f"{_last(shown)}."
        )
    first = behind[0]
    progress = f" {reports[first.rank].progress}" if first.rank in reports else ""
    more = f" So do {named(behind[1:])}." if len(behind) > 1 else ""
    return Verdict(
        kind="hang",
        message=(
            f"ranks have waited for each other for {waited:g} s. {first.described()} is behind{progress}: it {what}."
            f"{more}{waiters}\n"
            f"Every rank that could has written its stack above. Look at what that rank does there. "
            f"{_ONE_ALONE if is_awaited else _ALL_RANKS}"
        ),
        kill=kill,
    )


def slow(members: Collection[Member], reports: Mapping[int, Report], waited: float) -> str:
    """What is written while ranks go on waiting for what another one does alone.

    Args:
        members: All ranks that are watched.
        reports: What they have said, by rank; none of those that did not answer.
        waited: For how many seconds.
    """
    waiting = [one for one in members if one.rank in reports and reports[one.rank].location.awaited]
    silent = [one for one in members if one.rank not in reports]
    busy = [one for one in members if one.rank in reports and not reports[one.rank].location.waits]
    if not waiting or not (silent or busy):
        return ""
    told = [f"{one.described()} {_standing(reports[one.rank])}" for one in busy]
    if silent:
        told.append(f"{named(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    awaited = reports[waiting[0].rank].location.awaited
    return (
        f"{named(waiting[:8])}{', …' if len(waiting) > 8 else ''} {'has' if len(waiting) == 1 else 'have'} waited for "
        f"{waited:g} s for {awaited}: {'; '.join(told)}. The run ends if that takes {PATIENCE * waited:g} s.\n"
        f"{_ONE_ALONE}"
    )


def unanswered(member: Member, first: Member, waited: str, *, may_go_on: bool) -> str:
    """What a rank writes about rank 0, which does not answer.

    Args:
        member: The rank.
        first: Rank 0.
        waited: For how long, how far it is and for what, in words.
        may_go_on: Whether the ranks go on waiting.
    """
    advice = _ONE_ALONE
    if not may_go_on:
        advice = (
            "See the stacks above. hang_timeout=timedelta(hours=2) gives it longer; hang_timeout=None lets ranks wait."
        )
    return (
        f"rank {member.rank} has waited for {waited}, and {first.described()} does not answer: its process is stopped, "
        f"or a call in it holds Python's lock.\n{advice}"
    )


def _standing(report: Report) -> str:
    return f"stands at {report.location.described()}"


def _last(report: Report) -> str:
    where = report.location
    return (
        f"and the last collective that it has entered is {where.collective}" if where.collective else "in a collective"
    )


def _fewest(members: Collection[Member], reports: Mapping[int, Report]) -> list[Member]:
    by_sequence = sorted(members, key=lambda one: (reports[one.rank].location.sequence, one.rank))
    least = reports[by_sequence[0].rank].location.sequence
    return [one for one in by_sequence if reports[one.rank].location.sequence == least]


def _apart(members: Collection[Member], reports: Mapping[int, Report]) -> list[Member]:
    """Of ranks that all wait: those that have entered fewer collectives, or those at the rarest place, if one is."""
    fewest = _fewest(members, reports)
    if len(fewest) < len(members):
        return fewest
    rarest, *others = sorted(_by_place(members, reports), key=len)
    return rarest if others and len(others[0]) > len(rarest) else []


def _by_place(members: Collection[Member], reports: Mapping[int, Report]) -> list[list[Member]]:
    """The ranks at each place: the user's line, and the collective."""
    places: dict[tuple[str, str], list[Member]] = {}
    for one in sorted(members, key=lambda one: one.rank):
        where = reports[one.rank].location
        places.setdefault((where.users, where.collective), []).append(one)
    return list(places.values())


def _at_their_places(members: Collection[Member], reports: Mapping[int, Report], waited: float) -> str:
    told = []
    for here in _by_place(members, reports):
        shown = reports[here[0].rank]
        verb = "waits" if len(here) == 1 else "wait"
        place = _standing(shown).removeprefix("stands ")
        told.append(
            f"{named(here[:8])}{', …' if len(here) > 8 else ''} {verb} {shown.progress}, {place}, {_last(shown)}."
        )
    if len(told) == 1:
        where, why = "all at one place", "The network between them may be gone, or they exchange different shapes."
    else:
        where = "at different places"
        why = (
            "Some have left out a call that the others have made, such as backward(), or made one alone: look at what "
            "comes before these places."
        )
    return (
        f"ranks have waited for each other for {waited:g} s, {where}. {' '.join(told)}\n"
        f"{why} Every rank has written its stack above. {_ALL_RANKS}"
    )

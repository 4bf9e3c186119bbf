"""Decide whether a server is behind the published model, and why: no other module does.

`lag` compares one version with the model: the doctor, `serve-model status` and the agent use it. `judge`
makes findings from servers' answers. Each finding has a code, the same wherever it is printed;
docs/reference/findings.md explains each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from exporter.delta.spans import Span, plan_chain
from exporter.errors import CallFailed, ManifestError, PositionError
from exporter.newer_python import StrEnum
from exporter.publish.kept_export import look_at_trainer
from exporter.publish.model import Log, Model, Published
from exporter.publish.served import Served
from exporter.publish.versions import newest_of, read_head
from exporter.storage.local_paths import quoted
from exporter.terminal.progress import count, human_time


class Level(StrEnum):
    """The severity of a finding, the worst first; `BUSY` and `GOOD` need no action."""

    WRONG = "wrong"
    WARNING = "warning"
    BUSY = "busy"
    GOOD = "good"

    @property
    def on_page(self) -> str:
        """The level's name on the agent's page and in `/status.json`: `wrong` is `bad` there.

        Alerts read these names.
        """
        return "bad" if self is Level.WRONG else self.value


class Code(StrEnum):
    """The kind of a finding, the worst first, with its word for a row of a table and its usual level."""

    word: str
    level: Level
    rank: int

    def __new__(cls, code: str, word: str, level: Level) -> Code:
        """Make a member; its rank is its place in the list, from 0."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.word, member.level, member.rank = word, level, len(cls.__members__)
        return member

    DAMAGED = "damaged", "damaged", Level.WRONG
    DISK_FULL = "disk-full", "disk full", Level.WRONG
    UNTRUSTED = "untrusted", "not trusted", Level.WRONG
    NO_WAY = "no-way", "no way", Level.WRONG
    NOT_FINITE = "not-finite", "not finite", Level.WRONG
    NOT_LOADABLE = "not-loadable", "not loadable", Level.WRONG
    UNREADABLE = "unreadable", "unreadable", Level.WRONG
    CHECKPOINT = "checkpoint", "checkpoint", Level.WRONG
    UNEXAMINED = "unexamined", "not examined", Level.WRONG
    AGENT_DOWN = "agent-down", "agent down", Level.WRONG
    SILENT = "silent", "silent", Level.WRONG
    GOLDEN = "golden", "golden requests fail", Level.WRONG
    ROLLED_BACK = "rolled-back", "rolled back", Level.WRONG
    DIFFERS = "differs", "wrong values", Level.WRONG
    HOLD_UNREADABLE = "hold-unreadable", "held", Level.WRONG
    PUBLICATIONS_HELD = "publications-held", "held", Level.WRONG
    UNSEEN = "unseen", "unseen", Level.WRONG
    BASE_WANTED = "base-wanted", "base wanted", Level.WRONG
    QUARANTINED = "quarantined", "delta refused", Level.WRONG
    NO_REPLICA = "no-replica", "no replica", Level.WRONG
    DOWN = "down", "down", Level.WRONG
    ABSENT = "absent", "serves nothing", Level.WRONG
    NOT_UPDATABLE = "not-updatable", "not updatable", Level.WRONG
    STUCK = "stuck", "stuck", Level.WRONG
    REFUSES = "refuses", "refuses a delta", Level.WRONG
    LATE = "late", "late", Level.WRONG
    PUBLISHER_SILENT = "publisher-silent", "publisher silent", Level.WARNING
    OVERLAY = "overlay", "overlay fills", Level.WARNING
    TWO_PUBLISHERS = "two-publishers", "two publishers", Level.WARNING
    RESTARTS = "restarts", "restarts", Level.WARNING
    STORE = "store", "store unseen", Level.WARNING
    WITHHELD = "withheld", "withheld", Level.WARNING
    CANARY_LATE = "canary-late", "canary waits", Level.WARNING
    HELD = "held", "held", Level.WARNING
    BEYOND_HOLD = "beyond-hold", "beyond the hold", Level.WARNING
    LOADING = "loading", "loading", Level.WARNING
    UNKNOWN = "unknown", "unknown", Level.WARNING
    FOREIGN = "foreign", "foreign", Level.WARNING
    ROOM = "room", "no room", Level.WARNING
    ORPHANS = "orphans", "orphans", Level.WARNING
    LEFT_OVERS = "left-overs", "left-overs", Level.WARNING
    CLOCK = "clock", "clock", Level.WARNING
    DURABILITY = "durability", "not durable", Level.WARNING
    KEPT_OUT = "kept-out", "kept out", Level.WARNING
    NOT_WRITABLE = "not-writable", "not writable", Level.WARNING
    COPIES = "copies", "copies", Level.WARNING
    FETCHED_WHOLE = "fetched-whole", "fetched whole", Level.WARNING
    OVERWRITTEN = "overwritten", "overwritten", Level.WARNING
    TABLE_FULL = "table-full", "table fills", Level.WARNING
    NOT_MAPPED = "not-mapped", "not mapped", Level.WARNING
    WILD = "wild", "wild values", Level.WARNING
    BUDGET = "budget", "budget too small", Level.WARNING
    TAG_GONE = "tag-gone", "tag gone", Level.WARNING
    UNASKED = "unasked", "not asked yet", Level.BUSY
    CANARY = "canary", "waits for canary", Level.BUSY
    UPDATING = "updating", "updating", Level.BUSY
    FRESH = "fresh", "fresh", Level.GOOD


class Finding(Struct, frozen=True):
    """A finding: its text, its cause or since when, and the command that helps; the last two may be empty.

    `known_level` replaces the code's level where more is known. `model` is its name where there are several.
    `check` names what could not be examined, with the code UNEXAMINED; other codes have the result.
    """

    code: Code
    text: str
    why: str = ""
    command: str = ""
    known_level: Level | None = None
    model: str = ""
    check: str = ""

    @property
    def level(self) -> Level:
        """The known level, else the code's."""
        return self.known_level or self.code.level


class Limits(Struct, frozen=True):
    """The time after which a server that lacks a publication is late, in seconds."""

    late_s: float


class Server(Struct, frozen=True):
    """A server's answers about a model; `failure` says why there are none."""

    address: str
    name: str
    versions: tuple[Served, ...] = ()
    failure: CallFailed | None = None


class Lag(Struct, frozen=True):
    """The distance of a served version from the published model.

    `log` is its own; None if it takes no deltas or no base of its log exists. `left` are the deltas that it
    has not applied and may apply, in order; `gap` is why they end before the log does. `since` is when the
    oldest publication that it lacks was published, `at` the publication that it serves.
    """

    log: Log | None = None
    left: tuple[Span, ...] = ()
    gap: str = ""
    since: datetime | None = None
    at: Published | None = None


def lag(model: Model, served: Served) -> Lag:
    """Return how far a served version is behind the publications of its log, up to the hold or to the end.

    An empty `Lag` if the version takes no deltas, or no base of its log exists.
    """
    log, position = model.logs.get(served.lineage), served.position
    if log is None or position is None:
        return Lag()
    gap, left = "", log.reach(position)
    goal = left[-1].end if left else position
    if goal < log.newest:
        try:
            plan_chain(log.within, position)
        except PositionError as error:
            gap, goal = error.message, log.newest
    lacks = log.created(span for span in log.beyond(position) if span.end <= goal)
    return Lag(log, left, gap, min(lacks, default=None), log.commits.get(position))


def seconds_since(time: datetime | None, now: datetime) -> float:
    """The seconds from `time` to `now`, at least 0, even if the clocks of two machines differ.

    0 if `time` is None.
    """
    return 0.0 if time is None else max(0.0, (now - time).total_seconds())


def superseded_since(model: Model, served: Served) -> datetime | None:
    """The time at which the newest log began, if the served version needs a base of that log; else None.

    It needs one if it takes deltas of a log without a base here, or if its version number is at most the
    position of the newest base. None also for a version of the newest log, and if no published version takes
    deltas.
    """
    newest = model.newest_log
    if newest is None or served.lineage == newest.lineage:
        return None
    is_of_no_log = served.position is not None and served.lineage not in model.logs
    return newest.begun if is_of_no_log or served.number <= newest.base else None


class Distance(Protocol):
    """The part of a served version and its `Lag` that a snapshot keeps; None where a value is unknown."""

    @property
    def number(self) -> int:
        """The version number."""

    @property
    def position(self) -> int | None:
        """The position that it serves; None if it takes no deltas."""

    @property
    def behind_deltas(self) -> int | None:
        """The number of deltas that it may take; None if no base of its log is published here."""

    @property
    def stale_s(self) -> float | None:
        """The age of the oldest publication that it lacks, in seconds; None if that is unknown."""

    @property
    def superseded_s(self) -> float | None:
        """Seconds since a newer log began; 0 for a version of the newest log, None if that is unknown."""


class Release(Protocol):
    """The part of a published model that a snapshot keeps; None where its directory cannot be read."""

    @property
    def published(self) -> int | None:
        """The newest position, whatever the hold; None if the model's directory cannot be read."""

    @property
    def position(self) -> int | None:
        """The newest position that the hold allows; None if no version takes deltas."""

    @property
    def newest_version(self) -> int | None:
        """The newest version's number; None if the model's directory cannot be read."""

    @property
    def waiting(self) -> int:
        """The number of publications beyond `position`."""

    @property
    def is_held(self) -> bool:
        """True if a person's or a rollback's hold is in force."""


def code_of(
    served: Distance, model: Release, limits: Limits, error: str, *, is_loading: bool
) -> tuple[Code, str]:
    """The state of a server, judged by the version that answers its requests, and the reason.

    The reason is "" if the code says it all. `served` is that version, `model` the published model, and
    `limits` says after how long a server is late. `error` is the failure of its last update, empty without
    one. `is_loading`: another version is about to be available.
    """
    is_of_log = served.position is not None and served.behind_deltas is not None
    at = served.position if served.position is not None else served.number
    if model.published is None:
        return Code.UNKNOWN, ""
    # before the error of its last update: nothing is left to update
    if at >= model.published and (is_of_log or served.position is None):
        return Code.FRESH, ""
    if error:
        return Code.REFUSES, error
    if served.superseded_s:
        code = Code.LATE if served.superseded_s > limits.late_s else Code.UPDATING
        return code, "it has not loaded the newest base"
    if not is_of_log:
        return _code_without_log(served, model, is_loading=is_loading)
    if (served.stale_s or 0.0) > limits.late_s:
        return Code.LATE, ""
    if not served.behind_deltas and model.waiting:
        return Code.HELD if model.is_held else Code.CANARY, ""
    return Code.UPDATING, ""


def _code_without_log(served: Distance, model: Release, *, is_loading: bool) -> tuple[Code, str]:
    """Return the state of a server whose version is not of a published log, and the reason in words.

    `is_loading`: another version is about to be available.
    """
    is_newer = model.newest_version is not None and model.newest_version > served.number
    if is_newer and model.position is None:  # no version takes deltas: the server loads each by itself
        code = Code.UPDATING if is_loading else Code.LATE
        return code, f"version {model.newest_version} is newer"
    why = "its version takes no deltas" if served.position is None else "its log is not published here"
    return Code.NOT_UPDATABLE, why


class Silence(Struct, frozen=True):
    """The seconds since the last publication, and how many would be too long; None if unknown."""

    seconds: float | None = None
    longest_s: float | None = None

    @property
    def is_too_long(self) -> bool:
        """True if nothing was published for longer than usual, or than expected."""
        return self.seconds is not None and self.longest_s is not None and self.seconds > self.longest_s


class Habit(Struct, frozen=True):
    """The time of a model's newest publication, and the longest usual pause in seconds; None if unknown."""

    newest: datetime | None = None
    longest_s: float | None = None

    @classmethod
    def of(cls, model: Model) -> Habit:
        """The time of a model's newest publication and its longest usual pause.

        Both are None if the model cannot be read. The pause alone is None after too few publications: see
        `longest_silence_s`.
        """
        times = model.times
        return cls(max(times, default=None), longest_silence_s(times))

    def silence(
        self, now: datetime, expected_s: float | None = None, in_store: datetime | None = None
    ) -> Silence:
        """Return the seconds since the newest publication, at `now`, and the seconds that would be too long.

        These are `expected_s`, or the habit's own if that is None. `in_store` is when the newest publication
        in the store was made, if this is a copy; the later of both counts. The seconds since are None if
        neither time is known.
        """
        newest = max(filter(None, (self.newest, in_store)), default=None)
        seconds = None if newest is None else seconds_since(newest, now)
        return Silence(seconds, self.longest_s if expected_s is None else expected_s)


def silent(
    model: str | Path, found: Silence, *, is_learned: bool = True, takes_deltas: bool = True
) -> Finding:
    """The finding that the publisher of `model` (a path or URL) is silent for too long, as `found` says.

    `is_learned`: the limit is its own habit, not a configured one. `takes_deltas`: the model does, for the
    command that the finding proposes. UsageError if a URL is malformed.
    """
    seconds, longest = found.seconds or 0.0, found.longest_s or 0.0
    usual = "it is usually quicker than" if is_learned else "it is expected at least every"
    return Finding(
        Code.PUBLISHER_SILENT,
        f"nothing was published for {human_time(seconds)}",
        f"{usual} {human_time(longest)}: does the trainer run, does the exporter run?",
        look_at_trainer(model, takes_deltas=takes_deltas),
    )


def two_publishers(place: str | Path, machines: Sequence[str]) -> Finding:
    """The finding that several machines publish one model in turn; `place` is the model's path or URL."""
    return Finding(
        Code.TWO_PUBLISHERS,
        f"{' and '.join(machines)} publish this model in turn",
        "each makes what the other has made already, and one of two trainers overwrites the other: end one",
        command("export-model", "history", place),
    )


def judge(model: Model, servers: Sequence[Server], now: datetime, limits: Limits) -> list[Finding]:
    """Return the findings about servers of a model, server by server; a server with nothing wrong has none.

    While no version is published, only servers that do not answer have one. A server that has lacked
    something for less than `limits.late_s` is a warning. `now` has a time zone.

    Raises:
        CheckpointError: the newest version's manifest cannot be fetched from its store.
        OSError: that manifest exists but cannot be looked at.
    """
    return [finding for server in servers for finding in _of_server(model, server, now, limits)]


def command(*words: str | Path) -> str:
    """The words as one command line, quoted where needed, to paste into a shell."""
    return " ".join(map(quoted, words))


def _of_server(model: Model, server: Server, now: datetime, limits: Limits) -> Iterator[Finding]:
    where = f"{server.name} on {server.address}"
    status = command("serve-model", "status", server.address, "--model-name", server.name)
    if (failure := server.failure) is not None:
        if failure.code == "UNAVAILABLE":
            yield Finding(Code.DOWN, failure.message, failure.cause, _to_start(model, server, failure.cause))
        else:
            status = command("serve-model", "status", server.address)
            yield Finding(Code.ABSENT, failure.message, failure.cause, status)
        return
    newest = newest_of(model.versions)
    if newest is None:
        return
    answer = next((each for each in server.versions if each.number == newest.version), None)
    if answer is None or not answer.is_available:
        yield _not_loaded(model, server, answer, now, limits)
    elif answer.position is None or model.current is None:
        return
    elif answer.lineage and answer.lineage != model.current.lineage:
        text = f"{where}: version {newest.version} is not the one published under {model.path}: "
        text += "it takes no delta of its log"
        why = f"its lineage is {answer.lineage}, expected {model.current.lineage}"
        yield Finding(Code.NOT_UPDATABLE, text, why, status)
    else:
        yield from _behind(model, server, answer, now, limits)


_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")


def _to_start(model: Model, server: Server, cause: str) -> str:
    """The command to type next for a server that does not answer.

    It starts a server if the address is on this machine, and asks for the server's status otherwise. `cause`
    is the error of the call: if the host's name was not resolved, the command looks the name up.
    """
    host, _, port = server.address.rpartition(":")
    if "resolv" in cause or "lookup" in cause:
        return command("getent", "hosts", host)
    if host in _THIS_MACHINE:
        return command("serve-model", "run", model.path, "--port", port)
    return command("serve-model", "status", server.address, "--model-name", server.name)


def _not_loaded(
    model: Model, server: Server, answer: Served | None, now: datetime, limits: Limits
) -> Finding:
    """Return the finding for a server whose newest version (`answer`; None: unknown there) is not available.

    It is a warning while the server serves another version, reports no failure, and the newest one is younger
    than `limits.late_s`; else wrong. CheckpointError if the newest version's manifest cannot be fetched.
    """
    newest = newest_of(model.versions)
    assert newest is not None
    serves = [str(each.number) for each in server.versions if each.is_available]
    is_young = bool(serves) and not (answer and answer.message) and _age(newest.path, now) < limits.late_s
    state = "is not known there" if answer is None else f"is in state {answer.state.name}"
    return Finding(
        Code.LATE if serves else Code.ABSENT,
        f"{server.name} on {server.address}: version {newest.version} {state}; it serves "
        f"{', '.join(serves) or 'nothing'}",
        answer.message if answer else "",
        command("serve-model", "status", server.address, "--model-name", server.name),
        known_level=Level.WARNING if is_young else Level.WRONG,
    )


def _behind(model: Model, server: Server, served: Served, now: datetime, limits: Limits) -> Iterator[Finding]:
    found, position = lag(model, served), served.position
    log, where = found.log, f"{server.name} on {server.address} stands at {served.position}"
    if log is None or position is None:
        return
    # a limit of -1 is a hold that cannot be read; beyond a canary's hold the canary itself is
    if log.limit is not None and 0 <= log.limit < position and not log.is_canary:
        yield Finding(
            Code.BEYOND_HOLD,
            f"{where}, beyond the hold at {log.limit}: only a rollback leads back",
            command=command("export-model", "rollback", model.path, "--to", str(log.limit)),
        )
    elif found.gap:
        verify = command("export-model", "verify", model.path)
        yield Finding(Code.STUCK, f"{where}, from where no delta leads on", found.gap, verify)
    elif found.left:
        age = seconds_since(found.since, now)
        yield Finding(
            Code.LATE,
            f"{where}, {count(len(found.left), 'delta')} behind {found.left[-1].end}; the oldest is "
            f"{human_time(age)} old",
            command=command("serve-model", "update", server.address, "--model-name", server.name),
            known_level=Level.WARNING if age < limits.late_s else Level.WRONG,
        )


def _age(published: Path, now: datetime) -> float:
    """The seconds from the publication of the version in directory `published` to `now`, at least 0.

    0 if its manifest is damaged or missing, CheckpointError if it cannot be fetched from its store.
    """
    try:
        return seconds_since(read_head(published).created, now)
    except ManifestError:
        return 0.0


_LAST, _LEAST = 64, 8
"""The number of newest intervals that count, and the least number needed."""
_ONE_IN = 20
"""One in this many intervals may be a pause."""
_TIMES, _SHORTEST_S = 3.0, 60.0
"""A publisher is silent after this many of its usual intervals, but not before a minute (seconds)."""


def longest_silence_s(times: Iterable[datetime]) -> float | None:
    """The seconds without a publication after which a publisher is unusually silent; at least 60.

    `times` are when it published, in any order; equal ones count once. None if there are fewer than nine.

    One day's pause of training is not a habit, and neither are a few quick publications after a start: the
    longest few of the last intervals do not count.
    """
    newest = sorted(set(times))[-_LAST - 1 :]
    intervals = sorted((later - earlier).total_seconds() for earlier, later in pairwise(newest))
    if len(intervals) < _LEAST:
        return None
    usual = intervals[-1 - len(intervals) // _ONE_IN]
    return max(_SHORTEST_S, _TIMES * usual)

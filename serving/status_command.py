"""`serve-model status`: show a model's versions on a server, their positions, and how far behind they are.

The server reports versions and positions. The published model is read at the model base path, so the caller
needs access to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exporter.errors import CallFailed, ServerError
from exporter.publish.hold import UNREAD
from exporter.publish.judge import lag, seconds_since
from exporter.publish.model import Model
from exporter.publish.served import Served
from exporter.storage.local_paths import quoted
from exporter.terminal.output import Output
from exporter.terminal.progress import human_time
from exporter.transfer.opened import name_of, opened
from serving.client import ModelClient
from serving.documents import ModelStatus, Published, ServedVersion
from serving.status import Code, VersionState, VersionStatus, error_text
from serving.updates import read_served

_EVENT = "event"
_UNSETTLED = "unsettled"
_TABLES = "tables"
_COLUMNS = {
    "version": "right",
    "state": "left",
    "position": "right",
    "step": "right",
    "behind": "left",
    "age": "right",
    _EVENT: "right",
    _UNSETTLED: "right",
    _TABLES: "left",
    "": "left",
}


def ask(client: ModelClient, statuses: Sequence[VersionStatus]) -> list[ServedVersion]:
    """Ask each available version for its position; return all versions, in the order of `statuses`.

    A version without deltas has no position; if a call fails, its version has the reason as `problem`, and
    nothing is raised.
    """
    return [_ask(client, status) for status in statuses]


def _ask(client: ModelClient, status: VersionStatus) -> ServedVersion:
    version = ServedVersion(status.version, status.state.name, status.code.name, status.message)
    if status.state is not VersionState.AVAILABLE:
        return version
    try:
        found = read_served(client, status)
    except CallFailed as error:
        return replace(version, problem=error.cause or error.message)
    return replace(
        version,
        state=found.state.name,
        position=found.position,
        step=found.step,
        lineage=found.lineage or None,
        unsettled=found.unsettled,
        tables=found.tables.text if found.tables else None,
        overlay_percent=found.tables.overlay_percent if found.tables else None,
        problem=found.message if found.state is not status.state else None,
    )


def compare(versions: Sequence[ServedVersion], target: Model, now: datetime) -> list[ServedVersion]:
    """Return the versions in order, each available one with its distance from the published `target`.

    `now` is the time for ages, with a zone. A version that cannot be compared has the reason as `problem`.
    """
    return [
        _compare(found, target, now) if found.state == VersionState.AVAILABLE.name else found
        for found in versions
    ]


def _compare(found: ServedVersion, target: Model, now: datetime) -> ServedVersion:
    own = next((event for event in target.publications if event.path.name == str(found.version)), None)
    if own is None:
        return replace(found, problem=f"version {found.version} is not published there")
    newest = target.newest_version
    newer = newest if newest is not None and newest > found.version else None
    if found.position is None:
        return replace(
            found,
            position=own.position,
            step=own.step,
            newer_version=newer,
            published=own.created,
            age_seconds=_seconds_since(own.created, now),
        )
    log = target.logs.get(found.lineage or "")
    if own.log is not None and (log is None or log.number != own.log):
        return replace(found, problem="it belongs to another log than the published one")
    state = VersionState[found.state]
    at = lag(target, Served(found.version, state, found.position, found.step, found.lineage or ""))
    published = None if at.at is None else at.at.created
    event_time = None if at.at is None else at.at.event_time
    found = replace(
        found,
        published=published,
        age_seconds=_seconds_since(published, now),
        event_time=event_time,
        event_age_seconds=_seconds_since(event_time, now),
    )
    if target.current is None or log is None or log.number != target.current.number:
        return replace(found, newer_version=newer, problem=None if newer is None else "its log has ended")
    behind = None if at.gap else len(at.left)
    steps = _steps_behind(found.step, target)
    return replace(found, behind_deltas=behind, behind_steps=steps, problem=at.gap or None)


def _steps_behind(step: int | None, target: Model) -> int | None:
    """Return the number of training steps from `step`, a served one, to the newest published one.

    It is negative if the served step is greater, after a rollback; None if either step is not recorded.
    """
    newest = None if target.at is None else target.at.step
    return None if step is None or newest is None else newest - step


def _seconds_since(time: datetime | None, now: datetime) -> float | None:
    return None if time is None else round(seconds_since(time, now), 3)


def run(client: ModelClient, published: Path | None, sink: Output) -> None:
    """Ask a server for its versions, compare them with the model at `published`, and print them.

    With None as `published` nothing is compared.

    Raises:
        CallFailed: the server does not respond, or does not know the model.
        ServerError: no version is available; all is printed before.
        UsageError: `published` is a URL of no known store.
        NotUpdatable: nothing is published there.
        ManifestError, CheckpointError, PublishError, PositionMoved, OSError: the published model cannot be
            read.
    """
    statuses = client.status()
    found, target = ask(client, statuses), None
    if published is not None:
        with opened(published, read_only=True) as model:
            target = model.carry(lambda: Model.history(model.path))
            found = compare(found, target, datetime.now(timezone.utc))
    document = ModelStatus(
        address=client.address,
        model=client.model,
        published=None if target is None else _published(target),
        versions=found,
    )
    sink.result(document)
    columns, found_rows = _COLUMNS, _rows(found, statuses)
    seldom = {
        _EVENT: any(one.event_time for one in found),
        _UNSETTLED: any(one.unsettled for one in found),
        _TABLES: any(one.tables for one in found),
    }
    shown = [name for name in columns if seldom.get(name, True)]  # a terminal is narrow
    rows = [tuple(row[name] for name in shown) for row in found_rows]
    columns = {name: columns[name] for name in shown}
    sink.table(f"{client.model} on {client.address}{_newest(target)}", columns, rows)
    if target is None and any(one.position is not None for one in found):
        sink.note("to see how far behind a version is: --model-base-path MODEL")
    _require_available(client, found, statuses)


def client_of(
    connect: Callable[[str], ModelClient], model: str | None, published: Path | None
) -> ModelClient:
    """Return a client of the model named `model`; without a name, of the server's only model.

    The caller closes it. With a name the server is not asked; without one, `find_model` tries two names:
    `default`, and the last part of `published`, the path or URL of the published model (unless None).
    `connect` makes a client for the model of a name, and its errors pass.

    Raises:
        CallFailed: without a name, the server did not respond, knows neither of the two, or lists several
            models.
        UsageError: without a name, `published` is a URL with a part that no object's name can have.
    """
    return connect(model) if model else find_model(connect, published)


def find_model(connect: Callable[[str], ModelClient], published: Path | None) -> ModelClient:
    """Return a client of the only model on a server, for a command without a model's name.

    The caller closes it; clients that are tried and fail are closed here. `connect` makes a client for the
    model of a name, and its errors pass. Two names are tried, and the first that the server knows counts: the
    last part of the path or URL `published` (unless None), and `default`, TensorFlow Serving's own default.
    If the server does not know a name and lists its models, as only `serve-model run` does, its only model
    counts.

    Raises:
        CallFailed: the server did not respond, knows neither name, or lists several models.
        UsageError: `published` is a URL with a part that no object's name can have.
    """
    names = ["default"] if published is None else [name_of(published), "default"]
    for name in names:
        client = connect(name)
        try:
            client.status()
        except CallFailed as error:
            client.close()
            if error.code != "NOT_FOUND":
                raise
            if len(error.served) == 1:
                return connect(error.served[0])
            if error.served or name == names[-1]:
                raise _not_named(client, error) from error
        else:
            return client
    raise AssertionError("the loop returns")


def _not_named(client: ModelClient, error: CallFailed) -> CallFailed:
    served = error.served
    ask = f"serve-model status {client.address} --model-name {quoted(served[0]) if served else 'NAME'}"
    if served:
        what = f"{client.address} serves {len(served)} models: {', '.join(served)}"
        return CallFailed(error.code, what, cause="which of them is meant is not said", hint=ask)
    return CallFailed(
        error.code,
        f"{client.address} serves no model that is called {client.model}",
        cause="the interface of TensorFlow Serving does not list its models, so the name has to be given",
        hint=f"{ask}; it stands in the server's configuration (--model_name, --model_config_file)",
    )


def _published(history: Model) -> Published:
    at = history.at
    return Published(at.position if at else None, at.step if at else None, history.hold, history.held_by)


def _newest(target: Model | None) -> str:
    if target is None:
        return ""
    held, by = "" if target.hold is None else f", held at {target.hold}", target.held_by
    if target.is_hold_unread:
        held = f"; its hold: {UNREAD}"
    if by is not None:
        held += f" ({by.text})"
    return f"; published: position {target.at or 'unknown'}{held}"


def _rows(found: Sequence[ServedVersion], statuses: Sequence[VersionStatus]) -> list[dict[str, Any]]:
    return [
        {
            "version": one.version,
            "state": one.state,
            "position": _or_blank(one.position),
            "step": _or_blank(one.step),
            "behind": _behind(one),
            "age": _age(one.age_seconds),
            _EVENT: _age(one.event_age_seconds),
            _UNSETTLED: _or_blank(one.unsettled),
            _TABLES: one.tables or "",
            "": error_text(status) or one.problem or "",
        }
        for one, status in zip(found, statuses, strict=True)
    ]


def _or_blank(value: int | None) -> str:
    return "" if value is None else str(value)


def _behind(one: ServedVersion) -> str:
    if one.newer_version is not None:
        return f"version {one.newer_version} is newer"
    if one.behind_deltas is None:
        return ""
    if one.behind_deltas == 0:
        return "no"
    ahead = one.behind_steps is not None and one.behind_steps < 0  # the log was rolled back behind it
    steps = f", {abs(one.behind_steps)} steps{' ahead' * ahead}" if one.behind_steps else ""
    return f"{one.behind_deltas} delta{'s' * (one.behind_deltas > 1)}{steps}"


def _age(seconds: float | None) -> str:
    return "" if seconds is None else human_time(seconds)


def _require_available(
    client: ModelClient, found: Sequence[ServedVersion], statuses: Sequence[VersionStatus]
) -> None:
    """Raise ServerError unless a version is available, and still was when it was asked for its position.

    `found` are the versions after they were asked, `statuses` as the server listed them before: at least one,
    in the same order.
    """
    if not any(one.state == VersionState.AVAILABLE.name for one in found):
        first, now = statuses[0], found[0]
        hint = "publish a version that loads, or wait for the version that is loading"
        if all(one.state == VersionState.END.name and one.code == Code.OK.name for one in found):
            hint = f"let the server serve the model again: serve-model reload {client.address}"
        raise ServerError(
            f"no version of {client.model} is available on {client.address}",
            cause=error_text(first) or now.problem or f"version {now.version} is in state {now.state}",
            hint=hint,
        )

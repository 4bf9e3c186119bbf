"""Publishers of a model in a store, their requests counted, and each taken for dead at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from exporter.storage.objects import ObjectWriter
from exporter.transfer import carrier
from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from exporter.verify.log import verify_model
from tests.support.logs import Trainer
from tests.support.setting import Setting, followed

WRITES = ("upload", "create", "replace", "put", "delete")


class Killed(BaseException):
    """What ends a process."""


def lose_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever uploads is taken for dead at once, whether he is or not."""
    monkeypatch.setattr(carrier, "LEASE_SECONDS", -10.0)
    monkeypatch.setattr(carrier, "BEAT_SECONDS", 3600.0)


def published_to(url: str, directory: Path) -> Trainer:
    """A base at 10 and deltas to 20 and 30 are published."""
    setting = Setting(directory / "one")
    found = followed(setting.directory, (20, 30), published=30)
    push(plan_push(setting.model, url))
    return found


@contextmanager
def counted_calls(
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    names: Iterable[str],
    before: Callable[[list[str]], bool] = lambda calls: True,
) -> Iterator[list[str]]:
    """The calls of these methods that were begun; `before` sees those so far, and says whether the next one
    counts.
    """
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for name in names:
            method = getattr(kind, name)

            def counted(
                self: Any, *rest: Any, _method: Callable[..., Any] = method, _name: str = name
            ) -> Any:
                if rest and before(calls):
                    calls.append(f"{_name} {rest[0]}")
                return _method(self, *rest)

            patch.setattr(kind, name, counted)
        yield calls


def counted_writes(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[list[str]], bool], *also: str
) -> AbstractContextManager[list[str]]:
    """As `counted_calls`, of what writes to a store, `also` of these names."""
    return counted_calls(monkeypatch, ObjectWriter, (*WRITES, *also), before)


@contextmanager
def killed_at(
    monkeypatch: pytest.MonkeyPatch, kind: type, names: Iterable[str], call: int
) -> Iterator[list[str]]:
    """The process dies right before the `call`-th of these methods' calls; what had been called."""

    def before(calls: list[str]) -> bool:
        if len(calls) == call:
            raise Killed
        return True

    with counted_calls(monkeypatch, kind, names, before) as calls:
        yield calls


def whole(url: str, directory: Path, *, is_held_back: bool = False) -> Path:
    """What a new server reads: all of it is whole, and no manifest waits for its files."""
    done = pull(url, directory, prune=True)
    assert done.incomplete == ()
    problems = verify_model(directory, bytes_=True).problems
    if is_held_back:  # servers wait for the rest of a rollback
        problems = tuple(each for each in problems if "a rollback is being published" not in each.message)
    assert not problems
    return directory

"""`--on-event`: which events run the command, what it gets, and that nothing it does holds up the agent."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.publish.model import Rollback
from serving.agent.changes import Changes
from serving.agent.event_command import EventCommand, environment, parse_command
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.view import FleetView, ModelView
from tests.support.status_pages import fleet, model, two

HELD = {"hold": 47_900, "position": 47_900, "waiting": 3, "is_held": True}


def event(what: EventKind = EventKind.HELD, **fields: object) -> AgentEvent:
    return AgentEvent(what, "held at 7", "ranker", command="export-model resume m", **fields)  # type: ignore[arg-type]


def until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def script(directory: Path, text: str) -> list[str]:
    file = directory / "told.py"
    file.write_text(f"import json, os, sys, time\n{text}\n")
    return [sys.executable, str(file)]


def test_a_command_gets_the_event_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    told = tmp_path / "told.json"
    line = f"json.dump([dict(os.environ), json.load(sys.stdin)], open({str(told)!r} + '.new', 'w'))"
    command = script(tmp_path, f"{line}\nos.rename({str(told)!r} + '.new', {str(told)!r})")
    failures: list[str] = []
    runner = EventCommand(command, 60, failures.append)
    with runner.running():
        runner(event(EventKind.APPLIED))
        runner(event(position=7, replica="a:1"))
        until(told.exists)
    variables, document = json.loads(told.read_text())
    assert document["format_version"] == 1
    assert (document["what"], document["position"]) == ("held", 7)
    assert variables["EVENT_WHAT"] == "held"
    assert variables["EVENT_MODEL"] == "ranker"
    assert variables["EVENT_MESSAGE"] == "held at 7"
    assert variables["EVENT_COMMAND"] == "export-model resume m"
    assert variables["PATH"] == os.environ["PATH"]
    assert "secret" not in told.read_text()
    assert not failures


def test_what_others_wrote_is_no_part_of_a_command_line(tmp_path: Path) -> None:
    odd = event(why="$(touch x)\0\udcff; `touch y`" + "z" * 9000)
    assert environment(odd)["EVENT_WHY"].startswith("$(touch x)?; `touch y`z")
    assert len(environment(odd)["EVENT_WHY"]) == 4096
    failures: list[str] = []
    runner = EventCommand(script(tmp_path, "sys.exit(3)"), 60, failures.append)
    with runner.running():
        runner(odd)
        until(lambda: failures)
    assert failures == ["--on-event for held of ranker: it ended with exit code 3"]


def test_a_command_that_hangs_is_ended_with_its_children_and_holds_up_nobody(tmp_path: Path) -> None:
    child = tmp_path / "child"
    text = f"pid = os.fork()\nif pid == 0: open({str(child)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    journal, failures = Journal(), []
    runner = EventCommand(script(tmp_path, text), 0.5, failures.append)
    journal.read_by(runner)
    with runner.running():
        began = time.monotonic()
        for _ in range(100):
            journal.write(event())
        assert time.monotonic() - began < 20, "whoever writes an event does not wait: 100 times 0.5 s"
        until(lambda: len(failures) >= 2)
    assert failures[0] == "--on-event for held of ranker: it was ended after 0.5 s"
    assert failures[1].startswith("--on-event was not run for 3"), "of a hundred, 64 wait"
    number = int(child.read_text())
    until(lambda: not Path(f"/proc/{number}").exists() or "Z" in Path(f"/proc/{number}/stat").read_text())


def test_one_command_runs_at_a_time_and_the_end_of_the_agent_ends_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = (
        f"open({str(log)!r}, 'a').write('begin\\n'); time.sleep(0.1); open({str(log)!r}, 'a').write('end\\n')"
    )
    failures: list[str] = []
    runner = EventCommand(script(tmp_path, text), 60, failures.append)
    with runner.running():
        for _ in range(3):
            runner(event())
        until(lambda: log.exists() and log.read_text().count("end") == 3)
    assert log.read_text() == "begin\nend\n" * 3
    hanging = EventCommand(script(tmp_path, "time.sleep(600)"), 600, failures.append)
    began = time.monotonic()
    with hanging.running():
        hanging(event())
        time.sleep(0.3)
    assert time.monotonic() - began < 30
    assert not [thread for thread in threading.enumerate() if thread.name == "on-event"]
    assert not failures


@pytest.mark.parametrize("text", ["", "  ", "no-such-program --x", "'unfinished"])
def test_what_is_no_command_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(UsageError):
        parse_command(text)


def test_a_command_is_split_as_a_shell_would_and_no_shell_runs_it() -> None:
    assert parse_command("sh -c 'notify \"$EVENT_WHAT\"'") == ("sh", "-c", 'notify "$EVENT_WHAT"')
    assert parse_command("env ; rm") == ("env", ";", "rm")


def looks(*views: FleetView) -> list[AgentEvent]:
    """The events of some looks, the oldest first."""
    journal = Journal()
    changes = Changes(journal, 30.0)
    for view in views:
        changes.look(view)
    return journal.last()[::-1]


def held(**fields: object) -> FleetView:
    return fleet(replace(model(*two(position=47_900)), **{**HELD, **fields}))


def rolled_back() -> ModelView:
    rollback = Rollback(47_900, 47_700, "a bad batch")
    return replace(model(*two(position=47_900)), **{**HELD, "rollback": rollback})


def test_what_becomes_true_is_an_event_once_and_names_the_next_command() -> None:
    fresh = fleet(model(*two()))
    (found,) = looks(fresh, held(), held(), held(waiting=4))
    assert (found.what, found.model, found.position) == (EventKind.HELD, "ranker", 47_900)
    assert found.command == "export-model resume /models/ranker"
    assert not looks(fresh, held(), fresh, held(), fresh), "what passes at once wakes nobody"
    assert len(looks(held(), held(), fresh, held(), held())) == 2, "it began again"
    assert len(looks(held(), held(), held(hold=48_000), held(hold=48_000))) == 2, "another hold"


def test_an_operators_rollback_is_an_event_and_a_canarys_is_told_once() -> None:
    view = fleet(rolled_back())
    (found,) = looks(view, view)
    assert found.what is EventKind.ROLLED_BACK
    assert found.why.startswith("a bad batch; replicas stay there until this is typed")
    assert found.message.startswith("rolled back to the values of 47700")
    journal = Journal()
    changes = Changes(journal, 30.0)
    journal.write(AgentEvent(EventKind.ROLLED_BACK, "rolled back: NaN", "ranker", position=47_700))
    for _ in range(3):
        changes.look(view)
    assert len(journal.last()) == 1

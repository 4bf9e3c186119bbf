"""A model that requires finite values: what it refuses is not published; what was, servers come past."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.delta.format import span_name
from exporter.pipeline.log_maintenance import tidy
from exporter.publish.delta_log import list_deltas, log_path, read_log
from exporter.publish.finite import unchecked
from exporter.storage.layout import TAKEN_FILE
from tests.support.agents import Published
from tests.support.commands import Ran, export_model
from tests.support.numpy_trainer import NumpyTrainer
from tests.support.updatable import loaded_quickly

ROW = 3


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that requires finite values, and nothing else."""
    published = Published(tmp_path_factory.mktemp("finite"), options=("--add=nan-check",))
    return published.directory


class Place:
    """A copy of it, whose trainer is taken up."""

    def __init__(self, origin: Path, directory: Path) -> None:
        shutil.copytree(origin, directory, dirs_exist_ok=True)
        self.published = published = Published.__new__(Published)
        published.directory, published.options, published.plain = directory, (), False
        published.model, published.graph = directory / "ranker", directory / "graph.meta"
        published.trainer = NumpyTrainer(directory / "train", 1)
        published.trainer.begin(restores=True, saver_first=False, is_live=False)
        self.model = published.model
        self.base = read_log(self.model).base

    def train(self, value: float, *, saves: bool = False) -> None:
        """A row gets this value, others move; an increment, or a full checkpoint."""
        trainer = self.published.trainer
        trainer.train()
        variables = trainer.session.variables
        variables.values["net/users"][ROW] = value
        variables.touched["net/users"].add(ROW)
        trainer.save() if saves else trainer.increment()

    def export(self, *more: object) -> Ran:
        return export_model(*self.published.arguments(), *more, "--json")

    def publish(self, value: float) -> int:
        self.train(value)
        done = self.export()
        assert done.code == 0, done.err
        return self.published.position

    @contextmanager
    def older_release(self) -> Iterator[None]:
        """Deltas are published unchecked, as by one that did not check: its manifests lack a field."""
        path = self.base.path / "manifest.json"
        text = path.read_text()
        path.write_text(text.replace('"finite":true', '"finite":false'))
        assert path.read_text() != text
        yield
        path.write_text(text)

    def findings(self) -> list[Any]:
        found = export_model("doctor", self.model, "--json").document["findings"]
        return [finding for finding in found if finding["check"] == "finite"]

    def run(self, finding: Any) -> None:
        """Run the command of a finding, as a person would paste it."""
        done = export_model(*shlex.split(finding["command"])[1:])
        assert done.code == 0, done.err


@pytest.fixture
def place(origin: Path, tmp_path: Path) -> Place:
    return Place(origin, tmp_path)


@contextmanager
def server_of(place: Place) -> Iterator[Any]:
    with loaded_quickly(place.base.path) as server:
        server.update()
        yield server


@pytest.mark.landing
@pytest.mark.parametrize("saves", [False, True], ids=["by increments", "by comparison"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_it_is_refused_and_the_next_delta_leads_on(place: Place, saves: bool, value: float) -> None:
    before = place.publish(1.0)
    for _ in range(2):
        place.train(value, saves=saves)
        refused = place.export()
        assert refused.code == 6
        assert "'s/users'" in refused.error["message"]
        assert f"row {ROW}" in refused.error["cause"]
        assert place.published.position == before
    assert not list(place.model.glob(".staging-*"))
    with server_of(place) as server:
        assert server.position() == before
        after = place.publish(2.0)
        assert list_deltas(log_path(place.model, place.base.entry.log))[-1].start == before
        server.update()
        assert server.position() == after
    assert not unchecked(read_log(place.model).deltas)
    assert place.findings() == []


def test_a_watch_says_it_and_goes_on(place: Place) -> None:
    place.publish(1.0)
    place.train(np.nan)
    ended = place.export("--watch", "--until", "0")
    assert ended.code == 6
    place.train(2.0)
    assert place.export("--watch", "--until", "0").code == 0


def test_what_an_earlier_release_published_is_named_and_passed(place: Place) -> None:
    good = place.publish(1.0)
    with place.older_release():
        place.publish(np.nan)
        assert place.publish(2.0) > good
    with server_of(place) as server:
        assert server.position() == good
        assert "finite" in server.update()["status"]
        (finding,) = place.findings()
        assert (finding["level"], f"servers stay at {good}" in finding["message"]) == ("wrong", True)
        assert finding["command"].startswith("export-model merge")
        place.run(finding)
        server.update()
        assert server.position() == place.published.position
    assert place.findings() == []


def test_while_it_lasts_a_rollback_leads_past_it(place: Place) -> None:
    good = place.publish(1.0)
    with place.older_release():
        place.publish(np.nan)
    assert export_model("merge", place.model).code == 6
    assert export_model("merge", place.model, "--rebase").code == 6
    with server_of(place) as server:
        (finding,) = place.findings()
        assert finding["command"] == f"export-model rollback {place.model} --to {good}"
        place.run(finding)
        server.update()
        assert server.position() == place.published.position
    refused = export_model("resume", place.model, "--json")
    assert refused.code == 6
    assert "--lift-only" in refused.error["hint"]
    assert export_model("resume", place.model, "--lift-only").code == 0
    assert place.publish(2.0) > good


@pytest.mark.parametrize("command", [("merge",), ("merge", "--rebase")], ids=" ".join)
def test_a_refused_merger_publishes_no_way_around_an_abandoned_path(
    place: Place, command: tuple[str, ...]
) -> None:
    place.publish(1.0)
    with place.older_release():
        newest = place.publish(np.nan)
    start = place.base.at.position
    delta = log_path(place.model, place.base.entry.log) / span_name(start, newest)
    paths = (str(newest), delta.relative_to(place.model).as_posix())
    (place.model / TAKEN_FILE).write_text("".join(f"{path}\n" for path in paths))
    planned = export_model(command[0], place.model, *command[1:], "--dry-run")
    assert planned.code == 6
    assert export_model(command[0], place.model, *command[1:]).code == 6
    assert place.published.position == newest


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_new_base_is_refused_where_every_byte_is_verified(place: Place, value: float) -> None:
    place.train(value, saves=True)
    words = [word for word in place.published.arguments() if word != "--incr"]
    words += ["--new-base=always", "--add=nan-check", "--json"]
    planned = export_model(*words, "--dry-run")
    assert any("--verify bytes" in note for note in planned.document["notes"])
    refused = export_model(*words, "--verify", "bytes")
    assert (refused.code, "users" in refused.error["message"]) == (6, True)
    assert read_log(place.model).base.path == place.base.path
    place.train(2.0, saves=True)
    done = export_model(*words, "--verify", "bytes")
    assert (done.code, done.document["notes"]) == (0, [])


def test_a_dry_run_foresees_that_it_is_refused(place: Place) -> None:
    good = place.publish(1.0)
    with place.older_release():
        bad = place.publish(np.nan)
    place.publish(2.0)
    arguments = ("rollback", place.model, "--to", bad, "--json")
    planned, done = export_model(*arguments, "--dry-run"), export_model(*arguments)
    assert (planned.code, planned.error) == (done.code, done.error)
    assert (done.code, "NaN" in done.error["message"]) == (6, True)
    assert export_model("rollback", place.model, "--to", good, "--dry-run").code == 0


def test_what_is_published_next_leads_past_it_by_itself(place: Place) -> None:
    good = place.publish(1.0)
    with place.older_release():
        place.publish(np.nan)
    with server_of(place) as server:
        tidy(place.model)
        server.update()
        assert server.position() == good
        newest = place.publish(2.0)
        tidy(place.model)
        server.update()
        assert server.position() == newest
    assert not unchecked(read_log(place.model).deltas)

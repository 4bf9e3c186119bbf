"""A hold binds everybody who publishes what servers load by themselves; deltas go on behind it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter.errors import ChainEnds, ModelHeld
from exporter.options import ExportRequest, Jobs, Updates
from exporter.pipeline import log_maintenance
from exporter.pipeline.full import execute, export, plan
from exporter.pipeline.incremental import export_incremental
from exporter.pipeline.rebase import rebase
from exporter.pipeline.watch import watch
from exporter.pipeline.watch_loop import StopWhen, Watching
from exporter.publish.delta_log import read_log
from exporter.terminal.progress import no_progress
from tests.support.commands import export_model
from tests.support.logs import set_hold
from tests.support.step_models import published, request_of, save, versions


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of base 10 and deltas to 20 and 30."""
    directory = tmp_path_factory.mktemp("held")
    published(directory, 10, 20, 30)
    return directory


@pytest.fixture
def request_(origin: Path, tmp_path: Path) -> ExportRequest:
    """Held at 31, after a rollback to 20."""
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    given = request_of(tmp_path)
    log_maintenance.rollback(given.out, 20)
    return given


PUBLISHERS: dict[str, Callable[[ExportRequest], object]] = {
    "plain": lambda given: export(replace(given, plain=True)),
    "updatable": lambda given: export(replace(given, updates=Updates())),
    "rebase": lambda given: rebase(given.out, despite_hold=given.despite_hold),
}


@pytest.mark.parametrize("name", PUBLISHERS)
def test_no_publisher_passes_a_hold_unless_it_is_told_to(request_: ExportRequest, name: str) -> None:
    with pytest.raises(ModelHeld, match="is held at 31") as caught:
        PUBLISHERS[name](request_)
    assert "resume" in caught.value.hint
    assert "--despite hold" in caught.value.hint
    assert versions(request_.out) == [10]
    PUBLISHERS[name](replace(request_, despite_hold=True))
    assert len(versions(request_.out)) == 2


@pytest.mark.parametrize("name", PUBLISHERS)
def test_a_hold_that_cannot_be_read_binds_too(request_: ExportRequest, name: str) -> None:
    read_log(request_.out).hold.path.write_text("soon")
    with pytest.raises(ModelHeld, match="cannot be read"):
        PUBLISHERS[name](request_)


def test_a_rollback_while_an_export_is_under_way_is_not_overrun(request_: ExportRequest) -> None:
    """What was planned before the hold is refused where nothing can come in between."""
    log_maintenance.resume(request_.out)
    plans = [
        plan(replace(request_, plain=True)),
        plan(replace(request_, updates=Updates())),
    ]
    log_maintenance.rollback(request_.out, 10)
    for planned in plans:
        with pytest.raises(ModelHeld):
            execute(planned)
    assert versions(request_.out) == [10]


def test_a_base_that_takes_deltas_meanwhile_is_not_followed_by_a_plain_version(
    request_: ExportRequest, tmp_path: Path
) -> None:
    other = replace(request_, out=tmp_path / "other")
    planned = plan(other)
    export(replace(other, updates=Updates()))
    with pytest.raises(ChainEnds, match="takes deltas"):
        execute(planned)


def test_deltas_go_on_behind_a_hold_and_a_base_is_refused_by_name(request_: ExportRequest) -> None:
    options = ("--ckpt-dir", request_.ckpt_dir, "--out", request_.out, "--incr")
    save(request_.ckpt_dir, 40)
    refused = export_model(*options, "--new-base=merged", "--json")
    assert (refused.code, refused.error["error"]) == (5, "ModelHeld")
    assert read_log(request_.out).at.position == 31, "nothing was published"
    merged = export_model("merge", request_.out, "--rebase")
    assert merged.code == 5
    assert f"hint:  lift the hold: export-model resume {request_.out}" in merged.err
    watched = export_model(*options, "--new-base=merged", "--watch", "--json", "--until", "count=1")
    assert watched.code == 0
    assert json.loads(watched.out)["position"] == 40
    assert "no new base" in watched.err
    assert versions(request_.out) == [10]
    assert export_model(*options, "--new-base=merged", "--despite=hold").code == 0
    assert versions(request_.out) == [40, 10]


def test_a_watch_waits_for_a_hold_to_be_lifted(request_: ExportRequest) -> None:
    """It says so once, and goes on by itself."""
    told: list[str] = []
    held = threading.Event()

    def tell(error: Exception) -> None:
        told.append(type(error).__name__)
        held.set()

    watching = Watching(0.05, StopWhen(count=1, after_seconds=120))
    given = replace(request_, plain=True)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: list(watch(given, watching, tell)))
        assert held.wait(60)
        assert versions(given.out) == [10]
        log_maintenance.resume(given.out, lift_only=True)
        (done,) = found.result(120)
    assert told == ["ModelHeld"]
    assert versions(given.out) == [done.published.version, 10]


def test_a_watch_that_ends_while_the_model_is_held_has_failed(request_: ExportRequest) -> None:
    options = (
        "--ckpt-dir",
        request_.ckpt_dir,
        "--out",
        request_.out,
        "--model",
        request_.model,
        "--despite=deltas",
    )
    ran = export_model(*options, "--watch", "--until", "0.3")
    assert ran.code == 5
    assert ran.err.count("is held at 31") == 2, "once while it waits, once as it ends"


def test_a_hold_of_an_older_log_binds_nobody(request_: ExportRequest) -> None:
    export(replace(request_, updates=Updates(), despite_hold=True))
    old = request_.out / "deltas" / f"{10:020d}" / "hold"
    assert old.exists()
    save(request_.ckpt_dir, 50)
    export_incremental(request_)
    assert rebase(request_.out) is not None


def test_a_base_is_made_while_deltas_are_published(request_: ExportRequest) -> None:
    """Deltas that come meanwhile lead on from it."""
    log_maintenance.resume(request_.out)
    log = read_log(request_.out)
    from exporter.pipeline import rebase as module
    from exporter.publish.permission import Permission

    save(request_.ckpt_dir, 60)
    export_incremental(request_)
    assert read_log(request_.out).at.position == 60
    done = module._rebase(log, None, Permission(), Jobs(), no_progress)
    assert done is not None
    assert done.published.version == log.at.position
    new = read_log(request_.out)
    assert new.base.at.position == log.at.position
    assert [delta.end for delta in new.chain(new.base.at.position)] == [60]
    set_hold(new, 60)

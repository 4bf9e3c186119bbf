"""What earlier releases left on disk is read by this one, and this one writes what its own folder holds.

Each folder of `tests/golden` is what one release wrote, with `expected.json` and `values.json` to say what it
means. See `tests/golden/generate.py` for what to do when a format changes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.delta.format import Rows
from exporter.delta.residual import load_residual
from exporter.delta.row_hashes import read_index
from exporter.increments.history import CheckpointMarker, read_history
from exporter.increments.increment import from_json as increment_from_json
from exporter.increments.increment import to_json as increment_to_json
from exporter.publish.approval import approve
from exporter.publish.delta_log import DeltaLog, LogBase, list_deltas, read_log
from exporter.publish.hold import Hold
from exporter.publish.manifest import DeltaEntry, from_json, to_json
from exporter.publish.model import Model
from exporter.publish.versions import read_manifest
from exporter.storage.layout import CACHES_DIRECTORY, HASHES_DIRECTORY
from exporter.version import __version__
from tests.support.commands import export_model
from tests.support.golden import GOLDEN, assert_serves, expected_values, items_of, train_on
from tests.support.increments import apply_increments, values_of
from tests.support.logs import assert_same_bits, values_at

RELEASES = sorted(path.parent for path in GOLDEN.glob("*/expected.json"))
OWN = GOLDEN / __version__
LOGS = ["ranker", "deeprec"]
SINCE_THEN = {"hold.json", ".made-by.json"}
"""Files that are written since the newest release; its folder is as it was."""


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    """What a release wrote; tests that write take a copy."""
    return Path(request.param)


def expected(release: Path, name: str) -> Any:
    return json.loads((release / "expected.json").read_text())[name]


def log_of(release: Path, name: str) -> DeltaLog:
    return read_log(release / "models" / name)


@pytest.mark.parametrize("name", LOGS)
def test_every_position_has_the_values_that_it_had(release: Path, name: str) -> None:
    log, wanted = log_of(release, name), expected_values(release, name)
    assert {delta.end for delta in log.deltas} == wanted.keys() - {10}
    for position, values in wanted.items():
        assert_serves(values_at(log, position), values)


@pytest.mark.parametrize("name", LOGS)
def test_deltas_are_what_they_were(release: Path, name: str) -> None:
    found = []
    for delta in log_of(release, name).deltas:
        entry = delta.manifest.incremental
        assert isinstance(entry, DeltaEntry)
        assert entry.log == 10
        told = {
            "path": f"{delta.start}-{delta.end}",
            "step": delta.manifest.step,
            "made": entry.made.value,
            "rows": entry.rows,
            "parts": entry.parts if entry.parts > 1 else None,
            "rounded": entry.trained.rounded and entry.trained.rounded.dtype.value,
            "only_from": entry.only_from or None,
            "left_out": entry.trained.left_out and entry.trained.left_out.rows,
            "back_to": entry.back_to,
            "before": entry.before,
        }
        found.append({key: value for key, value in told.items() if value is not None})
    assert found == expected(release, name)["deltas"]


@pytest.mark.parametrize("name", LOGS)
def test_bases_are_what_they_were(release: Path, name: str) -> None:
    facts = expected(release, name)
    for wanted in facts["bases"]:
        base = LogBase.read(release / "models" / name / str(wanted["position"]))
        updates = base.entry.updates
        assert wanted == {
            "position": base.at.position,
            "step": base.at.step,
            "isolation": updates.isolation.value,
            "stamp": updates.stamp,
            "digest": updates.digest,
        }
        assert base.entry.origin is not None
        assert base.entry.origin.files[0].path == "model.py"
    assert log_of(release, name).hold.read() == facts["hold"]


def test_versions_without_deltas_are_what_they_were(release: Path) -> None:
    model, wanted = release / "models/plain", expected(release, "plain")
    assert [event.position for event in Model.read(model).publications] == wanted["versions"]
    assert Hold(model).read() == wanted["hold"]
    taken_back = read_manifest(model / str(wanted["versions"][-1])).taken_back
    assert taken_back is not None
    assert {name: getattr(taken_back, name) for name in wanted["taken_back"]} == wanted["taken_back"]


def test_increments_lead_from_a_full_checkpoint_to_the_newest_values(release: Path) -> None:
    history = read_history(release / "train")
    (marker,) = history.markers
    assert (marker.checkpoint.step, marker.is_equal) == (40, False)
    last = max(history.increments, key=lambda stored: stored.increment.to_step)
    chain = history.chain(marker.checkpoint, last.increment.id)
    assert chain is not None
    found = values_of(release / "train/model.ckpt-40")
    apply_increments(found, chain)
    served = expected_values(release, "ranker")[80]
    assert_same_bits({"items": found["items"]}, {"items": items_of(served)})
    alike = ("users", "kernel", "scale")
    assert_same_bits({name: found[name] for name in alike}, {name: served[name] for name in alike})


def test_forks_are_what_they_were(release: Path) -> None:
    history, wanted = read_history(release / "forked"), expected(release, "forked")
    assert wanted["increments"] == [
        {"id": each.id, "session": each.session, "generation": each.generation}
        for each in (stored.increment for stored in history.increments)
    ]
    (marker,) = history.markers
    found = {"checkpoint": marker.checkpoint.name, "after": marker.after, "is_equal": marker.is_equal}
    assert found == wanted["marker"]


def test_caches_are_read(release: Path) -> None:
    """A cache of another format is made again; those of this release are read."""
    log = log_of(release, "ranker")
    lineage = log.base.manifest.lineage or ""
    of_50 = next(delta for delta in list_deltas(log.path) if (delta.start, delta.end) == (40, 50))
    kept = load_residual(
        log.path / CACHES_DIRECTORY, log.schema, lineage=lineage, position=50, state=of_50.manifest.state_id
    )
    assert kept is not None
    assert sum(len(change.ids) for change in kept.changes.values() if isinstance(change, Rows)) == 3
    newest = next(delta for delta in list_deltas(log.path) if (delta.start, delta.end) == (70, 80))
    hashes = read_index(
        log.path / HASHES_DIRECTORY, lineage=lineage, position=80, state=newest.manifest.state_id
    )
    assert hashes is not None or release != OWN


@pytest.mark.parametrize("name", [*LOGS, "plain"])
def test_verification_finds_nothing(release: Path, name: str) -> None:
    ran = export_model("verify", release / "models" / name, "--bytes")
    assert ran.code == 0, ran.err


def test_publishing_goes_on_where_the_release_left_off(release: Path, tmp_path: Path) -> None:
    train, model = tmp_path / "train", tmp_path / "model"
    shutil.copytree(release / "train", train)
    shutil.copytree(release / "models/ranker", model)
    ran = export_model("resume", model, "--json")
    assert (ran.code, ran.document["position"]) == (0, 84), ran.err
    values = expected_values(release, "ranker")[80]
    assert_serves(values_at(read_log(model), 84), values)
    train_on(train)
    ran = export_model("--ckpt-dir", train, "--out", model, "--incr", "--json")
    assert ran.code == 0, ran.err
    assert (ran.document["from_position"], ran.document["rows"], ran.document["compares"]) == (84, 1, False)
    values["users"][3] = 1
    assert_serves(values_at(read_log(model)), values)


@pytest.mark.landing
def test_tensorflow_serves_every_position(release: Path) -> None:
    from tests.support.updatable import loaded

    users, items, words = np.arange(8), np.arange(7), ["red", "green", "blue", "grey"]
    with loaded(release / "models/ranker/10") as server:
        for position, values in sorted(expected_values(release, "ranker").items()):
            assert server.update(position)["position"] == position
            found = server.predict(user=users, item=items, word=words)
            assert_same_bits({"row": found["row"]}, {"row": items_of(values)})
            scores = (values["users"] * values["kernel"]).sum(axis=1) * values["scale"]
            np.testing.assert_allclose(found["score"], scores, rtol=1e-5)
            entries = {
                key.decode(): n for key, n in zip(values["seen-keys"], values["seen-values"], strict=True)
            }
            assert found["number"].tolist() == [entries.get(word, -1) for word in words]
            assert set(found["model_position"].tolist()) == {position}


@pytest.mark.landing
def test_a_hold_of_this_release_stops_servers_of_each(release: Path, tmp_path: Path) -> None:
    """Its document lies where graphs list deltas; the number is all that they read."""
    from tests.support.updatable import loaded

    model = Path(shutil.copytree(release / "models/ranker", tmp_path / "ranker"))
    log = read_log(model)
    log.hold.lift()
    first, *_, newest = sorted({delta.end for delta in log.deltas})
    assert approve(log.path, model, expected=None, position=first) == first
    with loaded(model / "10") as server:
        assert server.update()["position"] == first
        assert approve(log.path, model, expected=first, position=newest) == newest
        assert server.update()["position"] == newest


@pytest.mark.landing
def test_tensorflow_serves_bases_of_another_kind(release: Path) -> None:
    from tests.support.updatable import loaded

    values, items = expected_values(release, "deeprec"), np.arange(7)
    for position in (10, 20):
        with loaded(release / "models/deeprec" / str(position)) as server:
            rows = server.predict(item=items)["row"]
            np.testing.assert_array_equal(rows, items_of(values[position]) * values[position]["scale"])
            assert server.update()["position"] == 20
            rows = server.predict(item=items)["row"]
            np.testing.assert_array_equal(rows, items_of(values[20]) * values[20]["scale"])


def test_documents_of_this_release_are_written_as_they_are_read() -> None:
    for path in (OWN / "models").rglob("manifest.json"):
        assert to_json(from_json(path.read_bytes())).encode() == path.read_bytes(), path
    for path in OWN.glob("*/increments/*/manifest.json"):
        assert increment_to_json(increment_from_json(path.read_bytes(), path)).encode() == path.read_bytes()
    for path in OWN.glob("*/increments/*.json"):
        assert CheckpointMarker.from_json(path.read_bytes(), path).to_json().encode() == path.read_bytes(), (
            path
        )


def test_this_release_writes_what_its_folder_holds(tmp_path: Path) -> None:
    assert OWN in RELEASES, "a new release has no folder yet: python -m tests.golden.generate"
    command = [sys.executable, "-m", "tests.golden.generate", str(tmp_path / "new")]
    subprocess.run(command, check=True, cwd=GOLDEN.parent.parent, timeout=600)
    written = files(tmp_path / "new")
    assert [name for name in written if Path(name).name not in SINCE_THEN] == files(OWN)
    for name in files(OWN):
        assert comparable(tmp_path / "new" / name) == comparable(OWN / name), name


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def comparable(path: Path) -> bytes:
    """A file's bytes, less what depends on the build of TensorFlow or on Python's."""
    if path.name == "saved_model.pb":
        return b""
    content = path.read_bytes()
    if path.name == "manifest.json":
        content = re.sub(rb'(?<="path":"saved_model.pb","bytes":)\d+,"crc32c":"\w+"', b"", content)
        content = re.sub(rb'"tensorflow": "[^"]*",\n ', b"", content)
        since_then = rb'"(oldest_server|identity|publisher)": "[^"]*",\n '
        content = re.sub(since_then, b"", content)
        content = re.sub(rb'"merged_from": [^\n]*\n ', b"", content)
        content = re.sub(rb',"(libraries|linked)":\{[^}]*\}', b"", content)  # these, too
        content = re.sub(rb'"(code|graph|plan_digest)": ?"\w*"', b"", content)
    return content

"""What a delta changed, as `history --changes` and the agent's page tell it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exporter.delta.format import Rows
from exporter.publish import what_changed as module
from exporter.publish.delta_log import read_log
from exporter.publish.what_changed import what_changed
from serving.agent.http import changed
from tests.support.commands import export_model
from tests.support.damage import SHARD, truncate
from tests.support.logs import Serving
from tests.support.setting import followed


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A base, and two deltas."""
    trainer = followed(tmp_path, serving=Serving(parts=2), parts=3, name="ranker")
    for step in (20, 30):
        trainer.train()
        trainer.step = step
        trainer.increment()
        done = export_model("--ckpt-dir", tmp_path / "train", "--out", tmp_path / "ranker", "--incr")
        assert done.code == 0, done.err
    return tmp_path / "ranker"


def test_rows_and_moves_are_those_between_the_two_states(published: Path) -> None:
    log = read_log(published)
    delta = next(one for one in log.deltas if (one.start, one.end) == (20, 30))
    found = {one.variable: one for one in what_changed(log, delta)}
    before, after = log.state(20), log.state(30)
    assert set(found) >= {one.name for one in log.schema.variables if one.name in log.open(delta).changes}
    tables = [one for one in found.values() if one.rows is not None]
    assert tables
    for name, one in found.items():
        difference = after.whole(name).astype(np.float64) - before.whole(name).astype(np.float64)
        change = log.open(delta).changes[name]
        ids = change.ids if isinstance(change, Rows) else np.zeros(1, np.int64)
        if isinstance(change, Rows):
            difference = difference[ids]
        norms = np.sqrt(np.sum(difference.reshape(len(ids), -1) ** 2, axis=1))
        whole = np.sqrt(np.sum(norms**2))
        assert one.moved == (pytest.approx(whole, rel=1e-5) if np.isfinite(whole) else None), name
        bad = [int(row) for row in ids[~np.isfinite(norms)]][:3]
        assert [mover.row for mover in one.movers if mover.moved is None] == (bad if one.rows else [])
        moves = [mover.moved for mover in one.movers if mover.moved is not None]
        if one.rows and len(bad) < 3 and np.nansum(norms) > 0:
            assert moves[0] == pytest.approx(norms[np.isfinite(norms)].max(), rel=1e-5)
            assert moves == sorted(moves, reverse=True)


def test_of_a_large_delta_rows_are_counted(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    log = read_log(published)
    found = what_changed(log, log.deltas[-1])
    assert sum(one.rows or 0 for one in found) == log.deltas[-1].entry.rows
    assert not any(one.movers or one.moved is not None for one in found)


def test_history_tells_it_and_without_being_asked_does_not(published: Path) -> None:
    asked = export_model("history", published, "--changes", "--json").document["events"]
    assert asked[0]["changes"] is None, "a base"
    first = asked[-1]["changes"][0]
    assert first["rows"] > 0 and first["movers"]
    usual = export_model("history", published, "--json").document["events"]
    assert all(event["changes"] is None for event in usual)
    text = export_model("history", published, "--last", "1", "--changes").out
    assert f"at 30, {first['variable']}: {first['rows']} row" in text
    assert "furthest row" in text


def test_the_page_reads_it_once_and_damage_is_nothing(published: Path) -> None:
    changed.cache_clear()
    found = changed(str(published), 30)
    assert found is not None and found[0] == 30 and found[1]
    assert changed(str(published), 30) is found
    assert changed(str(published), 31) is None
    for delta in read_log(published).deltas:
        truncate(delta.path / SHARD)
    changed.cache_clear()
    assert changed(str(published), 30) is None
    asked = export_model("history", published, "--changes", "--json")
    assert asked.code == 0
    assert all(event["changes"] is None for event in asked.document["events"])

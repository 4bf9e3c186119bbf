"""`--delta-budget`: the rows that changed most go first, what stays behind is told, and competes again."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.cli.watched import PREFIX, Watched
from exporter.delta.packing import round_rows
from exporter.delta.tolerance import _Cut
from exporter.errors import UsageError, WildValues
from exporter.options import DeltaDtype, OnWild
from exporter.options.given import changed
from exporter.pipeline import incremental
from exporter.publish.delta_log import read_log
from exporter.publish.manifest import DeltaEntry
from exporter.storage.layout import CACHES_DIRECTORY
from tests.support import deeprec_logs
from tests.support.budget import times
from tests.support.budgets import OVERHEAD, BudgetedWorld, bytes_on_disk, differing, export
from tests.support.commands import export_model
from tests.support.drifting import drift, servings
from tests.support.logs import (
    Serving,
    Trainer,
    assert_same_bits,
    request,
    served_now,
    values_at,
)

LIFE = [
    "train",
    "drift",
    "drift",
    "save",
    "increment",
    "increment",
    "budget",
    "budget",
    "budget",
    "aged",
    "export",
]
LIFE += ["rounded", "watch", "merge", "tidy", "rollback", "resume", "set back", "rebase", "forget"]


def live(directory: Path, serving: Serving, what: list[str], seed: int) -> None:
    world, rng = BudgetedWorld(directory, serving, seed), np.random.default_rng(seed)
    for each in what:
        world.do(each, rng)
    world.export(0.0)


@pytest.mark.landing
@settings(max_examples=times(200))
@given(servings, st.lists(st.sampled_from(LIFE), min_size=4, max_size=25), st.integers(0, 1000))
def test_what_is_served_is_what_is_told(serving: Serving, what: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        live(Path(directory), serving, what, seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_life_under_a_budget(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    live(tmp_path, Serving(parts=1 + seed % 2), [str(each) for each in rng.choice(LIFE, 20)], seed)


@pytest.mark.parametrize("by", ["increments", "comparison"])
def test_the_rows_that_changed_most_go_first_and_the_others_later(
    trainer: Trainer, tmp_path: Path, by: str
) -> None:
    model = tmp_path / "model"
    users, items = trainer.values["net/users"].copy(), trainer.values["net/items"].copy()
    users[:6, 0] += [1, 6, 2, 5, 3, 4]
    items[:2, 0] += [2.5, 0.5]
    trainer.values |= {"net/users": users, "net/items": items}
    trainer.step, trainer.touched = 11, {"net/users": set(range(6)), "net/items": {0, 1}}
    trainer.increment() if by == "increments" else trainer.save()
    fixed = export(trainer, model, "1B", max_row_age=1e9).budgeted
    assert fixed is not None
    users[7, 0] += 2.75
    trainer.values["net/users"], trainer.step, trainer.touched = users, 12, {"net/users": {7}}
    trainer.increment() if by == "increments" else trainer.save()
    sent = []
    for _ in range(4):
        before = values_at(read_log(model))
        done = export(trainer, model, f"{fixed.due + 50}B")
        after = values_at(read_log(model))
        sent.append({name: ids.tolist() for name, ids in differing(before, after).items() if len(ids)})
    assert sent == [
        {"s/users": [1, 3]},
        {"s/items": [0], "s/users": [5]},
        {"s/users": [4, 7]},
        {"s/users": [0, 2]},
    ]
    assert done.left_out is not None and (done.left_out.rows, done.left_out.largest) == (1, 0.5)
    assert export(trainer, model).left_out is None
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_a_delta_says_how_it_used_its_budget(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    done = export(trainer, model, f"{OVERHEAD}B")
    assert done.published is not None
    entry = done.published.manifest.incremental
    assert isinstance(entry, DeltaEntry)
    used = entry.budget
    assert used is not None and used == done.budgeted
    assert (
        used.allowed == OVERHEAD >= used.sent > used.due == used.sent - done.rows * 20 + 0
        or used.sent <= used.changes
    )
    assert bytes_on_disk(done.published.path) <= OVERHEAD


def test_an_age_sends_what_waited_and_says_what_would_be_enough(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = tmp_path / "model", 1e9
    monkeypatch.setattr(incremental.time, "time", lambda: now)
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    first = export(trainer, model, "1B", max_row_age=60.0)
    assert first.left_out is not None and first.left_out.since is not None
    assert (first.rows, first.left_out.rows, first.left_out.since.timestamp()) == (0, 16, now)
    now += 59
    trainer.values["net/users"] = trainer.values["net/users"] + np.float32(1)
    trainer.touched["net/users"], trainer.step = set(range(23)), trainer.step + 1
    trainer.increment()
    again = export(trainer, model, "1B", max_row_age=60.0)
    assert again.left_out is not None and again.left_out.since is not None
    assert (again.rows, again.left_out.since.timestamp()) == (0, now - 59), (
        "a row that changes again waits on"
    )
    now += 1
    sent = export(trainer, model, "1B", max_row_age=60.0)
    assert sent.rows == 16 and sent.left_out is not None and sent.left_out.since is not None
    assert sent.left_out.since.timestamp() == now - 1
    assert sent.budgeted is not None and sent.budgeted.excess > 16 * 16


def test_the_command_tells_a_budget_that_is_too_small(trainer: Trainer, tmp_path: Path) -> None:
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    command = ["--ckpt-dir", trainer.directory, "--out", tmp_path / "model", "--incr", "--delta-budget"]
    shown = export_model(*command, "64B")
    assert "left out" in shown.out and "budget" in shown.out
    enough = shown.err.partition("--delta-budget ")[2].split()[0]
    told = export_model(*command, enough, "--json").document
    assert told["status"] == "nothing_to_do" or told["budget"]["due"] <= told["budget"]["allowed"]
    assert export_model(*command, "a lot").code == 2


@given(
    st.lists(st.tuples(st.lists(st.floats(0, 2, width=32), max_size=40), st.integers(8, 300))),
    st.integers(0, 20_000),
)
def test_the_cut_sends_as_much_as_fits_from_the_top(tables: list[tuple[list[float], int]], room: int) -> None:
    class Scored:
        def __init__(self, scores: list[float], row_bytes: int) -> None:
            self.competing, self.row_bytes = np.array(scores, np.float32), row_bytes

    pools = [Scored(*table) for table in tables]
    cut = _Cut.of(pools, room)
    sent = [cut.passes(pool.competing, pool.row_bytes) for pool in pools]
    used = sum(int(mask.sum()) * pool.row_bytes for mask, pool in zip(sent, pools, strict=True))
    assert used <= room
    gone = [float(d) for mask, pool in zip(sent, pools, strict=True) for d in pool.competing[mask]]
    left = [
        (float(d), pool.row_bytes)
        for mask, pool in zip(sent, pools, strict=True)
        for d in pool.competing[~mask]
    ]
    if left:
        highest = max(score for score, _ in left)
        assert highest <= min(gone, default=np.inf)
        assert used + max(size for score, size in left if score == highest) > room


def test_a_rate_is_kept_in_any_ten_seconds(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks come at irregular times, the trainer goes on, and a pause saves up no more than ten seconds."""
    model, now, rate = tmp_path / "model", time.time(), 3 * OVERHEAD
    monkeypatch.setattr(incremental.time, "time", lambda: now)
    rng, sent = np.random.default_rng(5), []
    wide = {"net/users": np.zeros((23, 3), np.float32)}
    for pause in [*rng.choice([0.3, 0.7, 1.0, 1.01, 1.4], 60), 45.0, *rng.choice([0.9, 1.0], 30)]:
        now += float(pause)
        trainer.values |= {name: value + rng.normal(size=value.shape) for name, value in wide.items()}
        trainer.values["net/users"] = trainer.values["net/users"].astype(np.float32)
        trainer.touched, trainer.step = {"net/users": set(range(23))}, trainer.step + 1
        trainer.increment()
        done = export(trainer, model, f"{rate}B/s", watches=True)
        if done.published is not None:
            sent.append((now, bytes_on_disk(done.published.path)))
    for at, _ in sent:
        assert sum(size for when, size in sent if at <= when < at + 10) <= 10 * rate
    assert len(sent) > 40
    now -= 3600
    drift(trainer, 0.5)
    trainer.increment()
    assert export(trainer, model, f"{rate}B/s", watches=True).published is not None, "a clock was set back"


def test_a_watch_sends_what_is_left_at_its_rate_and_otherwise_with_the_next_news(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = tmp_path / "model", time.time() + 100
    monkeypatch.setattr(incremental.time, "time", lambda: now)
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    assert export(trainer, model, "1B", watches=True).rows == 0
    assert export(trainer, model, f"{OVERHEAD}B", watches=True).published is None, "no news"
    assert export(trainer, model, "1B/s", watches=True).published is None, "there is no room yet"
    now += 2
    assert export(trainer, model, f"{OVERHEAD}B/s", watches=True).rows == 16
    assert export(trainer, model, f"{OVERHEAD}B/s", watches=True).published is None
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_history_and_the_doctor_tell_what_a_budget_does(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"

    def after_delta(room: str) -> dict[str, Any]:
        drift(trainer, 0.5, rows=8)
        trainer.increment()
        found = export(trainer, model, room).budgeted
        assert found is not None
        return {"used": found} | export_model("doctor", model, "--json").document

    def said(document: dict[str, Any]) -> str:
        return "".join(one["message"] for one in document["findings"] if one["code"] == "budget")

    first = after_delta("1B")
    assert "1 of the last 1 deltas with a budget exceeded it" in said(first)
    shutil.rmtree(read_log(model).path)
    for _ in range(5):
        narrow = after_delta(f"{first['used'].due + 20}B")
    assert "the last 5 deltas with a budget sent" in said(narrow)
    events = export_model("history", model, "--json").document["events"]
    assert [event["budget"]["allowed"] for event in events[1:]] == [first["used"].due + 20] * 5
    assert events[1]["left_out"]["rows"] > 8
    assert "held back" in export_model("history", model).out


@pytest.mark.parametrize("on_wild", list(OnWild))
@pytest.mark.parametrize("rule", ["auto", "500", ".*users.*=500"])
def test_rows_that_have_gone_wild_are_told_refused_or_kept_from_servers(
    trainer: Trainer, tmp_path: Path, on_wild: OnWild, rule: str
) -> None:
    model = tmp_path / "model"
    before = values_at(read_log(model))
    drift(trainer, 0.5)
    users = trainer.values["net/users"].copy()
    users[[2, 5]] = [[1e38, 0, 0], [-600, 0, 0]]
    trainer.values["net/users"] = users
    trainer.touched["net/users"] |= {2, 5}
    trainer.increment()
    given = {"max_norm": (rule,), "on_wild": on_wild}
    if on_wild is OnWild.REFUSE:
        with pytest.raises(WildValues, match="2 rows of 's/users'") as caught:
            export(trainer, model, **given)
        assert "row 2 has the norm 1e+38" in caught.value.cause
        assert_same_bits(values_at(read_log(model)), before)
        return
    done = export(trainer, model, **given)
    (found,) = done.wild
    assert (found.table, found.rows, found.row, found.held) == ("s/users", 2, 2, on_wild is OnWild.HOLD_ROW)
    trained = served_now(trainer, Serving())
    if on_wild is OnWild.WARN:
        assert_same_bits(values_at(read_log(model)), trained)
    else:
        trained["s/users"] = trained["s/users"].copy()
        trained["s/users"][[2, 5]] = before["s/users"][[2, 5]]
        assert_same_bits(values_at(read_log(model)), trained)
        assert done.left_out is not None and (done.left_out.rows, done.left_out.wild) == (2, 2)
    assert export(trainer, model, **given).published is None, "nothing new"
    codes = [one["code"] for one in export_model("doctor", model, "--json").document["findings"]]
    assert "wild" in codes
    users[[2, 5]] = 1
    trainer.touched["net/users"], trainer.step = {2, 5}, trainer.step + 1
    trainer.increment()
    assert export(trainer, model, **given).wild == ()
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


@pytest.mark.parametrize("rule", ["", "lots", "-1", "inf", "nan", "(=1", "a=b"])
def test_a_norm_is_a_positive_number(trainer: Trainer, tmp_path: Path, rule: str) -> None:
    with pytest.raises(UsageError, match="--max-norm"):
        export(trainer, tmp_path / "model", max_norm=(rule,))


def test_rows_are_rounded_under_a_budget_of_more_of_them(trainer: Trainer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    before, trained = values_at(read_log(model)), served_now(trainer, Serving())
    due = export_model(
        "--ckpt-dir", trainer.directory, "--out", model, "--incr", "--delta-budget", "1B", "--json"
    )
    room = due.document["budget"]["due"] + 60  # rows of users take 15 bytes each, of items as they are 16
    done = export(trainer, model, f"{room}B", delta_dtype=DeltaDtype.INT8)
    assert 3 <= done.rows <= 4 and done.published is not None
    log = read_log(model)
    assert done.left_out is not None and done.left_out.rows == 16 - done.rows
    for name, served in values_at(log).items():
        image = round_rows(trained[name], DeltaDtype.INT8) if trained[name].ndim == 2 else trained[name]
        for row in differing({name: served}, {name: before[name]})[name]:
            assert served[row].tobytes() in (image[row].tobytes(), trained[name][row].tobytes())
    whole = export(trainer, model, delta_dtype=DeltaDtype.INT8)
    assert whole.left_out is None and whole.rounded is not None
    assert export(trainer, model).rounded is None
    assert_same_bits(values_at(read_log(model)), trained)


def test_a_watch_follows_under_a_rate(trainer: Trainer, tmp_path: Path) -> None:
    """The command itself: it sends what fits, then the rest, and ends when nothing waits."""
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    command = ["--ckpt-dir", trainer.directory, "--out", tmp_path / "model", "--incr", "--watch"]
    limits = [
        "--delta-budget",
        "10KB/s",
        "--delta-budget",
        "age=60",
        "--interval",
        0.1,
        "--until",
        "idle=3",
        "--json",
    ]
    ran = export_model(*command, *limits)
    assert ran.code == 0
    assert read_log(tmp_path / "model").trained.left_out is None
    assert_same_bits(values_at(read_log(tmp_path / "model")), served_now(trainer, Serving()))


def test_what_an_exporter_forgot_is_found_by_comparing_and_waits_as_long_as_was_told(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = tmp_path / "model", time.time() + 100
    monkeypatch.setattr(incremental.time, "time", lambda: now)
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    told = export(trainer, model, "1B").left_out
    shutil.rmtree(read_log(model).path / CACHES_DIRECTORY)
    began, now = now, now + 50
    drift(trainer, 0.5, rows=2)
    trainer.increment()
    done = export(trainer, model, "1B", max_row_age=51.0)
    assert done.compared_bytes and done.left_out is not None and told is not None
    assert (done.rows, done.left_out.since) == (0, told.since)
    assert told.since == datetime.fromtimestamp(began, timezone.utc)
    now += 2  # of all rows that differ it is not known any more which of them waited
    assert export(trainer, model, "1B", max_row_age=51.0).left_out is None
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_a_watch_has_metrics_of_what_it_holds_back(trainer: Trainer, tmp_path: Path) -> None:
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    done = export(trainer, tmp_path / "model", "1B")
    assert done.published is not None and done.budgeted is not None and done.left_out is not None
    seen = Watched(tmp_path / "model")
    seen.published(done.published.manifest)
    found = {family.name.removeprefix(f"{PREFIX}_"): family.samples for family in seen.collect()}
    values = {name: samples[0].value for name, samples in found.items() if samples}
    assert (values["held_back_rows"], values["wild_rows"], values["change_sent_ratio"]) == (16, 0, 0)
    assert values["held_back_since_timestamp_seconds"] == done.left_out.since.timestamp()  # type: ignore[union-attr]
    assert (values["budget_bytes"], values["budget_excess_bytes"]) == (1, done.budgeted.excess)
    assert values["change_bytes"] == done.budgeted.changes > done.budgeted.due


@pytest.mark.parametrize("on_wild", list(OnWild))
@pytest.mark.parametrize("rule", ["auto", "s/kernel=500"])
def test_a_variable_that_is_served_whole_goes_wild(
    trainer: Trainer, tmp_path: Path, on_wild: OnWild, rule: str
) -> None:
    """No server can keep a part of a network: what holds rows refuses the delta."""
    model, before = tmp_path / "model", values_at(read_log(tmp_path / "model"))
    drift(trainer, 0.5)
    trainer.values["net/kernel"] = np.full((3, 4), 1e30, np.float32)
    trainer.touched["net/kernel"] = set()
    trainer.increment()
    if on_wild is not OnWild.WARN:
        with pytest.raises(WildValues, match="'s/kernel'") as caught:
            export(trainer, model, max_norm=(rule,), on_wild=on_wild)
        assert "hold-row" not in caught.value.hint, "it would not help"
        assert_same_bits(values_at(read_log(model)), before)
        return
    (found,) = export(trainer, model, max_norm=(rule,), on_wild=on_wild).wild
    assert (found.table, found.rows, found.held) == ("s/kernel", 1, False)
    assert_same_bits(values_at(read_log(model)), served_now(trainer, Serving()))


def test_a_number_for_all_tables_is_none_for_what_is_served_whole(trainer: Trainer, tmp_path: Path) -> None:
    trainer.values["net/kernel"], trainer.step = np.full((3, 4), 9.0, np.float32), 11
    trainer.touched["net/kernel"] = set()
    trainer.increment()
    assert export(trainer, tmp_path / "model", max_norm=("10",)).wild == ()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_no_numbers_are_beyond_each_norm(
    trainer: Trainer, tmp_path: Path, value: float
) -> None:
    model, before = tmp_path / "model", values_at(read_log(tmp_path / "model"))
    drift(trainer, 0.5)
    users = trainer.values["net/users"].copy()
    users[2, 1] = value
    trainer.values["net/users"] = users
    trainer.touched["net/users"] |= {2}
    trainer.increment()
    done = export(trainer, model, max_norm=("auto",), on_wild=OnWild.HOLD_ROW)
    assert [(found.row, found.norm) for found in done.wild] == [(2, sys.float_info.max)]
    assert done.left_out is not None and done.left_out.largest == sys.float_info.max
    after = values_at(read_log(model))
    assert after["s/users"][2].tobytes() == before["s/users"][2].tobytes()
    assert {n: rows.tolist() for n, rows in differing(after, served_now(trainer, Serving())).items()} == {
        "s/users": [2],
        "s/items": [],
        "s/kernel": [],
        "s/scale": [],
    }


def test_a_row_that_is_kept_from_servers_is_never_overdue(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = tmp_path / "model", 1e9
    monkeypatch.setattr(incremental.time, "time", lambda: now)
    drift(trainer, 0.5)
    users = trainer.values["net/users"].copy()
    users[2] = 1e30
    trainer.values["net/users"] = users
    trainer.touched["net/users"] |= {2}
    trainer.increment()
    keeps: dict[str, Any] = {"max_row_age": 60.0, "max_norm": ("auto",), "on_wild": OnWild.HOLD_ROW}
    told = export(trainer, model, "1MB", **keeps).left_out
    assert told is not None and (told.rows, told.since) == (1, None)
    now += 3600
    assert incremental.plan_incremental(
        changed(request(trainer, model), delta_budget="1MB", **keeps)
    ).is_nothing
    sent = export(trainer, model, "1MB", max_row_age=60.0)
    assert (sent.rows, sent.left_out) == (1, None)


def test_what_was_forgotten_is_due_in_time_after_a_clock_was_set_back(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, now = tmp_path / "model", 2e9
    monkeypatch.setattr(incremental.time, "time", lambda: now)
    drift(trainer, 0.5, rows=8)
    trainer.increment()
    assert export(trainer, model, "1B", max_row_age=60.0).rows == 0
    shutil.rmtree(read_log(model).path / CACHES_DIRECTORY)
    now -= 1e6
    drift(trainer, 0.5, rows=2)
    trainer.increment()
    told = export(trainer, model, "1B", max_row_age=60.0).left_out
    assert told is not None and told.since is not None and told.since.timestamp() == now


def test_the_row_of_a_new_key_that_is_wild_is_no_other_keys(tmp_path: Path) -> None:
    """Its place may be that of a key that was removed: servers read zeros there until it is sane."""
    trainer, model = deeprec_logs.DeepRecTrainer(tmp_path / "train"), tmp_path / "model"
    trainer.upsert("item", range(1, 40))
    trainer.upsert("emb/user", range(1, 40))
    trainer.save()
    deeprec_logs.publish_base(trainer, model)

    def publish(**options: Any) -> incremental.ExportedDelta:
        trainer.step += 1
        trainer.save()
        asked = deeprec_logs.request(trainer, model, **options)
        done = incremental.export_incremental(asked)
        assert isinstance(done, incremental.ExportedDelta)
        return done

    trainer.evict("item", range(1, 20))
    wild, sane = (np.full(deeprec_logs.DIM, value, np.float32).tobytes() for value in (1e30, 2.0))
    trainer.tables["item"] |= dict.fromkeys(range(100, 120), wild)
    trainer.freqs["item"] |= dict.fromkeys(range(100, 120), 1)
    for _ in range(2):
        done = publish(max_norm=("100",), on_wild=OnWild.HOLD_ROW)
        assert done.left_out is not None and done.left_out.rows == done.left_out.wild == 20
        rows = deeprec_logs.served(read_log(model))["item"]
        assert {rows[key] for key in range(100, 120)} == {bytes(len(sane))}
    trainer.tables["item"] |= dict.fromkeys(range(100, 120), sane)
    assert publish(max_norm=("100",), on_wild=OnWild.HOLD_ROW).left_out is None
    assert deeprec_logs.served(read_log(model)) == trainer.now()

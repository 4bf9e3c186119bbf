"""Lookup tables that training fills, in models that take deltas: a delta replaces all entries of one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exporter.delta.format import Change, ChangeKind, Schema, ServedVariable, TableContents, TableSide
from exporter.errors import NotServable, SchemaChanged
from exporter.options import DeltaDtype, ExportRequest, Isolation, Jobs, Updates
from exporter.pipeline import full_plan
from exporter.pipeline.comparison import compare, parse_side
from exporter.pipeline.full import export, plan
from exporter.pipeline.incremental import ExportedDelta
from exporter.pipeline.log_maintenance import merge, resume, rollback
from exporter.pipeline.rebase import rebase
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.publish.manifest import DeltaOrigin
from exporter.verify.log import verify_model
from exporter.wire.dtypes import DType
from tests.support.commands import export_model
from tests.support.lookup_tables import KINDS, TableTrainer
from tests.support.publishing import delta_of
from tests.support.updatable import Loaded, loaded, loaded_quickly

ENDS: dict[str, Mapping[str, str]] = {
    "inputs": {"x": "x", "ids": "ids"},
    "outputs": {"y": "y", "rows": "rows"},
}


def request(trainer: TableTrainer, model: Path, **options: Any) -> ExportRequest:
    return ExportRequest(trainer.directory, model, **ENDS, **options)


def publish_base(trainer: TableTrainer, model: Path, **updates: Any) -> dict[str, Any]:
    trainer.insert()
    trainer.save()
    export(request(trainer, model, updates=Updates(stamp=True, **updates)))
    return trainer.answers()


def publish(trainer: TableTrainer, model: Path, **options: Any) -> ExportedDelta:
    return delta_of(request(trainer, model, **options))


@contextmanager
def served(model: Path, position: int = 10) -> Iterator[Loaded]:
    with loaded_quickly(model / str(position)) as server:
        yield server


def assert_answers(server: Loaded, trainer: TableTrainer, expected: Mapping[str, Any]) -> None:
    found = server.predict(**trainer.asked())
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def in_delta(log: DeltaLog, end: int) -> set[str]:
    (found,) = [delta for delta in log.deltas if delta.end == end]
    return set(log.open(found).changes)


SEEN = {"seen-keys", "seen-values"}


@pytest.mark.landing
@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("kind", KINDS)
def test_a_delta_replaces_the_entries_of_a_table(kind: str, isolation: Isolation, tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train", kind), tmp_path / "model"
    before = publish_base(trainer, model, isolation=isolation)
    with served(model) as server:
        assert_answers(server, trainer, before)
        trainer.insert(40, seed=1)
        trainer.remove(7)
        trainer.train()
        trainer.save()
        done = publish(trainer, model)
        assert done.published is not None
        assert {"seen-keys", "seen-values", "emb"} <= in_delta(read_log(model), done.at.position)
        assert server.update()["status"].startswith(f"current: at {done.at.position}")
        after = trainer.answers()
        assert str(after["y"]) != str(before["y"])
        assert_answers(server, trainer, after)

        trainer.train()
        trainer.save()
        done = publish(trainer, model)
        assert not in_delta(read_log(model), done.at.position) & SEEN, (
            "a table that did not change costs none"
        )
        server.update()
        assert_answers(server, trainer, trainer.answers())
    assert publish(trainer, model).published is None
    with served(model) as fresh:
        assert fresh.update()["deltas"] == 2
        assert_answers(fresh, trainer, trainer.answers())
    assert not verify_model(model, bytes_=True).problems


def test_a_table_that_got_empty_and_one_that_was(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train", "mutable-string-int64"), tmp_path / "model"
    trainer.save()
    export(request(trainer, model, updates=Updates()))
    with served(model) as server:
        assert_answers(server, trainer, trainer.answers())
        for change in (trainer.insert, lambda: trainer.remove(20)):
            change()
            trainer.train()
            trainer.save()
            publish(trainer, model)
            server.update()
            assert_answers(server, trainer, trainer.answers())
        assert set(server.predict(**trainer.asked())["y"]) == {-1}


@pytest.mark.landing
def test_positions_merge_go_back_and_become_a_base(tmp_path: Path) -> None:
    """What a replica serves at each position, whichever way it went there."""
    trainer, model = TableTrainer(tmp_path / "train", "mutable-int64-vectors"), tmp_path / "model"
    known = {10: publish_base(trainer, model)}
    with served(model) as steady, served(model) as lagging:
        for seed in (1, 2, 3):
            trainer.insert(30, seed)
            trainer.train()
            trainer.save()
            done = publish(trainer, model)
            known[done.at.position] = trainer.answers()
            steady.update()
            assert_answers(steady, trainer, known[done.at.position])
        assert list(known) == [10, 11, 12, 13]
        log = read_log(model)
        for position, expected in known.items():
            state = log.state(position)
            keys = state.whole("seen-keys")
            assert len(keys) == len(state.whole("seen-values")) == len(set(keys.tolist()))
            entries = dict(zip(keys.tolist(), state.whole("seen-values").tolist(), strict=True))
            asked = trainer.asked()["x"].tolist()
            assert [entries.get(key, [-1, -1, -1]) for key in asked] == expected["y"].tolist()

        merged = merge(model, jobs=Jobs(task_bytes=1))
        assert merged is not None
        assert merged.tasks > 1
        assert lagging.update()["deltas"] == 1
        assert_answers(lagging, trainer, known[13])

        rollback(model, 11)
        steady.update()
        lagging.update()
        for server in (steady, lagging):
            assert_answers(server, trainer, known[11])
        resume(model)
        steady.update()
        assert_answers(steady, trainer, known[13])

    rebased = rebase(model, jobs=Jobs(task_bytes=1))
    assert rebased is not None
    with served(model, rebased.published.version) as fresh:
        assert_answers(fresh, trainer, known[13])
        trainer.insert(50, 4)
        trainer.train()
        trainer.save()
        publish(trainer, model)
        assert fresh.update()["deltas"] == 1
        assert_answers(fresh, trainer, trainer.answers())
    assert not verify_model(model, bytes_=True).problems


def test_diff_tells_of_a_table_that_grew(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train"), tmp_path / "model"
    publish_base(trainer, model)
    trainer.insert(200, 1)
    trainer.save()
    assert publish(trainer, model).published is not None
    for sides in ((f"{model}@10", f"{model}@11"), (f"{model}@10", str(trainer.directory))):
        found = compare(*map(parse_side, sides))
        assert {(each.name, each.norm) for each in found.variables} == {(name, None) for name in SEEN}
        assert not (found.only_a or found.only_b)
    assert compare(parse_side(f"{model}@11"), parse_side(str(trainer.directory))).is_empty

    other = TableTrainer(tmp_path / "other", "mutable-int64-vectors")
    publish_base(other, tmp_path / "vectors")
    found = compare(parse_side(f"{model}@11"), parse_side(f"{tmp_path / 'vectors'}@10"))
    assert set(found.only_a) == set(found.only_b) == SEEN


def test_increments_say_nothing_of_tables_and_full_checkpoints_do(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train"), tmp_path / "model"
    base = publish_base(trainer, model)
    trainer.insert(40, 1)
    trainer.train()
    trainer.increment()
    with served(model) as server:
        done = publish(trainer, model)
        assert done.published is not None
        assert in_delta(read_log(model), done.at.position) == {"emb", "bias"}
        server.update()
        assert_answers(server, trainer, {"y": base["y"], "rows": trainer.answers()["rows"]})

        trainer.save(is_equal=True)  # nothing but the table changed since the last position
        done = publish(trainer, model)
        assert done.published is not None
        assert (done.plan.trainer.plan.is_nothing, done.rows) == (True, 0)
        assert in_delta(read_log(model), done.at.position) == SEEN
        server.update()
        assert_answers(server, trainer, trainer.answers())
        assert publish(trainer, model).published is None

        at_full = trainer.answers()["y"]
        trainer.train()
        trainer.increment()
        trainer.insert(60, 2)
        trainer.train()
        trainer.save()
        trainer.insert(60, 3)
        trainer.train()
        trainer.increment()
        done = publish(trainer, model)
        assert done.plan.trainer.plan.is_known, "no row is compared"
        assert done.published is not None
        entry = done.published.manifest.incremental
        assert entry is not None and entry.made is DeltaOrigin.INCREMENTS  # type: ignore[union-attr]
        assert in_delta(read_log(model), done.at.position) == {"emb", "bias", *SEEN}
        server.update()
        found = server.predict(**trainer.asked())
        assert str(found["y"]) != str(at_full)
        np.testing.assert_array_equal(found["rows"], trainer.answers()["rows"])
    with loaded_quickly(_full_version(trainer, tmp_path / "full")) as full:
        np.testing.assert_array_equal(full.predict(**trainer.asked())["y"], found["y"])


def _full_version(trainer: TableTrainer, model: Path) -> Path:
    """What the newest full checkpoint holds, without increments."""
    return export(request(trainer, model)).published.path


def test_a_dry_run_tells_that_a_table_changed(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train"), tmp_path / "model"
    publish_base(trainer, model)
    trainer.train()
    trainer.increment()
    publish(trainer, model)
    trainer.insert(40, 1)
    trainer.save(is_equal=True)
    ran = export_model("--ckpt-dir", trainer.directory, "--out", model, "--incr", "--dry-run", "--json")
    assert ran.document["to_position"] > ran.document["from_position"]


def test_bounds_and_rounding_leave_tables_exact(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train", "mutable-int64-vectors"), tmp_path / "model"
    publish_base(trainer, model)
    with served(model) as server:
        for seed in (1, 2):
            trainer.insert(30, seed)
            trainer.train()
            trainer.save()
            done = publish(trainer, model, min_change=1e3, delta_dtype=DeltaDtype.INT8)
            assert done.left_out is not None
            server.update()
            assert_answers(server, trainer, {"y": trainer.answers()["y"]})
        trainer.train()
        trainer.save()
        publish(trainer, model)
        server.update()
        assert_answers(server, trainer, trainer.answers())


def damaged(name: str, changes: dict[str, Any]) -> dict[str, Change]:
    keys, values = changes["seen-keys"], changes["seen-values"]
    return {
        "keys alone": {"seen-keys": keys},
        "values alone": {"seen-values": values},
        "fewer values": {"seen-keys": keys, "seen-values": values[:-1]},
        "no buckets": {"seen-keys": keys[:0], "seen-values": values[:0]},
        "an odd number": {"seen-keys": keys[:63], "seen-values": values[:63]},
    }[name]


@pytest.mark.landing
@pytest.mark.parametrize(
    "name", ["keys alone", "values alone", "fewer values", "no buckets", "an odd number"]
)
def test_wrong_contents_are_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from exporter.delta import delta_files
    from exporter.delta.delta_files import write_delta

    trainer, model = TableTrainer(tmp_path / "train"), tmp_path / "model"
    before = publish_base(trainer, model)
    trainer.insert(40, 1)
    trainer.train()
    trainer.save()
    position = publish(trainer, model).at.position
    log = read_log(model)
    delta = log.open(log.deltas[0])
    assert len(delta.changes["seen-keys"]) >= 64  # type: ignore[arg-type]
    wrong = {**{name: change for name, change in delta.changes.items() if name not in SEEN}}
    wrong |= damaged(name, dict(delta.changes))
    prefix = delta.catalog.prefix
    with pytest.raises(ValueError, match="'seen-keys'"):
        write_delta(tmp_path / "refused", log.schema, delta.header, wrong)
    monkeypatch.setattr(delta_files, "check_lookups", lambda schema, changes: None)
    write_delta(prefix, log.schema, delta.header, wrong)
    monkeypatch.undo()
    assert len(verify_model(model).problems) > 0
    with served(model) as server:
        status = server.update()["status"]
        assert status.startswith("rows: ") and "has wrong entries for seen-keys" in status
        assert server.position() == 10 < position
        assert_answers(server, trainer, before)


def fill(trainer: TableTrainer, keys: np.ndarray, value: int) -> None:
    """Be at the step `value`: every value of the table and every row equals it."""
    trainer.session.run("insert", {"keys:0": keys, "values:0": np.full([len(keys), 3], value)})
    trainer.session.run("write", {"ids:0": np.arange(60), "new:0": np.full([60, 4], value)})
    trainer.step = value
    trainer.save()


def test_no_response_mixes_a_table_of_one_position_with_rows_of_another(tmp_path: Path) -> None:
    """At each position every value of the table and every row equals the position."""
    trainer, model = TableTrainer(tmp_path / "train", "mutable-int64-vectors"), tmp_path / "model"
    keys = np.arange(3000)

    fill(trainer, keys, 10)
    export(request(trainer, model, updates=Updates(stamp=True)))
    for value in range(11, 31):
        fill(trainer, keys, value)
        assert publish(trainer, model).at.position == value
    seen, mixed, done = set(), [], threading.Event()
    with served(model) as server:
        server.predict(x=keys, ids=[0])

        def read() -> None:
            while not done.is_set():
                found = server.predict(x=keys, ids=np.arange(60))
                position = set(found["model_position"].tolist())
                seen.update(position)
                if not set(np.unique(found["y"])) == set(np.unique(found["rows"])) == position:
                    mixed.append((np.unique(found["y"]), np.unique(found["rows"]), position))

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for value in range(11, 31):
            server.update(value)
        done.set()
        for reader in readers:
            reader.join()
    assert not mixed
    assert len(seen) > 3


@pytest.mark.landing
@pytest.mark.parametrize("mlir", [False, True], ids=["", "mlir"])
def test_an_update_that_is_cut_off_leaves_no_table_behind(mlir: bool, tmp_path: Path) -> None:
    """Also where MLIR rewrites graphs: there, nothing may wait for an operation in a branch of raw ops."""
    import tensorflow as tf

    trainer, model = TableTrainer(tmp_path / "train", "mutable-int64-vectors"), tmp_path / "model"
    keys = np.arange(2000)

    fill(trainer, keys, 10)
    export(request(trainer, model, updates=Updates(stamp=True)))
    for value in range(11, 71):
        fill(trainer, keys, value)
        publish(trainer, model)
    config = tf.compat.v1.ConfigProto()
    config.experimental.enable_mlir_graph_optimization = mlir
    cut = 0
    with loaded(model / "10", config) as server:
        for value in range(12, 71, 2):
            try:
                server.update(value, timeout_ms=1 + value // 4)
            except tf.errors.DeadlineExceededError:
                cut += 1
            found = server.predict(x=keys, ids=np.arange(60))
            position = int(found["model_position"][0])
            if position >= 0 and not mlir:  # which does not keep the order of reads, see the guide
                assert set(found["y"].ravel()) == set(found["rows"].ravel()) == {position}
            assert server.update(value)["position"] == value
            found = server.predict(x=keys, ids=np.arange(60))
            assert set(found["y"].ravel()) == set(found["rows"].ravel()) == {value}
    assert cut, "no update was cut off: nothing was tested"


def test_more_entries_than_a_snapshot_may_have_are_written_visibly(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train", "mutable-string-int64"), tmp_path / "model"
    publish_base(trainer, model, snapshot_max_rows=30)
    trainer.insert(40, 1)
    trainer.save()
    publish(trainer, model)
    with served(model) as server:
        assert server.update()["status"].endswith("(rows written in chunks)")
        assert_answers(server, trainer, trainer.answers())


def test_a_large_table_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model = TableTrainer(tmp_path / "train"), tmp_path / "model"
    trainer.insert()
    trainer.save()
    monkeypatch.setattr(full_plan, "_LARGEST_TABLE_BYTES", 100)
    with pytest.raises(NotServable, match=r"'seen' holds [0-9]+ bytes; deltas carry up to 100"):
        plan(request(trainer, model, updates=Updates()))


def test_a_checkpoint_without_the_table_or_with_another_does_not_fit(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train"), tmp_path / "model"
    publish_base(trainer, model)
    for kind, said in (("mutable-int64-vectors", "float32"), ("dense-string-vectors", "string")):
        other = TableTrainer(tmp_path / kind, kind, step=20)
        other.insert()
        other.save()
        with pytest.raises(SchemaChanged, match=said):
            publish(other, model)


def test_a_digest_leaves_tables_out(tmp_path: Path) -> None:
    trainer, model = TableTrainer(tmp_path / "train"), tmp_path / "model"
    publish_base(trainer, model, digest=True)
    with served(model) as server:
        found = server.call("incremental_digest", rows=[0, 1])
        assert len(set(found["digest"])) == 2
        with pytest.raises(Exception, match="chunks are numbered 0 to 1"):
            server.call("incremental_digest", rows=[2])


# --- the schema ---

PLAIN = Schema.of(
    [
        ServedVariable("emb", DType.FLOAT, (40, 4), ChangeKind.TABLE),
        ServedVariable("b", DType.DOUBLE, (), ChangeKind.DENSE),
        ServedVariable("w[4 3 0,2:-]", DType.STRING, (2, 3), ChangeKind.DENSE),
    ]
)


def test_a_schema_without_tables_is_what_it_was() -> None:
    """Bases and deltas of releases that knew no tables stay readable."""
    assert PLAIN.digest == "53a200c22a8b612e482802dd857f205e478f7aec900bc5ce20a15505c67de598"
    assert PLAIN.to_json() == [
        ["b", "float64", [], "dense"],
        ["emb", "float32", [40, 4], "table"],
        ["w[4 3 0,2:-]", "string", [2, 3], "dense"],
    ]


def test_a_schema_with_tables_reads_as_it_was_written() -> None:
    halves = [
        ServedVariable(
            name, dtype, shape, ChangeKind.DENSE, TableContents("seen", role, has_all_buckets=True)
        )
        for name, dtype, shape, role in (
            ("z-keys", DType.INT64, (-1, 1), TableSide.KEYS),
            ("a-values", DType.STRING, (-1, 3), TableSide.VALUES),
        )
    ]
    schema = Schema.of([*PLAIN.variables, *halves])
    assert Schema.from_json(schema.to_json()) == schema
    assert [[half.name for half in pair] for pair in schema.lookups] == [["z-keys", "a-values"]]
    for wrong in (halves[:1], halves[1:]):
        with pytest.raises(ValueError, match="one variable of keys and one of values"):
            Schema.of([*PLAIN.variables, *wrong])
    for unfit in ({"shape": (4, 1)}, {"kind": ChangeKind.TABLE}, {"contents": None}):
        with pytest.raises(ValueError, match="'z-keys' has shape"):
            replace(halves[0], **unfit)

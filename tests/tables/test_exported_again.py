"""Versions with tables by keys lend their graphs to newer checkpoints, and are checkpoints themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.bundle import mapped_tables
from exporter.errors import GraphError, MappingError, ShapeMismatch, UsageError
from exporter.graph import table_marks
from exporter.graph.graph_files import read_saved_model
from exporter.graph.joined_lookups import LEAST
from exporter.options import ExportRequest, Verify
from exporter.pipeline.both_sides import compare_names
from exporter.pipeline.full import export
from exporter.publish.versions import read_manifest
from exporter.tables import DynamicTable
from tests.support.deeprec import Ev, write_full
from tests.support.updatable import Loaded, loaded_quickly

Array = np.ndarray[Any, Any]
MANY, FEW = LEAST + 2, 3
LIMITS = np.array([0, -1, -2, 2**63 - 1, -(2**63)], np.int64)


def default_of(number: int) -> Any:
    return (0.0, -1.5, np.arange(12.0).reshape(3, 4))[number % 3]


def model(count: int) -> Any:
    """A builder of `count` tables, one of which is asked twice, and of one that stays apart."""

    def build() -> Any:
        import tensorflow as tf

        v1 = tf.compat.v1
        shapes = ((None,), (None, None), (None, 2), (None, None))
        ids = {f"ids_{n}": v1.placeholder(tf.int64, shapes[n % 4], name=f"ids_{n}") for n in range(count)}
        tables = [DynamicTable(f"emb/t{n}", 4, default=default_of(n)) for n in range(count)]
        rows = {f"rows_{n}": tables[n].lookup(each) for n, each in enumerate(ids.values())}
        rows["again"] = tables[1].lookup(ids["ids_0"])
        rows["numbers"] = tables[0].rows(ids["ids_0"])
        apart = DynamicTable("apart", 4)
        rows["apart"] = apart.lookup(tf.cast(rows["rows_0"][:, 0] * 10, tf.int64))
        return {"serving_default": (ids, rows), "half": ({"ids_0": ids["ids_0"]}, {"apart": rows["apart"]})}

    return build


def train(directory: Path, step: int, count: int) -> None:
    """A checkpoint with other keys, and others of them, in each step."""
    random = np.random.default_rng(step)
    tables = {}
    for number, name in enumerate([f"emb/t{n}" for n in range(count)] + ["apart"]):
        size = int(random.integers(1, 40)) * (step**2 * 10 if number % 2 else 1)
        keys = np.unique(random.integers(-20, 50 * step, size))
        keys = np.unique(np.concatenate([keys, LIMITS[: number % 6]]))
        values = random.normal(size=(len(keys), 4)).astype(np.float32)
        tables[name] = Ev(random.permutation(keys), values, None)
    write_full(directory / f"model.ckpt-{step}", tables, step=step)


def published(tmp_path: Path, out: str, source: Path, graph: Any, **options: Any) -> Path:
    return export(ExportRequest(source, tmp_path / out, model=graph, **options)).published.path


def answers(server: Loaded, count: int) -> dict[str, bytes]:
    """What a version answers to keys that it holds or not, 20 to 500 of them for each table."""
    random = np.random.default_rng(1)
    feeds = {}
    for number in range(count):
        ids = np.concatenate([LIMITS, random.integers(-30, 200, 2 * int(random.integers(10, 250)) + 1)])
        feeds[f"ids_{number}"] = ids.reshape(-1, 2) if number % 4 else ids
    found = server.predict(**feeds) | {
        f"half {name}": rows for name, rows in server.call("half", ids_0=feeds["ids_0"]).items()
    }
    return {f"{name} {rows.shape}": rows.tobytes() for name, rows in found.items() if name != "numbers"}


def same_answers(one: Path, other: Path, count: int) -> bool:
    with loaded_quickly(one) as first, loaded_quickly(other) as second:
        found = answers(first, count)
        assert len(found) == count + 3
        return found == answers(second, count)


def is_joined(version: Path) -> bool:
    return "joined_tables/keys" in nodes_of(version)


def nodes_of(version: Path) -> dict[str, Any]:
    return {node.name: node for node in read_saved_model(version).meta_graphs[0].graph_def.node}


@pytest.mark.landing
@pytest.mark.parametrize("count", [MANY, FEW])
def test_a_version_lends_its_graph_to_newer_checkpoints(tmp_path: Path, count: int) -> None:
    """Again and again: what is published is what the builder's graph would have been."""
    before: Any = model(count)
    for step in (1, 2, 3):
        train(tmp_path / "train", step, count)
        verify = Verify.OUTPUTS if step == 2 else Verify.FILES
        again = published(tmp_path, f"again-{step}", tmp_path / "train", before, verify=verify)
        assert is_joined(again) == (count == MANY)
        before = str(again)
    direct = published(tmp_path, "direct", tmp_path / "train", model(count))
    assert nodes_of(again) == nodes_of(direct)
    assert same_answers(again, direct, count)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two versions, of other sizes, and of their checkpoints."""
    made = tmp_path_factory.mktemp("versions")
    for step in (1, 2):
        train(made / "train", step, MANY)
        published(made, "model", made / "train", model(MANY))
    return made


@pytest.mark.landing
@pytest.mark.parametrize("graph", ["itself", "another", "builder"])
def test_a_version_is_a_checkpoint(tmp_path: Path, versions: Path, graph: str) -> None:
    of = {"itself": None, "another": str(versions / "model/1"), "builder": model(MANY)}[graph]
    source = versions / "model/2"
    again = published(tmp_path, "again", source, of, verify=Verify.OUTPUTS)
    assert is_joined(again)
    assert same_answers(again, source, MANY)
    names = compare_names(ExportRequest(source, tmp_path / "none", model=of)).unmatched
    assert not names.variables
    assert not names.tensors
    third = published(tmp_path, "third", again, str(again))
    assert nodes_of(third) == nodes_of(again)
    assert same_answers(third, source, MANY)


def test_versions_of_other_rows_are_no_checkpoints(tmp_path: Path, versions: Path) -> None:
    def build(width: int, default: float) -> Any:
        import tensorflow as tf

        ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
        return {"ids": ids}, {"rows": DynamicTable("emb/t0", width, default=default).lookup(ids)}

    with pytest.raises(ShapeMismatch, match=r"float32\[5\] in the graph, float32\[4\]"):
        published(tmp_path, "no", versions / "model/2", lambda: build(5, 0.0))
    with pytest.raises(MappingError, match="absent keys of table 'emb/t0' read other rows"):
        published(tmp_path, "no", versions / "model/2", lambda: build(4, 1.0))
    with pytest.raises(UsageError, match="there are none to lay out"):
        published(tmp_path, "no", versions / "model/2", lambda: build(4, 0.0), table_head_room=1.0)


@pytest.mark.landing
def test_mapped_tables_are_mapped_again(
    tmp_path: Path, versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_tables, "LEAST_BYTES", 10_000)
    mapped = published(tmp_path, "mapped", versions / "train/model.ckpt-1", model(MANY), map_tables=True)
    again = published(tmp_path, "mapped", versions / "train/model.ckpt-2", str(mapped), map_tables=True)
    direct = published(tmp_path, "direct", versions / "train/model.ckpt-2", model(MANY), map_tables=True)
    files: list[Mapping[str, Any]] = []
    for version in (again, direct):
        record = read_manifest(version).mapped
        assert record is not None
        files.append({table.name: table.bytes_ for table in record.tables})
    assert files[0] == files[1] != {}
    assert same_answers(again, versions / "model/2", MANY)


@pytest.mark.landing
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_cast_rows_are_served_again_from_their_own_version_alone(
    tmp_path: Path, versions: Path, dtype: str
) -> None:
    cast = published(tmp_path, "cast", versions / "model/2", None, casts=[f".*/values={dtype}"])
    assert is_joined(cast)
    again = published(tmp_path, "again", cast, None)
    assert is_joined(again)
    assert same_answers(again, cast, MANY)
    with pytest.raises(ShapeMismatch, match=f"has rows of {dtype}"):
        published(tmp_path, "no", versions / "train", str(cast))


def test_graphs_do_not_hold_many_default_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepRec has 4,096 a table. Such a version is served, and says why it lends its graph to nobody."""
    monkeypatch.setattr(table_marks, "_MOST_MARKED_BYTES", 100)
    train(tmp_path / "train", 1, MANY)
    first = published(tmp_path, "first", tmp_path / "train", model(MANY))
    with loaded_quickly(first) as server:
        assert answers(server, MANY)
    with pytest.raises(GraphError, match=r"no default rows for absent keys of table 'emb/t\d'") as refused:
        published(tmp_path, "second", tmp_path / "train", str(first))
    assert "--model" in refused.value.hint

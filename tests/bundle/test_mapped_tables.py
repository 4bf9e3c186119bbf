"""Tables that are mapped: which may be, and that a version whose files are not as they were is restored."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from exporter.bundle.mapped_tables import LEAST_BYTES, MappedTables, choose_mapped
from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.variables import ShardOrigin, VariablesReport, mapped_files, write_variables
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.graph.inference_graph import PartitionStrategy
from exporter.jobs.runner import Runner
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import CastRule, MappingRules
from exporter.options import DataMode
from tests.support.mapped_models import in_session, mapped_below
from tests.support.trained import (
    Builder,
    Tensors,
    Trained,
    answers_eagerly,
    answers_in_session,
    assert_same,
    embedding,
    inference_graph,
    train,
)

tf1 = tf.compat.v1
ROWS, DIM = 60_000, 16
FEEDS = {"ids": np.array([0, 59_999, 3, 20_000, 3], np.int64)}
DIV = MappingRules(trained={"table": PartitionStrategy.DIV})


def publish(
    version: Path,
    trained: Trained,
    build: Builder,
    *,
    rules: MappingRules = DIV,
    served_at: Path | None = None,
    **options: Any,
) -> VariablesReport:
    """Write a version that maps its table where `served_at` says, by default where it is."""
    graph = inference_graph(build, lookups=rules.trained)
    chosen = choose_mapped(graph, build_mapping(graph, read_catalog(trained.prefix), rules))
    version.mkdir(parents=True)
    report = write_variables(chosen.mapping, version, **options)
    tables = MappedTables.of(served_at or version, mapped_files(chosen.mapping, report.catalog))
    tables.write_id(version)
    write_saved_model(chosen.graph, chosen.mapping, version, None, tables)
    return report


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(embedding(ROWS, 0, width=DIM), FEEDS, tmp_path_factory.mktemp("train") / "model.ckpt")


@pytest.fixture
def version(tmp_path: Path, trained: Trained) -> Path:
    publish(tmp_path / "m" / "1", trained, embedding(ROWS, 0, width=DIM))
    return tmp_path / "m" / "1"


@pytest.mark.parametrize(("trained_parts", "served_parts"), [(0, 0), (3, 3), (3, 0), (3, 2), (0, 3)])
def test_answers_are_the_trained_ones_from_mapped_files(
    tmp_path: Path, trained_parts: int, served_parts: int
) -> None:
    """Parts are joined and cut into files that are a variable each; each is mapped."""
    made = train(embedding(ROWS, trained_parts, width=DIM), FEEDS, tmp_path / "train/model.ckpt")
    report = publish(tmp_path / "1", made, embedding(ROWS, served_parts, width=DIM), data=DataMode.AUTO)
    tables = {str(shard.path) for shard in report.shards if shard.bytes_ > LEAST_BYTES}
    assert len(tables) == max(1, served_parts)
    with in_session(tmp_path / "1") as answer:
        assert mapped_below(tmp_path) >= tables
        assert_same(answer(**FEEDS), made.answers)
    assert not mapped_below(tmp_path) & tables
    assert_same(answers_eagerly(tmp_path / "1", FEEDS), made.answers)


def test_a_cast_table_is_mapped_as_it_is_stored(tmp_path: Path) -> None:
    made = train(
        embedding(ROWS, 0, width=2 * DIM), FEEDS, tmp_path / "model.ckpt", round_to=tf.bfloat16.as_numpy_dtype
    )
    rules = MappingRules(trained=DIV.trained, casts=(CastRule.parse("bfloat16"),))
    report = publish(tmp_path / "1", made, embedding(ROWS, 0, width=2 * DIM), rules=rules)
    assert report.catalog.tensors["table"].dtype.label == "bfloat16"
    with in_session(tmp_path / "1") as answer:
        assert len(mapped_below(tmp_path)) == 1
        assert_same(answer(**FEEDS), made.answers)


def test_rows_in_turns_are_put_in_order_in_one_file(tmp_path: Path) -> None:
    """Of a `mod` partition whose graph wants the whole, one task writes the file, however small tasks are."""
    build = embedding(ROWS, 3, width=DIM, strategy="mod")
    made = train(build, FEEDS, tmp_path / "model.ckpt")
    rules = MappingRules(trained={"table": PartitionStrategy.MOD})
    publish(
        tmp_path / "1", made, embedding(ROWS, 0, width=DIM), rules=rules, runner=Runner(task_bytes=1 << 20)
    )
    with in_session(tmp_path / "1") as answer:
        assert len(mapped_below(tmp_path)) == 1
        assert_same(answer(**FEEDS), made.answers)


@pytest.mark.parametrize("data", [DataMode.AUTO, DataMode.COPY, DataMode.COMPACT])
def test_a_shard_that_is_the_table_alone_is_linked(tmp_path: Path, data: DataMode) -> None:
    made = train(embedding(ROWS, 0, width=DIM), FEEDS, tmp_path / "model.ckpt", sharded=True)
    alone = train(lambda: _alone(), {"ids": FEEDS["ids"]}, tmp_path / "alone/model.ckpt", sharded=True)
    shared = publish(tmp_path / "1", made, embedding(ROWS, 0, width=DIM), data=data)
    assert ShardOrigin.LINKED not in {shard.how for shard in shared.shards if shard.bytes_ > LEAST_BYTES}
    single = publish(tmp_path / "2", alone, lambda: _alone(), data=data)
    (large,) = [shard for shard in single.shards if shard.bytes_ > LEAST_BYTES]
    expected = ShardOrigin.COPIED if data is DataMode.COPY else ShardOrigin.COMPACTED
    assert large.how is (ShardOrigin.LINKED if data is DataMode.AUTO else expected)
    assert_same(answers_in_session(tmp_path / "2", FEEDS), alone.answers)


def _alone() -> tuple[Tensors, Tensors]:
    """With the slot that training adds, which goes to the other shard."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    table = tf1.get_variable("table", [ROWS, DIM], use_resource=True)
    return {"ids": ids}, {"rows": tf.gather(table, ids)}


# --- what may be mapped ------------------------------------------------------------------------------------


def _table(name: str = "table", **options: Any) -> Any:
    return tf1.get_variable(name, [ROWS, DIM], use_resource=True, **options)


def _ids() -> Any:
    return tf1.placeholder(tf.int64, [None], name="ids")


def _read_whole() -> tuple[Tensors, Tensors]:
    ids, table = _ids(), _table()
    return {"ids": ids}, {"rows": tf.gather(table, ids) + tf.reduce_sum(table, name="tower/sum")}


def _scattered() -> tuple[Tensors, Tensors]:
    ids, table = _ids(), _table()
    write = tf.raw_ops.ResourceScatterAdd(
        resource=table.handle, indices=ids, updates=tf.zeros([tf.shape(ids)[0], DIM]), name="write"
    )
    with tf.control_dependencies([write]):
        return {"ids": ids}, {"rows": tf.identity(tf.gather(table, ids))}


def _scattered_in_a_function() -> tuple[Tensors, Tensors]:
    ids, table = _ids(), _table()

    @tf.function(autograph=False)
    def change(handle: Any, rows: Any) -> Any:
        tf.raw_ops.ResourceScatterAdd(resource=handle, indices=rows, updates=tf.zeros([1, DIM]), name="write")
        return tf.identity(rows)

    with tf.control_dependencies([change(table.handle, ids[:1])]):
        return {"ids": ids}, {"rows": tf.identity(tf.gather(table, ids))}


def _scattered_after_a_function_gave_the_handle_back() -> tuple[Tensors, Tensors]:
    ids, table = _ids(), _table()

    @tf.function(autograph=False)
    def pass_on(handle: Any) -> Any:
        return tf.identity(handle)

    handle = pass_on(table.handle)
    write = tf.raw_ops.ResourceScatterAdd(
        resource=handle, indices=ids, updates=tf.zeros([tf.shape(ids)[0], DIM]), name="write"
    )
    with tf.control_dependencies([write]):
        return {"ids": ids}, {"rows": tf.identity(tf.gather(table, ids))}


def _scattered_by_another_handle_of_its_name() -> tuple[Tensors, Tensors]:
    ids, table = _ids(), _table()
    same = tf.raw_ops.VarHandleOp(
        dtype=tf.float32, shape=[ROWS, DIM], shared_name=table.op.get_attr("shared_name").decode()
    )
    write = tf.raw_ops.ResourceScatterAdd(
        resource=same, indices=ids, updates=tf.zeros([tf.shape(ids)[0], DIM]), name="write"
    )
    with tf.control_dependencies([write]):
        return {"ids": ids}, {"rows": tf.identity(tf.gather(table, ids))}


def _scattered_by_a_handle_that_a_function_makes() -> tuple[Tensors, Tensors]:
    ids, table = _ids(), _table()
    name = table.op.get_attr("shared_name").decode()

    @tf.function(autograph=False)
    def change(rows: Any) -> Any:
        same = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[ROWS, DIM], shared_name=name)
        tf.raw_ops.ResourceScatterAdd(resource=same, indices=rows, updates=tf.zeros([1, DIM]), name="write")
        return tf.identity(rows)

    with tf.control_dependencies([change(ids[:1])]):
        return {"ids": ids}, {"rows": tf.identity(tf.gather(table, ids))}


def _captured_by_a_dataset() -> tuple[Tensors, Tensors]:
    ids, table = _ids(), _table()
    rows = tf.data.Dataset.from_tensors(ids).map(lambda at: tf.gather(table, at))
    return {"ids": ids}, {"rows": tf.data.experimental.get_single_element(rows)}


def _choice(build: Builder, prefix: Path) -> tuple[list[str], Mapping[str, str]]:
    """What is mapped, and why the rest is not."""
    graph = inference_graph(build)
    chosen = choose_mapped(graph, build_mapping(graph, read_catalog(prefix), MappingRules()))
    mapped = [source.key for source in chosen.mapping.sources if source.is_mapped]
    return mapped, {each.key: each.why for each in chosen.unmapped}


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (_read_whole, "read whole by tower/sum"),
        (_scattered, "ResourceScatterAdd 'write' takes it"),
        (_scattered_in_a_function, "ResourceScatterAdd 'write' in function"),
        (_scattered_after_a_function_gave_the_handle_back, "ResourceScatterAdd 'write' takes it"),
        (_scattered_by_another_handle_of_its_name, "ResourceScatterAdd 'write' takes it"),
        (_scattered_by_a_handle_that_a_function_makes, "ResourceScatterAdd 'write' in function"),
        (_captured_by_a_dataset, "MapDataset"),
    ],
)
def test_what_is_not_only_gathered_from_is_restored(
    trained: Trained, build: Callable[[], Any], why: str
) -> None:
    """A scatter into mapped memory would kill the server."""
    mapped, unmapped = _choice(build, trained.prefix)
    assert mapped == []
    assert why in unmapped["table"]


def test_gathers_in_functions_and_loops_are_gathers(trained: Trained) -> None:
    def build() -> tuple[Tensors, Tensors]:
        ids, table = _ids(), _table()

        @tf.function(autograph=False)
        def look(handle: Any, at: Any) -> Any:
            return tf.raw_ops.ResourceGather(resource=handle, indices=at, dtype=tf.float32)

        def more(count: Any, total: Any) -> Any:
            return count + 1, total + tf.reduce_sum(look(table.handle, ids))

        _, total = tf1.while_loop(lambda count, _: count < 3, more, [0, 0.0])
        return {"ids": ids}, {"rows": look(table.handle, ids) + total}

    assert _choice(build, trained.prefix) == (["table"], {})


def test_small_variables_are_restored_without_a_word(trained: Trained) -> None:
    mapped, unmapped = _choice(embedding(ROWS, 0, width=DIM), trained.prefix)
    assert (mapped, unmapped) == (["table"], {})


def test_mod_parts_are_restored(trained: Trained) -> None:
    """A graph that looks rows up by turns wants them in several files, which would be read as often."""
    graph = inference_graph(
        embedding(ROWS, 3, width=DIM, strategy="mod"), lookups={"table": PartitionStrategy.MOD}
    )
    rules = MappingRules(trained={"table": PartitionStrategy.DIV})
    chosen = choose_mapped(graph, build_mapping(graph, read_catalog(trained.prefix), rules))
    assert [each.why for each in chosen.unmapped] == ["its rows take turns in its parts (mod)"]


# --- files that are not as they were -----------------------------------------------------------------------


def _no_id(served: Path) -> None:
    (served / "variables/mapped.id").unlink()


def _another_id(served: Path) -> None:
    (served / "variables/mapped.id").write_text("0" * 32)


def _a_longer_id(served: Path) -> None:
    with (served / "variables/mapped.id").open("a") as file:
        file.write("\n")


def _id_is_a_directory(served: Path) -> None:
    _no_id(served)
    (served / "variables/mapped.id").mkdir()


def _id_leads_nowhere(served: Path) -> None:
    _no_id(served)
    (served / "variables/mapped.id").symlink_to("nowhere")


def _id_has_no_permission(served: Path) -> None:
    (served / "variables/mapped.id").chmod(0)


def _tables(served: Path) -> list[Path]:
    return [path for path in served.glob("variables/*.data-*") if path.stat().st_size > LEAST_BYTES]


def _shorter(served: Path) -> None:
    for path in _tables(served):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)


def _empty(served: Path) -> None:
    for path in _tables(served):
        path.write_bytes(b"")


def _gone(served: Path) -> None:
    for path in _tables(served):
        path.unlink()


def _a_directory(served: Path) -> None:
    for path in _tables(served):
        path.unlink()
        path.mkdir()


def _no_permission(served: Path) -> None:
    for path in _tables(served):
        path.chmod(0)


def _all_gone(served: Path) -> None:
    shutil.rmtree(served)


HARMED = [
    _no_id, _another_id, _a_longer_id, _id_is_a_directory, _id_leads_nowhere, _shorter, _empty, _gone,
    _a_directory, _all_gone,
]  # fmt: skip


@pytest.mark.parametrize("harm", HARMED)
def test_a_place_that_is_not_as_it_was_is_restored(
    tmp_path: Path, version: Path, trained: Trained, harm: Callable[[Path], None]
) -> None:
    """What is loaded is a copy elsewhere; where servers should see the tables, something is wrong."""
    copy = Path(shutil.copytree(version, tmp_path / "copy" / "1"))
    harm(version)
    with in_session(copy) as answer:
        assert mapped_below(tmp_path) == set()
        assert_same(answer(**FEEDS), trained.answers)
    assert_same(answers_eagerly(copy, FEEDS), trained.answers)


@pytest.mark.parametrize("harm", [_id_has_no_permission, _no_permission])
def test_files_that_may_not_be_read(
    tmp_path: Path, version: Path, trained: Trained, harm: Callable[[Path], None]
) -> None:
    """Root reads them anyway, and maps them; others restore."""
    copy = Path(shutil.copytree(version, tmp_path / "copy" / "1"))
    harm(version)
    assert_same(answers_in_session(copy, FEEDS), trained.answers)


@pytest.mark.parametrize("harm", [_shorter, _empty, _gone])
def test_a_damaged_version_is_an_error_by_name(version: Path, harm: Callable[[Path], None]) -> None:
    """As with every version: it cannot be restored either."""
    harm(version)
    with pytest.raises(tf.errors.OpError, match=r"RestoreV2|data-0000"):
        answers_in_session(version, FEEDS)


def test_a_copy_maps_the_original_while_that_is_there(
    tmp_path: Path, version: Path, trained: Trained
) -> None:
    copy = Path(shutil.copytree(version, tmp_path / "copy" / "1"))
    with in_session(copy) as answer:
        assert all(path.startswith(f"{version}/") for path in mapped_below(tmp_path))
        assert_same(answer(**FEEDS), trained.answers)


def test_another_version_in_its_place_is_not_mapped(tmp_path: Path, version: Path, trained: Trained) -> None:
    """Two models, one path: what lies there has tables of the same names and sizes."""
    mine = Path(shutil.move(version, tmp_path / "mine"))
    build = embedding(ROWS, 0, width=DIM)
    other = train(build, FEEDS, tmp_path / "other/model.ckpt", seed=2)
    publish(version, other, build)
    assert_same(answers_in_session(mine, FEEDS), trained.answers)
    assert_same(answers_in_session(version, FEEDS), other.answers)


@pytest.mark.parametrize("name", ["a b", "[x]*?", "back\\slash", "ö", 'quo"te'])
def test_any_path_is_mapped(tmp_path: Path, trained: Trained, name: str) -> None:
    place = tmp_path / name / "1"
    publish(place, trained, embedding(ROWS, 0, width=DIM))
    copy = shutil.copytree(place, tmp_path / "copy")  # Python's loader itself takes brackets for a pattern
    with in_session(copy) as answer:
        assert len(mapped_below(tmp_path)) == 1
        assert_same(answer(**FEEDS), trained.answers)


def test_a_linked_directory_is_mapped(tmp_path: Path, trained: Trained) -> None:
    """As with `models/current -> models/blue`: the path is the one that was named."""
    link = tmp_path / "current"
    publish(tmp_path / "blue/1", trained, embedding(ROWS, 0, width=DIM), served_at=link / "1")
    link.symlink_to("blue")
    with in_session(link / "1") as answer:
        assert len(mapped_below(tmp_path)) == 1
        assert_same(answer(**FEEDS), trained.answers)


def test_a_version_is_served_while_its_directory_is_removed(
    tmp_path: Path, version: Path, trained: Trained
) -> None:
    with in_session(version) as answer:
        shutil.rmtree(version)
        (table,) = mapped_below(tmp_path)
        assert table.endswith("(deleted)")
        assert_same(answer(**FEEDS), trained.answers)
        everything = {"ids": np.arange(ROWS, dtype=np.int64)}
        assert np.isfinite(answer(**everything)["rows"]).all()


def test_two_models_in_one_process(tmp_path: Path, version: Path, trained: Trained) -> None:
    build = embedding(ROWS, 0, width=DIM)
    other = train(build, FEEDS, tmp_path / "other/model.ckpt", seed=2)
    publish(tmp_path / "o" / "1", other, build)
    loaded = [tf.saved_model.load(str(place)) for place in (version, tmp_path / "o" / "1")]
    for model, expected in zip(loaded, (trained, other), strict=True):
        found = model.signatures["serving_default"](tf.constant(FEEDS["ids"]))
        assert_same({name: value.numpy() for name, value in found.items()}, expected.answers)

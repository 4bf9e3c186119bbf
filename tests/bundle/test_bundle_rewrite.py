"""Tensors that change on the way: casts, and rows that move into and out of `mod` order."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.bundle import variables
from exporter.bundle.variables import ShardOrigin, write_variables
from exporter.catalog import SliceSpec
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.errors import CheckpointChanged, CorruptFile, MappingError, UsageError
from exporter.graph.inference_graph import PartitionStrategy
from exporter.jobs import shard_sections
from exporter.jobs.runner import Runner
from exporter.mapping.build import VariableMapping
from exporter.mapping.mapping_rules import CastRule, MappingRules
from exporter.options import DataMode
from exporter.wire.dtypes import DType
from tests.support.budget import times
from tests.support.trained import (
    answers_eagerly,
    answers_in_session,
    assert_same,
    catalog_values,
    embedding,
    export,
    inference_graph,
    train,
    uneven_ids,
)
from tests.support.values import boxes, in_parts, mapping_of

MOD, DIV = PartitionStrategy.MOD, PartitionStrategy.DIV


@pytest.mark.parametrize("data", [DataMode.AUTO, DataMode.COMPACT])
@pytest.mark.parametrize(
    ("trained_parts", "trained_by", "served_parts", "served_by"),
    [
        (3, "mod", 0, "div"),
        (0, "div", 3, "mod"),
        (3, "mod", 2, "mod"),
        (3, "mod", 2, "div"),
        (3, "div", 2, "mod"),
        (3, "div", 3, "mod"),
        (3, "mod", 3, "mod"),
        (11, "mod", 4, "mod"),
    ],
)
def test_every_id_finds_its_row_in_tensorflows_own_lookups(
    tmp_path: Path, trained_parts: int, trained_by: str, served_parts: int, served_by: str, data: DataMode
) -> None:
    feeds = {"ids": uneven_ids(11)}
    trained = train(embedding(11, trained_parts, strategy=trained_by), feeds, tmp_path / "model.ckpt")
    graph = inference_graph(
        embedding(11, served_parts, strategy=served_by), lookups={"table": PartitionStrategy(served_by)}
    )
    rules = MappingRules(trained={"table": PartitionStrategy(trained_by)})
    report = export(graph, trained.prefix, tmp_path / "1", rules=rules, data=data)
    same = (trained_parts, trained_by) == (served_parts, served_by)
    assert (ShardOrigin.REWRITTEN in [shard.how for shard in report.shards]) is not same
    assert_same(answers_in_session(tmp_path / "1", feeds), trained.answers)
    assert_same(answers_eagerly(tmp_path / "1", feeds), trained.answers)


class TestCast:
    FEEDS = {"ids": uneven_ids(11)}  # noqa: RUF012  pytest class used as a namespace

    @pytest.mark.parametrize("label", ["bfloat16", "float16"])
    @pytest.mark.parametrize(("trained_parts", "served_parts"), [(0, 0), (3, 3), (3, 0)])
    def test_answers_are_those_of_rounded_weights(
        self, tmp_path: Path, label: str, trained_parts: int, served_parts: int
    ) -> None:
        trained = train(embedding(11, trained_parts), self.FEEDS, tmp_path / "model.ckpt")
        rules = MappingRules(casts=(CastRule.parse(f"table={label}"),), trained={"table": DIV})
        report = export(
            inference_graph(embedding(11, served_parts)), trained.prefix, tmp_path / "1", rules=rules
        )
        found = answers_in_session(tmp_path / "1", self.FEEDS)
        rounded = trained.answers["rows"].astype(DType.of(label).numpy).astype(np.float32)
        np.testing.assert_array_equal(found["rows"], rounded)
        step = {"bfloat16": 2**-8, "float16": 2**-11}[label]
        assert 0 < np.abs(found["rows"] / trained.answers["rows"] - 1).max() <= step
        assert_same(answers_eagerly(tmp_path / "1", self.FEEDS), found)
        assert report.bytes_rewritten == 11 * 4 * 2
        assert report.catalog.tensors["table"].dtype is DType.of(label)

    def test_everything_may_be_cast_and_doubles_too(self, tmp_path: Path) -> None:
        trained = train(embedding(11, 2, dtype=tf.float64), self.FEEDS, tmp_path / "model.ckpt")
        rules = MappingRules(casts=(CastRule.parse("bfloat16"),))
        report = export(
            inference_graph(embedding(11, 2, dtype=tf.float64)), trained.prefix, tmp_path / "1", rules=rules
        )
        found = answers_in_session(tmp_path / "1", self.FEEDS)
        assert [shard.how for shard in report.shards] == [ShardOrigin.REWRITTEN]
        assert {value.dtype for value in catalog_values(report.catalog).values()} == {
            np.dtype(ml_dtypes.bfloat16)
        }
        assert found["scores"].dtype == np.float64
        np.testing.assert_allclose(found["scores"], trained.answers["scores"], rtol=0.05, atol=0.05)

    def test_cast_and_moved_rows_at_once(self, tmp_path: Path) -> None:
        trained = train(embedding(11, 3, strategy="mod"), self.FEEDS, tmp_path / "model.ckpt")
        graph = inference_graph(embedding(11, 2, strategy="mod"), lookups={"table": MOD})
        rules = MappingRules(casts=(CastRule.parse("table=bfloat16"),), trained={"table": MOD})
        export(graph, trained.prefix, tmp_path / "1", rules=rules)
        found = answers_in_session(tmp_path / "1", self.FEEDS)
        rounded = trained.answers["rows"].astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(found["rows"], rounded)

    def test_a_value_too_large_is_an_error_and_not_infinity(self, tmp_path: Path) -> None:
        mapping = one_source(tmp_path, np.float32([1, 70000, np.inf]), cast=DType.HALF)
        with pytest.raises(MappingError, match="'w' holds 70000, which is too large for float16") as caught:
            write_variables(mapping, tmp_path / "1")
        assert "bfloat16" in caught.value.hint

    def test_infinity_and_nan_stay(self, tmp_path: Path) -> None:
        values = np.float32([np.inf, -np.inf, np.nan, 1.5])
        report = write_variables(one_source(tmp_path, values, cast=DType.HALF), tmp_path / "1")
        np.testing.assert_array_equal(catalog_values(report.catalog)["w"], values.astype(np.float16))


class TestDamage:
    """Rewriting gives new checksums: nothing damaged may get one."""

    @pytest.mark.parametrize("kind", ["cast", "gather", "scatter"])
    def test_a_flipped_bit_is_found(self, tmp_path: Path, kind: str) -> None:
        mapping = damaged_kind(tmp_path, kind)
        shard = mapping.catalog.shards[0]
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        with pytest.raises(CorruptFile, match="is damaged at 'w': its checksum"):
            write_variables(mapping, tmp_path / "1")

    @pytest.mark.parametrize("kind", ["cast", "gather", "scatter"])
    def test_a_shard_cut_short_is_found(self, tmp_path: Path, kind: str) -> None:
        mapping = damaged_kind(tmp_path, kind)
        shard = mapping.catalog.shards[0]
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(CheckpointChanged, match="became shorter"):
            write_variables(mapping, tmp_path / "1")

    def test_a_shard_that_is_gone_is_named(self, tmp_path: Path) -> None:
        mapping = damaged_kind(tmp_path, "cast")
        mapping.catalog.shards[0].unlink()
        with pytest.raises(CheckpointChanged, match="vanished"):
            write_variables(mapping, tmp_path / "1")


@pytest.mark.parametrize(("trained_parts", "served_parts"), [(3, 3), (3, 0), (3, 2), (0, 3)])
def test_types_whose_slices_tensorflow_does_not_join_are_laid_out_as_served(
    tmp_path: Path, trained_parts: int, served_parts: int
) -> None:
    feeds = {"ids": uneven_ids(11)}
    trained = train(embedding(11, trained_parts, dtype=tf.float16), feeds, tmp_path / "model.ckpt")
    report = export(
        inference_graph(embedding(11, served_parts, dtype=tf.float16), lookups={"table": DIV}),
        trained.prefix,
        tmp_path / "1",
        rules=MappingRules(trained={"table": DIV}),
    )
    assert (report.bytes_rewritten == 0) is (trained_parts == served_parts)
    assert_same(answers_in_session(tmp_path / "1", feeds), trained.answers)


@pytest.mark.parametrize("change", [{"served_parts": 2, "scatter": True}, {"cast": DType.HALF}])
def test_rows_cannot_be_taken_out_of_columns(tmp_path: Path, change: dict[str, Any]) -> None:
    with BundleWriter(tmp_path / "model.ckpt") as writer:
        for start in (0, 2):
            writer.add("w", np.zeros((4, 2), np.float32), SliceSpec((4, 4), (0, start), (4, 2)))
    mapping = mapping_of(read_catalog(tmp_path / "model.ckpt"), **change)
    with pytest.raises(MappingError, match="not ranges of whole rows"):
        write_variables(mapping, tmp_path / "1")


def test_columns_are_cast_where_they_are(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    with BundleWriter(tmp_path / "model.ckpt") as writer:
        for start in (0, 2):
            writer.add("w", table[:, start : start + 2], SliceSpec((4, 4), (0, start), (4, 2)))
    mapping = mapping_of(read_catalog(tmp_path / "model.ckpt"), cast=DType.BFLOAT16)
    report = write_variables(mapping, tmp_path / "1")
    np.testing.assert_array_equal(catalog_values(report.catalog)["w"], table.astype(ml_dtypes.bfloat16))


def test_partitioned_strings_cannot_be_laid_out_anew(tmp_path: Path) -> None:
    words = np.array([b"a", b"bc"], object)
    with BundleWriter(tmp_path / "model.ckpt") as writer:
        for row in range(2):
            writer.add("w", words[row : row + 1], SliceSpec((2,), (row,), (1,)))
    with pytest.raises(MappingError, match="laid out anew"):
        write_variables(mapping_of(read_catalog(tmp_path / "model.ckpt")), tmp_path / "1")


@settings(max_examples=times(60), deadline=None)
@given(
    rows=st.integers(0, 40),
    width=st.integers(0, 5),
    stored=st.integers(1, 6),
    stored_by_mod=st.booleans(),
    served=st.integers(1, 6),
    served_by_mod=st.booleans(),
    cast=st.sampled_from([None, DType.BFLOAT16]),
    data=st.sampled_from(list(DataMode)),
    block=st.sampled_from([1, 40, 1 << 20]),
    task=st.sampled_from([1, 8, 1 << 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_partition_becomes_any_other(
    rows: int,
    width: int,
    stored: int,
    stored_by_mod: bool,
    served: int,
    served_by_mod: bool,
    cast: DType | None,
    data: DataMode,
    block: int,
    task: int,
    seed: int,
) -> None:
    """Row i of the trained table is row i of the served one, whatever the layouts, blocks and modes."""
    stored, served = min(stored, max(rows, 1)), min(served, max(rows, 1))
    table = np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_sections, "BLOCK_BYTES", block)
        patch.setattr(shard_sections, "COPY_BYTES", block)
        write_parts(Path(name, "model.ckpt"), in_parts(table, stored, stored_by_mod), table.shape, seed)
        catalog = read_catalog(Path(name, "model.ckpt"))
        mapping = mapping_of(
            catalog,
            cast=cast,
            gather_parts=stored if stored_by_mod and stored > 1 else 0,
            served_parts=served,
            scatter=served_by_mod,
        )
        report = write_variables(mapping, Path(name, "1"), data=data, runner=Runner(task_bytes=task))
        bundle = read_catalog(report.catalog.prefix)
        assert bundle.tensors == report.catalog.tensors
        found = read_array(bundle, bundle.tensors["w"])
    expected = np.concatenate(in_parts(table, served, served_by_mod and served > 1))
    if cast:
        expected = expected.astype(cast.numpy)
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("task", [8, 1 << 20])
@pytest.mark.parametrize("seed", range(5))
def test_slices_in_any_order_are_cast_where_they_lie(tmp_path: Path, seed: int, task: int) -> None:
    """As a saver lists them whose servers end in another order: parts are served as they are stored."""
    table = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    write_parts(tmp_path / "model.ckpt", in_parts(table, 4, by_mod=False), table.shape, seed)
    catalog = read_catalog(tmp_path / "model.ckpt")
    mapping = mapping_of(catalog, cast=DType.BFLOAT16, served_parts=4)
    report = write_variables(mapping, tmp_path / "1", runner=Runner(task_bytes=task))
    bundle = read_catalog(report.catalog.prefix)
    found = read_array(bundle, bundle.tensors["w"])
    np.testing.assert_array_equal(found, table.astype(ml_dtypes.bfloat16))


def test_more_shards_than_a_reader_takes_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variables, "MAX_SHARDS", 9)
    values = np.ones((40, 3), np.float32)
    mapping, runner = one_source(tmp_path, values, cast=DType.BFLOAT16), Runner(task_bytes=8)
    said = "would lie in .* shards, and a bundle has at most 9"
    with pytest.raises(UsageError, match=said):
        write_variables(mapping, tmp_path / "1", runner=runner)
    with pytest.raises(UsageError, match=said):
        variables.size_of_work(mapping, tmp_path / "1", runner.task_bytes)
    assert not list((tmp_path / "1").rglob("variables.*"))


def write_parts(prefix: Path, pieces: list[np.ndarray], shape: tuple[int, ...], seed: int = 0) -> None:
    """Write the parts of a table, in an order of their own: savers list slices as their servers end."""
    with BundleWriter(prefix) as writer:
        writer.add("before", np.zeros(100))
        if len(pieces) == 1:
            writer.add("w", pieces[0])
            return
        specs = boxes(shape, [len(piece) for piece in pieces])
        for number in np.random.default_rng(seed).permutation(len(pieces)):
            writer.add("w", pieces[number], specs[number])


def one_source(tmp_path: Path, values: np.ndarray, *, cast: DType) -> VariableMapping:
    write_parts(tmp_path / "model.ckpt", [values], values.shape)
    return mapping_of(read_catalog(tmp_path / "model.ckpt"), cast=cast)


def damaged_kind(tmp_path: Path, kind: str) -> VariableMapping:
    table = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    write_parts(tmp_path / "model.ckpt", in_parts(table, 3 if kind == "gather" else 1, True), table.shape)
    return mapping_of(
        read_catalog(tmp_path / "model.ckpt"),
        cast=DType.BFLOAT16 if kind == "cast" else None,
        gather_parts=3 if kind == "gather" else 0,
        served_parts=2 if kind == "scatter" else 1,
        scatter=kind == "scatter",
    )

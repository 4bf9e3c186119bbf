"""The delta format: round trips, what TensorFlow reads of it, and every way in which a delta can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.delta.delta_files import read_delta, write_delta
from exporter.delta.format import (
    FORMAT_VERSION,
    POSITION_LIMIT,
    Change,
    ChangeKind,
    DeltaHeader,
    Rows,
    Schema,
    ServedVariable,
)
from exporter.delta.packing import round_rows
from exporter.delta.spans import Span
from exporter.errors import CheckpointError, CorruptFile, UnsupportedFormat
from exporter.options import DeltaDtype
from exporter.wire.dtypes import DType
from tests.support.budget import times

SCHEMA = Schema.of(
    [
        ServedVariable("table", DType.FLOAT, (10, 3), ChangeKind.TABLE),
        ServedVariable("bias", DType.DOUBLE, (2,), ChangeKind.DENSE),
        ServedVariable("step", DType.INT64, (), ChangeKind.DENSE),
    ]
)
HEADER = DeltaHeader("lineage", SCHEMA.digest, 5, 9, 500)
ROWS = Rows(np.array([1, 4], np.int64), np.ones((2, 3), np.float32))

DTYPES = [
    DType.FLOAT,
    DType.BFLOAT16,
    DType.INT8,
    DType.BOOL,
    DType.COMPLEX64,
    DType.UINT64,
    DType.FLOAT8_E5M2,
]
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def variables(draw: st.DrawFn) -> ServedVariable:
    kind = draw(st.sampled_from(ChangeKind))
    shape = draw(shapes)
    if kind is ChangeKind.TABLE:
        shape = (draw(st.integers(1, 20)), *shape)
    return ServedVariable(draw(names), draw(st.sampled_from(DTYPES)), shape, kind)


def random_array(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(dtype.numpy)


@st.composite
def deltas(draw: st.DrawFn) -> tuple[Schema, DeltaHeader, dict[str, Change]]:
    schema = Schema.of(draw(st.lists(variables(), max_size=5, unique_by=lambda variable: variable.name)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    changes: dict[str, Change] = {}
    for variable in schema.variables:
        if not draw(st.booleans()):
            continue
        if variable.kind is ChangeKind.DENSE:
            changes[variable.name] = random_array(rng, variable.dtype, variable.shape)
        else:
            ids = draw(st.sets(st.integers(0, variable.shape[0] - 1), min_size=1))
            values = random_array(rng, variable.dtype, (len(ids), *variable.shape[1:]))
            changes[variable.name] = Rows(np.array(sorted(ids), np.int64), values)
    start = draw(st.integers(0, POSITION_LIMIT - 2))
    end = draw(st.integers(start + 1, POSITION_LIMIT - 1))
    step, only_from = draw(st.integers(0, 2**62)), draw(st.booleans())
    return schema, DeltaHeader(draw(names), schema.digest, start, end, step, only_from), changes


@settings(max_examples=times(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deltas())
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Schema, DeltaHeader, dict[str, Change]]
) -> None:
    schema, header, changes = case
    prefix = tmp_path_factory.mktemp("delta") / "delta"
    written = write_delta(prefix, schema, header, changes)
    assert [ref.name for ref in written] == ["delta/position", "delta/lineage", "delta/schema", *schema.keys]
    assert read_delta(prefix, schema).header == header
    delta = read_delta(prefix, schema)
    assert delta.header == header
    assert delta.rows == sum(len(change.ids) for change in changes.values() if isinstance(change, Rows))
    assert delta.changes.keys() == changes.keys()
    for name, change in changes.items():
        found = delta.changes[name]
        if isinstance(change, Rows):
            assert isinstance(found, Rows)
            np.testing.assert_array_equal(found.ids, change.ids, strict=True)
            np.testing.assert_array_equal(found.values, change.values, strict=True)
        else:
            np.testing.assert_array_equal(found, change, strict=True)


def test_strings_are_written_and_read(tmp_path: Path) -> None:
    schema = Schema.of([ServedVariable("names", DType.STRING, (2,), ChangeKind.DENSE)])
    value = np.array([b"", b"\xff" * 300], object)
    header = replace(HEADER, schema_digest=schema.digest)
    write_delta(tmp_path / "delta", schema, header, {"names": value})
    found = read_delta(tmp_path / "delta", schema).changes["names"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == value.tolist()


def test_the_schema_survives_json_and_its_digest_does_not_depend_on_order() -> None:
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA
    assert Schema.of(reversed(SCHEMA.variables)).digest == SCHEMA.digest


@pytest.mark.parametrize(
    "change",
    [
        {"name": "tables"},
        {"dtype": DType.HALF},
        {"shape": (10, 4)},
        {"shape": (11, 3)},
        {"kind": ChangeKind.DENSE},
    ],
    ids=str,
)
def test_every_property_of_a_variable_is_in_the_digest(change: dict[str, object]) -> None:
    table, *others = sorted(SCHEMA.variables, key=lambda variable: variable.name != "table")
    other = Schema.of([replace(table, **change), *others])  # type: ignore[arg-type]
    assert other.digest != SCHEMA.digest


def test_an_unknown_dtype_is_told_with_its_place() -> None:
    rows = [["a", "float32", [1], "table"], ["b", "float99", [1], "table"]]
    with pytest.raises(ValueError, match=r"'float99' - at `\$\[1\]\[1\]`"):
        Schema.from_json(rows)


@pytest.mark.parametrize(
    "value", [None, 3, [["a", "float32", [1]]], [["a", "float99", [1], "table"]], [[1, 2, 3, 4]]]
)
def test_what_is_no_schema(value: object) -> None:
    with pytest.raises(ValueError, match=""):
        Schema.from_json(value)


def test_two_variables_of_one_name() -> None:
    with pytest.raises(ValueError, match="share a name"):
        Schema.of([SCHEMA.variables[0], SCHEMA.variables[0]])


@pytest.mark.parametrize(("start", "end"), [(5, 5), (6, 5), (-1, 5), (5, POSITION_LIMIT)])
def test_positions_that_make_no_delta(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="cannot lead"):
        replace(HEADER, from_position=start, to_position=end)


@pytest.mark.parametrize(
    ("position", "whole", "only_from"),
    [(4, False, False), (5, True, True), (8, True, False), (9, False, False)],
)
def test_which_states_a_delta_fits(position: int, whole: bool, only_from: bool) -> None:
    assert Span.of(HEADER).accepts(position) is whole
    assert Span.of(replace(HEADER, only_from=True)).accepts(position) is only_from


BAD_CHANGES: dict[str, tuple[dict[str, Change], str]] = {
    "unknown variable": ({"other": ROWS}, "no variable 'other'"),
    "rows for a dense variable": ({"bias": ROWS}, "'bias' is dense"),
    "a value for a table": ({"table": np.ones((10, 3), np.float32)}, "'table' is table"),
    "dtype": ({"table": replace(ROWS, values=np.ones((2, 3)))}, "takes float32"),
    "row shape": ({"table": replace(ROWS, values=np.ones((2, 4), np.float32))}, "takes float32"),
    "dense shape": ({"bias": np.ones(3)}, "takes float64"),
    "fewer values": ({"table": replace(ROWS, values=np.ones((1, 3), np.float32))}, "ids for 1 rows"),
    "int32 ids": ({"table": replace(ROWS, ids=np.array([1, 4], np.int32))}, "int32"),
    "row outside": ({"table": replace(ROWS, ids=np.array([1, 10]))}, "strictly increasing"),
    "negative row": ({"table": replace(ROWS, ids=np.array([-1, 1]))}, "strictly increasing"),
    "row twice": ({"table": replace(ROWS, ids=np.array([1, 1]))}, "strictly increasing"),
    "rows in disorder": ({"table": replace(ROWS, ids=np.array([4, 1]))}, "strictly increasing"),
}


@pytest.mark.parametrize("case", BAD_CHANGES)
def test_changes_that_do_not_fit_are_not_written(tmp_path: Path, case: str) -> None:
    changes, message = BAD_CHANGES[case]
    with pytest.raises(ValueError, match=message):
        write_delta(tmp_path / "delta", SCHEMA, HEADER, changes)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_header_of_another_schema_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another schema"):
        write_delta(tmp_path / "delta", SCHEMA, replace(HEADER, schema_digest="0" * 64), {})


def rewritten(prefix: Path, **tensors: np.ndarray | None) -> None:
    """Write the delta at `prefix` again with some of its tensors replaced, or left out for None."""
    catalog = read_catalog(prefix)
    kept = {name: read_array(catalog, ref) for name, ref in catalog.tensors.items()}
    for key, array in tensors.items():
        name = key.replace("__", "/")
        if array is None:
            del kept[name]
        else:
            kept[name] = array
    with BundleWriter(prefix) as writer:
        for name, array in kept.items():
            writer.add(name, array)


def fields(**changed: int) -> np.ndarray:
    values = {"version": FORMAT_VERSION, "start": 5, "end": 9, "step": 500, "flags": 0, "rows": 2} | changed
    return np.array(list(values.values()), np.int64)


Spoil = Callable[[Path], None]
BAD_DELTAS: dict[str, tuple[Spoil, type[CheckpointError], str]] = {
    "no header": (lambda p: rewritten(p, delta__position=None), UnsupportedFormat, "is not a delta"),
    "short header": (lambda p: rewritten(p, delta__position=np.zeros(5, np.int64)), CorruptFile, "position"),
    "int32 header": (lambda p: rewritten(p, delta__position=np.ones(6, np.int32)), CorruptFile, "int32"),
    "newer version": (
        lambda p: rewritten(p, delta__position=fields(version=2)),
        UnsupportedFormat,
        "format 2",
    ),
    "unknown flag": (lambda p: rewritten(p, delta__position=fields(flags=8)), UnsupportedFormat, "flags 8"),
    "packed twice": (lambda p: rewritten(p, delta__position=fields(flags=6)), UnsupportedFormat, "flags 6"),
    "backwards": (
        lambda p: rewritten(p, delta__position=fields(end=3)),
        CorruptFile,
        "cannot lead from 5 to 3",
    ),
    "row count": (lambda p: rewritten(p, delta__position=fields(rows=3)), CorruptFile, "declares 3 rows"),
    "no lineage": (lambda p: rewritten(p, delta__lineage=None), UnsupportedFormat, "delta/lineage"),
    "other schema": (
        lambda p: rewritten(p, delta__schema=np.array(b"0" * 64, object)),
        UnsupportedFormat,
        "other variables",
    ),
    "a variable is missing": (lambda p: rewritten(p, table__ids=None), UnsupportedFormat, "table/ids"),
    "row shape": (
        lambda p: rewritten(p, table__values=np.ones((2, 4), np.float32)),
        CorruptFile,
        "table/values",
    ),
    "rank": (lambda p: rewritten(p, table__values=np.ones(2, np.float32)), CorruptFile, "table/values"),
    "dtype": (lambda p: rewritten(p, table__values=np.ones((2, 3))), CorruptFile, "float64"),
    "fewer ids": (lambda p: rewritten(p, table__ids=np.array([1])), CorruptFile, "ids for 2 rows"),
    "row outside": (lambda p: rewritten(p, table__ids=np.array([1, 10])), CorruptFile, "strictly increasing"),
    "row twice": (lambda p: rewritten(p, table__ids=np.array([1, 1])), CorruptFile, "strictly increasing"),
    "a tensor of no variable": (
        lambda p: rewritten(p, other__value=np.ones((1, 2))),
        CorruptFile,
        "'other/value', which is of no variable",
    ),
    "two dense values": (
        lambda p: rewritten(p, bias__value=np.ones((2, 2))),
        CorruptFile,
        "2 values of 'bias'",
    ),
}


@pytest.mark.parametrize("case", BAD_DELTAS)
def test_a_bad_delta_is_refused_by_name(tmp_path: Path, case: str) -> None:
    spoil, error, message = BAD_DELTAS[case]
    prefix = tmp_path / "delta"
    write_delta(prefix, SCHEMA, HEADER, {"table": ROWS, "bias": np.ones(2)})
    read_delta(prefix, SCHEMA)
    spoil(prefix)
    with pytest.raises(error, match=message):
        read_delta(prefix, SCHEMA)


def packed_delta(prefix: Path, packing: DeltaDtype) -> None:
    """Five rows, of which the first and the last are stored exactly."""
    values = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    values[1:4] = round_rows(values[1:4], packing)
    rows = Rows(np.array([0, 2, 5, 6, 9]), values)
    write_delta(prefix, SCHEMA, replace(HEADER, packing=packing), {"table": rows})


F4 = np.float32
BAD_PACKING: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "scale NaN": ({"scales": np.array([1, np.nan, 1], F4)}, "a scale is none"),
    "scale infinite": ({"scales": np.array([1, np.inf, 1], F4)}, "a scale is none"),
    "scale too large": ({"scales": np.array([1, 2e36, 1], F4)}, "a scale is none"),
    "scale negative": ({"scales": np.array([1, -1, 1], F4)}, "a scale is none"),
    "scale subnormal": ({"scales": np.array([1, 1e-40, 1], F4)}, "a scale is none"),
    "fewer scales": ({"scales": np.ones(1, F4)}, "1 scales for 3 rows"),
    "scales of another dtype": ({"scales": np.ones(3)}, "expected float32"),
    "scales of another rank": ({"scales": np.ones((3, 1), F4)}, "table/scales"),
    "no scales": ({"scales": None}, "no tensor 'table/scales'"),
    "codes of another dtype": ({"packed": np.ones((3, 3), np.uint8)}, "expected int8"),
    "codes of another shape": ({"packed": np.ones((3, 4), np.int8)}, "table/packed"),
    "fewer codes": ({"packed": np.ones((2, 3), np.int8), "scales": np.ones(2, F4)}, "places are not"),
    "more codes": ({"packed": np.ones((4, 3), np.int8), "scales": np.ones(4, F4)}, "ids for 6 rows"),
    "no codes": ({"packed": None}, "no tensor 'table/packed'"),
    "place outside": ({"exact": np.array([0, 5])}, "places are not strictly increasing in 0-4"),
    "place negative": ({"exact": np.array([-1, 4])}, "places are not strictly increasing"),
    "place twice": ({"exact": np.array([4, 4])}, "places are not strictly increasing"),
    "places in disorder": ({"exact": np.array([4, 0])}, "places are not strictly increasing"),
    "fewer places": ({"exact": np.array([0])}, "1 places for 2 exact rows"),
    "places of another dtype": ({"exact": np.array([0, 4], np.int32)}, "expected int64"),
    "no places": ({"exact": None}, "no tensor 'table/exact'"),
    "more exact values": ({"values": np.ones((3, 3), F4)}, "2 places for 3 exact rows"),
}


@pytest.mark.parametrize("case", BAD_PACKING)
def test_bad_packed_rows_are_refused_by_name(tmp_path: Path, case: str) -> None:
    tensors, message = BAD_PACKING[case]
    prefix = tmp_path / "delta"
    packed_delta(prefix, DeltaDtype.INT8)
    assert read_delta(prefix, SCHEMA).rows == 5
    rewritten(prefix, **{f"table__{key}": array for key, array in tensors.items()})
    with pytest.raises((CorruptFile, UnsupportedFormat), match=message):
        read_delta(prefix, SCHEMA)


def test_tensorflow_reads_packed_rows_as_the_format_says(tmp_path: Path) -> None:
    import tensorflow as tf

    packed_delta(tmp_path / "delta", DeltaDtype.INT8)
    reader = tf.train.load_checkpoint(str(tmp_path / "delta"))
    change = read_delta(tmp_path / "delta", SCHEMA).changes["table"]
    assert isinstance(change, Rows)
    assert reader.get_tensor("delta/position").tolist() == fields(flags=4, rows=5).tolist()
    assert reader.get_tensor("table/exact").tolist() == [0, 4]
    codes, scales = (reader.get_tensor(f"table/{key}") for key in ("packed", "scales"))
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(codes * scales[:, np.newaxis], change.values[1:4])
    np.testing.assert_array_equal(reader.get_tensor("table/values"), change.values[np.array([0, 4])])


def test_a_flipped_bit_in_the_header_is_noticed(tmp_path: Path) -> None:
    prefix = tmp_path / "delta"
    write_delta(prefix, SCHEMA, HEADER, {"table": ROWS})
    data = prefix.with_name("delta.data-00000-of-00001")
    extent = read_catalog(prefix).tensors["delta/position"].extents[0]
    content = bytearray(data.read_bytes())
    content[extent.offset + 9] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptFile):
        read_delta(prefix, SCHEMA)


def test_tensorflow_reads_the_same(tmp_path: Path) -> None:
    import tensorflow as tf

    write_delta(tmp_path / "delta", SCHEMA, HEADER, {"table": ROWS, "step": np.int64(7)})
    reader = tf.train.load_checkpoint(str(tmp_path / "delta"))
    assert reader.get_tensor("delta/position").tolist() == fields().tolist()
    assert reader.get_tensor("delta/lineage") == b"lineage"
    assert reader.get_tensor("table/ids").tolist() == [1, 4]
    assert reader.get_tensor("table/values").shape == (2, 3)
    assert reader.get_tensor("bias/value").shape == (0, 2)
    assert reader.get_tensor("step/value").tolist() == [7]

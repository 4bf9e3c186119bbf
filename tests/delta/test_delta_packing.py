"""Rounding and packing of rows: the nearest codes, what they give back, what has none."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec.structs import replace

from exporter.delta import packing as packing_module
from exporter.delta.delta_files import read_delta, write_delta
from exporter.delta.format import ChangeKind, DeltaHeader, Rows, Schema, ServedVariable
from exporter.delta.packing import Packing, SlicedRows, decode, encode, pack_rows, round_rows, shrinks
from exporter.options import DeltaDtype
from exporter.wire.dtypes import DType

BFLOAT16, INT8 = DeltaDtype
TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
WIDE = [DType.FLOAT, DType.DOUBLE]
rows_of = {
    dtype: arrays.arrays(
        dtype.numpy,
        st.tuples(st.integers(0, 4), st.integers(3, 6)),
        elements=st.floats(width=8 * dtype.numpy.itemsize) | st.floats(-4, 4, width=32),
    )
    for dtype in WIDE
}
any_rows = st.sampled_from(WIDE).flatmap(rows_of.__getitem__)
packings = st.sampled_from(DeltaDtype)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@given(any_rows, packings)
@example(np.array([[TINY, -TINY, 0.0], [-0.0, HUGE, 1.0]], np.float32), INT8)
@example(np.array([[127 * TINY, TINY / 2, 1e-45]], np.float32), INT8)
@example(np.array([[1e-320, 1e308, 3.0]]), BFLOAT16)
def test_rounded_rows_pack_and_come_back_bit_for_bit(rows: np.ndarray, packing: DeltaDtype) -> None:
    rounded = round_rows(rows, packing)
    found = pack_rows(rounded, packing)
    back = decode(found.codes, found.scales, rows.dtype)
    assert same(back[found.fits], rounded[found.fits])
    assert same(rounded[~found.fits], rows[~found.fits]), "what has no codes is not rounded"
    assert same(round_rows(rounded, packing), rounded), "once is enough"
    assert found.fits[encode(rows, packing).fits].all()


@given(any_rows, packings)
def test_nothing_subnormal_and_no_infinity_is_made(rows: np.ndarray, packing: DeltaDtype) -> None:
    found = encode(rows, packing)
    made = np.abs(decode(found.codes, found.scales, rows.dtype)[found.fits])
    assert np.isfinite(made).all()
    assert ((made == 0) | (made >= TINY)).all()
    assert np.isfinite(rows[found.fits]).all()


@given(rows_of[DType.FLOAT])
def test_bfloat16_is_the_nearest_and_ties_go_to_even(rows: np.ndarray) -> None:
    bits = rows.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    found = encode(rows, BFLOAT16)
    expected = np.where(np.abs(nearest) < TINY, np.copysign(0, nearest), nearest).astype(np.float32)
    assert same(decode(found.codes, None, rows.dtype)[found.fits], expected[found.fits])
    assert (found.fits == np.isfinite(nearest).all(axis=1)).all()


@given(any_rows)
def test_int8_is_off_by_half_a_scale_at_most_and_uses_all_codes(rows: np.ndarray) -> None:
    found = encode(rows, INT8)
    assert found.scales is not None
    kept = rows[found.fits].astype(np.float64)
    scales = found.scales[found.fits].astype(np.float64)[:, np.newaxis]
    error = np.abs(decode(found.codes, found.scales, rows.dtype)[found.fits] - kept)
    assert (error <= np.maximum(scales * (0.5 + 1e-7), 128 * TINY)).all()
    largest = np.abs(found.codes[found.fits].astype(int)).max(axis=1, initial=0)
    assert ((largest == 127) | (scales[:, 0] == 0)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, HUGE])
def test_a_row_without_codes_is_sent_as_it_is(value: float) -> None:
    rows = np.array([[1.0, 2.5, 3.1], [1.1, value, 3.1], [0.1, 0.2, 0.3]], np.float32)
    rounded = round_rows(rows, INT8)
    assert same(rounded[1], rows[1])
    assert not same(rounded[0], rows[0])
    assert pack_rows(rounded, INT8).fits.tolist() == [True, False, True]


def test_what_shrinks() -> None:
    assert [shrinks(INT8, DType.FLOAT, (n,)) for n in (0, 1, 2, 64)] == [False, False, True, True]
    assert [shrinks(INT8, DType.DOUBLE, shape) for shape in ((), (1,), (2, 3))] == [True, True, True]
    assert [shrinks(BFLOAT16, DType.FLOAT, shape) for shape in ((), (0,), (2, 3))] == [True, False, True]
    for dtype in (DType.HALF, DType.BFLOAT16, DType.INT64, DType.STRING, DType.BOOL):
        assert not shrinks(INT8, dtype, (64,)), dtype
        assert not shrinks(BFLOAT16, dtype, (64,)), dtype


@st.composite
def tables(draw: st.DrawFn) -> tuple[ServedVariable, Rows]:
    """Rows that were rounded and others, as a merger would hold them; of several ranks."""
    dtype, packing = draw(st.sampled_from(WIDE)), draw(packings)
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    count = draw(st.integers(1, 12))
    values = (rng.normal(size=(count, *shape)) * 10.0 ** rng.integers(-3, 4)).astype(dtype.numpy)
    if shape:
        rounded = round_rows(values, packing)
        chosen = rng.random(count) < draw(st.sampled_from([0.0, 0.5, 1.0]))
        values[chosen] = rounded[chosen]
    ids = np.sort(rng.choice(40, count, replace=False))
    return ServedVariable("t", dtype, (40, *shape), ChangeKind.TABLE), Rows(ids, values)


@given(tables(), packings, st.integers(1, 5), st.data())
def test_a_packed_delta_holds_every_bit(
    table: tuple[ServedVariable, Rows], packing: DeltaDtype, at_once: int, data: st.DataObject
) -> None:
    variable, rows = table
    schema = Schema.of([variable, ServedVariable("whole", DType.FLOAT, (3,), ChangeKind.DENSE)])
    whole = np.array([0.1, np.nan, 1e-40], np.float32)
    header = DeltaHeader("l", schema.digest, 1, 2, 3, only_from=True, packing=packing)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_module, "_ROWS_AT_ONCE", at_once)
        prefix = Path(directory) / "delta"
        write_delta(prefix, schema, header, {"t": rows, "whole": whole})
        assert read_delta(prefix, schema).header == header
        delta = read_delta(prefix, schema)
        assert delta.rows == len(rows.ids)
        found, dense = delta.changes["t"], delta.changes["whole"]
        assert isinstance(found, Rows) and isinstance(dense, np.ndarray)
        assert same(np.asarray(dense), whole)
        assert same(np.asarray(found.ids), rows.ids)
        assert same(np.asarray(found.values), np.asarray(rows.values))
        start, stop = sorted(data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
        assert same(found.values[start:stop], rows.values[start:stop])
        places = np.array(data.draw(st.lists(st.integers(0, len(rows.ids) - 1))), np.int64)
        assert same(found.values[places], rows.values[places])
        again = Path(directory) / "again"
        for other in (None, BFLOAT16, INT8):
            write_delta(again, schema, replace(header, packing=other), delta.changes)
            copy = read_delta(again, schema).changes["t"]
            assert isinstance(copy, Rows)
            assert same(np.asarray(copy.values), np.asarray(rows.values))


@pytest.mark.parametrize("packing", DeltaDtype)
def test_rows_that_no_codes_give_are_stored_exactly(packing: DeltaDtype) -> None:
    rows = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    rows[::3] = round_rows(rows[::3], packing)
    found = Packing.of(rows, packing)
    assert found.packed.tolist() == list(range(0, 100, 3))
    assert same(np.concatenate([*found.values()]), rows[found.exact])


@pytest.mark.parametrize(("packing", "least"), [(BFLOAT16, 1.9), (INT8, 3.4)])
def test_rounded_rows_take_fewer_bytes(tmp_path: Path, packing: DeltaDtype, least: float) -> None:
    variable = ServedVariable("t", DType.FLOAT, (5000, 64), ChangeKind.TABLE)
    schema = Schema.of([variable])
    values = round_rows(np.random.default_rng(0).normal(size=(2000, 64)).astype(np.float32), packing)
    sizes = []
    for chosen in (None, packing):
        header = DeltaHeader("l", schema.digest, 1, 2, 3, packing=chosen)
        write_delta(tmp_path / "delta", schema, header, {"t": Rows(np.arange(2000), values)})
        sizes.append((tmp_path / "delta.data-00000-of-00001").stat().st_size)
    assert sizes[0] > least * sizes[1]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.none() | st.integers(-22, 22),
    st.none() | st.integers(-22, 22),
    st.none() | st.integers(1, 4),
)
def test_rows_in_several_arrays_are_asked_for_as_in_one(
    lengths: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    whole = np.arange(2 * sum(lengths), dtype=np.float32).reshape(-1, 2)
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    rows = SlicedRows(parts)
    found = rows[start:stop:step]
    assert same(found, whole[start:stop:step])
    assert same(np.asarray(rows), whole)
    assert np.shares_memory(rows[: lengths[0]], whole), "of one array it is a view"

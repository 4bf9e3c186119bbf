"""numpy's archives as TensorLayer and trainers by hand write them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exporter.catalog import Naming
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.npz import read_npz
from exporter.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    TruncatedFile,
    UnsafeArchive,
    UnsupportedFormat,
)
from tests.support.archives import Trap, npy, npy_header, patched, values, zip_of

LAYER = {"dense/W:0": np.arange(6, dtype=np.float32).reshape(2, 3), "dense/b:0": np.ones(3, np.float32)}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_named_arrays(tmp_path: Path, save: Any) -> None:
    """`save_npz_dict` writes variables' names as they are."""
    save(tmp_path / "m.npz", **LAYER)
    catalog = open_checkpoint(tmp_path)
    assert catalog.naming is Naming.NAMES
    found = values(catalog, tmp_path)
    np.testing.assert_array_equal(found["dense/W"], LAYER["dense/W:0"], strict=True)
    np.testing.assert_array_equal(found["dense/b"], LAYER["dense/b:0"], strict=True)


def test_a_list_keeps_its_order(tmp_path: Path) -> None:
    arrays = [np.full(number + 1, number, np.float32) for number in range(12)]
    np.savez(tmp_path / "m.npz", *arrays)
    catalog = read_npz(tmp_path / "m.npz")
    assert catalog.naming is Naming.ORDER
    assert list(catalog.tensors) == [f"arr_{number}" for number in range(12)]
    for name, value in values(catalog, tmp_path).items():
        np.testing.assert_array_equal(value, arrays[int(name.removeprefix("arr_"))], strict=True)


def test_a_list_with_bare_numbers_keeps_its_order(tmp_path: Path) -> None:
    """As TensorLayer's first `save_npz_dict` wrote it."""
    arrays = {str(number): np.full(2, number, np.float32) for number in range(12)}
    np.savez(tmp_path / "m.npz", **arrays)
    catalog = read_npz(tmp_path / "m.npz")
    assert (catalog.naming, [*catalog.tensors]) == (Naming.ORDER, [*arrays])


def test_numbers_of_two_styles_are_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **{"0": np.zeros(1), "arr_1": np.zeros(1)})
    assert read_npz(tmp_path / "m.npz").naming is Naming.NAMES


def test_a_list_of_equal_shapes_is_taken_apart(tmp_path: Path) -> None:
    """numpy stacks what `save_npz` gives it as `params=[...]`, if it can."""
    arrays = [np.full((2, 3), number, np.float32) for number in range(4)]
    np.savez(tmp_path / "m.npz", params=arrays)
    catalog = read_npz(tmp_path / "m.npz")
    assert catalog.naming is Naming.ORDER
    for name, value in values(catalog, tmp_path).items():
        np.testing.assert_array_equal(value, arrays[int(name.removeprefix("params/"))], strict=True)


def test_a_gap_in_the_numbers_makes_them_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", arr_0=np.zeros(1), arr_2=np.zeros(1))
    assert read_npz(tmp_path / "m.npz").naming is Naming.NAMES


@given(
    value=hnp.arrays(
        st.sampled_from([np.dtype(text) for text in ("<f4", ">f4", "<f8", "|u1", ">i8", "|b1", "<c16")]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    fortran=st.booleans(),
    compressed=st.booleans(),
)
def test_every_value_survives(
    tmp_path_factory: pytest.TempPathFactory, value: Any, fortran: bool, compressed: bool
) -> None:
    directory = tmp_path_factory.mktemp("values")
    save = np.savez_compressed if compressed else np.savez
    save(directory / "m.npz", w=np.asfortranarray(value) if fortran and value.ndim else value)
    (found,) = values(read_npz(directory / "m.npz"), directory).values()
    np.testing.assert_array_equal(found, value.astype(value.dtype.newbyteorder("<")), strict=True)


def test_large_arrays_stream_in_blocks(tmp_path: Path) -> None:
    value = np.arange(3_000_001, dtype=np.float32)
    np.savez_compressed(tmp_path / "m.npz", w=value)
    (ref,) = read_npz(tmp_path / "m.npz").tensors.values()
    assert ref.content is not None
    blocks = list(ref.content.blocks())
    assert max(block.nbytes for block in blocks) <= 4 << 20
    np.testing.assert_array_equal(np.concatenate(blocks), value)


def test_texts_are_left_out_with_a_note(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", w=np.zeros(2), labels=np.array(["cat", "dog"]))
    catalog = read_npz(tmp_path / "m.npz")
    assert catalog.tensors.keys() == {"w"}
    assert "labels" in catalog.notes[0]


def test_a_list_of_several_shapes_is_a_pickle(tmp_path: Path) -> None:
    """What `save_npz` of TensorLayer writes for most models."""
    ragged = np.empty(2, object)
    ragged[:] = [np.zeros((2, 3)), np.zeros(3)]
    np.savez(tmp_path / "m.npz", params=ragged)
    with pytest.raises(UnsafeArchive, match="pickle") as caught:
        read_npz(tmp_path / "m.npz")
    assert "allow_pickle=True" in caught.value.hint


def test_the_hint_for_pickles_helps(tmp_path: Path) -> None:
    ragged = np.empty(2, object)
    ragged[:] = [np.zeros((2, 3)), np.ones(3)]
    np.savez(tmp_path / "old.npz", params=ragged)
    np.savez(tmp_path / "new.npz", *np.load(tmp_path / "old.npz", allow_pickle=True)["params"])
    assert list(values(read_npz(tmp_path / "new.npz"), tmp_path)["arr_1"]) == [1, 1, 1]


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    trap = np.empty(1, object)
    trap[0] = Trap(tmp_path / "sprung")
    zip_of(tmp_path / "m.npz", [("w.npy", npy(trap))])
    with pytest.raises(UnsafeArchive):
        read_npz(tmp_path / "m.npz")
    assert not (tmp_path / "sprung").exists()


HEADERS = {
    "not a dict": "(1, 2)",
    "code": "__import__('os').system('true')",
    "cut": "{'descr': '<f4', ",
    "no shape": "{'descr': '<f4', 'fortran_order': False}",
    "a negative size": "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
    "a size that is no number": "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
    "an unknown type": "{'descr': '<q9', 'fortran_order': False, 'shape': ()}",
    "deep nesting": "(" * 5000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_damaged_header(tmp_path: Path, header: str) -> None:
    with pytest.raises(CorruptFile):
        read_npz(zip_of(tmp_path / "m.npz", [("w.npy", npy_header(header))]))


def test_a_long_header_is_not_quoted_whole(tmp_path: Path) -> None:
    header = npy_header("{'descr': '<f4', 'fortran_order': " + "x" * 60_000 + "}")
    with pytest.raises(CorruptFile) as caught:
        read_npz(zip_of(tmp_path / "m.npz", [("w.npy", header)]))
    assert 0 < len(caught.value.cause) < 1000


def test_a_huge_shape_is_no_promise(tmp_path: Path) -> None:
    header = npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1024)}")
    with pytest.raises(TruncatedFile, match="header declares"):
        read_npz(zip_of(tmp_path / "m.npz", [("w.npy", header)]))


def test_records_and_half_known_types(tmp_path: Path) -> None:
    np.savez(tmp_path / "records.npz", w=np.zeros(2, [("a", "f4"), ("b", "i4")]))
    with pytest.raises(UnsupportedFormat, match="records"):
        read_npz(tmp_path / "records.npz")
    np.savez(tmp_path / "void.npz", w=np.zeros(2, "V2"))
    with pytest.raises(UnsupportedFormat, match="no variable"):
        read_npz(tmp_path / "void.npz")


def test_members_that_are_no_arrays(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="not an npz"):
        read_npz(zip_of(tmp_path / "a.npz", [("readme.txt", b"hello")]))
    with pytest.raises(CorruptFile, match="not an npy"):
        read_npz(zip_of(tmp_path / "b.npz", [("w.npy", b"hello, world")]))
    with pytest.raises(CorruptFile, match="no arrays"):
        read_npz(zip_of(tmp_path / "c.npz", []))
    with pytest.raises(CorruptFile, match="two arrays"):
        read_npz(zip_of(tmp_path / "d.npz", [("w:0.npy", npy([1.0])), ("w:1.npy", npy([2.0]))]))


def test_columns_in_sequence_are_turned_in_memory_only_if_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporter.checkpoint.npz._MAX_TRANSPOSED_BYTES", 1000)
    np.savez(tmp_path / "m.npz", w=np.asfortranarray(np.zeros((20, 20))))
    with pytest.raises(UnsupportedFormat, match="turned in memory") as caught:
        read_npz(tmp_path / "m.npz")
    assert "ascontiguousarray" in caught.value.hint


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_flipped_bit_is_found(tmp_path: Path, compression: int) -> None:
    path = zip_of(tmp_path / "m.npz", [("w.npy", npy(np.arange(1000.0)))], compression=compression)
    patched(path, lambda data: data.__setitem__(1000, data[1000] ^ 1))
    with pytest.raises((CorruptFile, UnsafeArchive)):  # as it falls: damaged, or longer than declared
        values(read_npz(path), tmp_path)


def test_a_list_of_a_thousand_million_nothings_is_no_list(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", params=np.zeros((10**9, 0), np.float32))
    assert read_npz(tmp_path / "m.npz").naming is Naming.NAMES


def test_every_cut_and_every_flip_ends_in_a_named_error_or_the_same_values(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", **LAYER)
    whole = (tmp_path / "m.npz").read_bytes()
    path = tmp_path / "spoilt.npz"
    for at in range(0, len(whole), 7):
        for spoilt in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]):
            path.write_bytes(spoilt)
            try:
                found = values(read_npz(path), tmp_path)
            except CheckpointError:
                continue
            for name, value in found.items():
                original = {key.partition(":")[0]: array for key, array in LAYER.items()}
                if name in original:
                    np.testing.assert_array_equal(value, original[name])


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        read_npz(tmp_path / "m.npz")

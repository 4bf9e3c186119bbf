"""Keras' weights files of each form: names, owners, values, and what a damaged one says."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exporter.catalog import Naming
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.file_range import PlainValues
from exporter.checkpoint.hdf5 import Packed
from exporter.checkpoint.keras_archive import read_config, read_keras
from exporter.errors import (
    CheckpointChanged,
    CheckpointNotFound,
    CorruptFile,
    MissingShard,
    UnsupportedFormat,
)
from tests.support.archives import LAYERS, keras_archive, legacy_file, patched, values, weights_file
from tests.support.budget import times

EXPECTED = {
    f"{path}/vars/{number}": value
    for path, (_, arrays) in LAYERS.items()
    for number, value in enumerate(arrays)
}


def test_weights_know_their_layers(tmp_path: Path) -> None:
    catalog = read_keras(weights_file(tmp_path / "m.weights.h5"))
    assert catalog.naming is Naming.LAYERS
    assert not catalog.is_bundle
    assert {name: ref.owner for name, ref in catalog.tensors.items()} == {
        "layers/dense/vars/0": "hidden",
        "layers/dense/vars/1": "hidden",
        "layers/dense_1/vars/0": "out",
        "layers/dense_1/vars/1": "out",
    }
    assert catalog.bytes_ == sum(value.nbytes for value in EXPECTED.values())
    for name, value in values(catalog, tmp_path).items():
        np.testing.assert_array_equal(value, EXPECTED[name], strict=True)


def test_an_archive_is_read_where_it_lies(tmp_path: Path) -> None:
    path = keras_archive(tmp_path / "m.keras")
    before = sorted(tmp_path.iterdir())
    catalog = read_keras(path)
    assert all(isinstance(ref.content, PlainValues) for ref in catalog.tensors.values())
    assert sorted(tmp_path.iterdir()) == before
    for name, value in values(catalog, tmp_path).items():
        np.testing.assert_array_equal(value, EXPECTED[name], strict=True)


def test_an_owner_is_a_path_of_names(tmp_path: Path) -> None:
    layers = {
        "layers/functional": ("tower", []),
        "layers/functional/layers/dense": ("d", [np.zeros(2)]),
    }
    (ref,) = read_keras(weights_file(tmp_path / "m.weights.h5", layers)).tensors.values()
    assert ref.owner == "tower/d"


def write_shards(directory: Path, shards: dict[str, dict], groups: dict[str, object]) -> Path:
    for name, layers in shards.items():
        weights_file(directory / name, layers)
    path = directory / "m.weights.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": groups}))
    return path


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    (first, second) = LAYERS.items()
    shards = {"m_00000.weights.h5": dict([first]), "m_00001.weights.h5": dict([second])}
    groups = {"/layers/dense/vars": "m_00000.weights.h5", "/layers/dense_1/vars": ["m_00001.weights.h5"]}
    path = write_shards(tmp_path, shards, groups)
    catalog = open_checkpoint(tmp_path)
    assert catalog.prefix == path
    assert len(catalog.shards) == 2
    for name, value in values(catalog, tmp_path).items():
        np.testing.assert_array_equal(value, EXPECTED[name], strict=True)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    path = write_shards(tmp_path, {}, {"/layers/dense/vars": "m_00000.weights.h5"})
    with pytest.raises(MissingShard, match="m_00000"):
        read_keras(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_list_of_shards_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.weights.json"
    path.write_text(text)
    with pytest.raises(CorruptFile):
        read_keras(path)


def test_legacy_weights_have_names(tmp_path: Path) -> None:
    weights = {
        "a": {"a/kernel:0": np.ones((2, 2))},
        "b": {"b/kernel:0": np.zeros(3), "b/bias:0": np.int64(4)},
    }
    path = legacy_file(tmp_path / "m.h5", weights, keras_version="2.13.1")
    catalog = read_keras(path)
    assert catalog.family == "Keras legacy h5"
    assert catalog.naming is Naming.NAMES
    found = values(catalog, tmp_path)
    np.testing.assert_array_equal(found["a/kernel"], np.ones((2, 2)), strict=True)
    np.testing.assert_array_equal(found["b/bias"], np.int64(4))


def test_two_weights_of_one_name_keep_their_layers(tmp_path: Path) -> None:
    weights = {"a": {"kernel:0": np.ones(2)}, "b": {"kernel:0": np.zeros(2)}}
    assert read_keras(legacy_file(tmp_path / "m.h5", weights)).tensors.keys() == {"a/kernel", "b/kernel"}


def test_a_long_list_of_names_is_continued(tmp_path: Path) -> None:
    """Keras splits attributes above 64 KiB."""
    path = tmp_path / "m.h5"
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [b"a"]
        group = file.create_group("a")
        group.attrs["weight_names0"] = [b"x:0"]
        group.attrs["weight_names1"] = [b"y:0"]
        group["x:0"], group["y:0"] = np.zeros(1), np.ones(1)
    assert read_keras(path).tensors.keys() == {"x", "y"}


def test_a_listed_weight_that_is_not_there(tmp_path: Path) -> None:
    path = legacy_file(tmp_path / "m.h5", {"a": {"x:0": np.zeros(2)}})
    with h5py.File(path, "a") as file:
        del file["a/x:0"]
    with pytest.raises(CorruptFile, match="lists 'a/x:0'"):
        read_keras(path)


def test_the_config_of_each_kind(tmp_path: Path) -> None:
    archive = read_config(keras_archive(tmp_path / "m.keras", config='{"class_name": "Sequential"}'))
    assert archive is not None
    assert (json.loads(archive.text), archive.keras_version) == ({"class_name": "Sequential"}, "3.10.0")
    legacy = read_config(
        legacy_file(tmp_path / "m.h5", {"a": {}}, model_config='{"a": 1}', keras_version="2.9")
    )
    assert legacy is not None
    assert (legacy.text, legacy.keras_version, legacy.is_legacy) == ('{"a": 1}', "2.9", True)
    assert read_config(weights_file(tmp_path / "m.weights.h5")) is None


@pytest.mark.parametrize("config", ["{", "3", "[]"])
def test_a_config_that_is_no_object(tmp_path: Path, config: str) -> None:
    with pytest.raises(CorruptFile, match=r"config\.json"):
        read_config(keras_archive(tmp_path / "m.keras", config=config))


def test_the_optimizer_tells_the_step(tmp_path: Path) -> None:
    layers = {**LAYERS, "optimizer": ("adam", [np.int64(1234), np.float32(0.1)])}
    assert read_keras(weights_file(tmp_path / "m.weights.h5", layers)).step == 1234


def test_a_backup_tells_the_next_epoch(tmp_path: Path) -> None:
    weights_file(tmp_path / "latest.weights.h5")
    (tmp_path / "latest.weights.h5.bkp").write_bytes(b"older")
    (tmp_path / "training_metadata.json").write_text('{"epoch": 7, "batch": 0}')
    catalog = open_checkpoint(tmp_path)
    assert catalog.prefix.name == "latest.weights.h5"
    assert "epoch 7" in catalog.notes[0]


def test_a_series_of_archives_means_the_last(tmp_path: Path) -> None:
    for number in (2, 10, 9):
        weights_file(tmp_path / f"cp-{number}.weights.h5")
    assert open_checkpoint(tmp_path).prefix.name == "cp-10.weights.h5"


def test_archives_of_two_models_are_ambiguous(tmp_path: Path) -> None:
    weights_file(tmp_path / "a.weights.h5")
    weights_file(tmp_path / "b.weights.h5")
    with pytest.raises(CheckpointNotFound, match="several archives") as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "b.weights.h5") in caught.value.hint


DTYPES = st.sampled_from(["<f4", ">f4", "<f8", "<f2", "|i1", "<i4", ">i8", "<u2", "|b1", "<c8"])


@pytest.mark.landing
@given(data=st.data(), packed=st.booleans())
def test_every_value_survives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, packed: bool
) -> None:
    """Any shape and byte order, contiguous or compressed, arrives as TensorFlow stores it."""
    directory = tmp_path_factory.mktemp("values")
    dtype = np.dtype(data.draw(DTYPES))
    shape = data.draw(hnp.array_shapes(min_dims=int(packed), max_dims=3, min_side=int(packed), max_side=5))
    value = data.draw(hnp.arrays(dtype, shape))
    with h5py.File(directory / "m.weights.h5", "w") as file:
        options = {"compression": "gzip", "shuffle": True} if packed else {}
        file.create_dataset("layers/dense/vars/0", data=value, **options)
    catalog = read_keras(directory / "m.weights.h5")
    (found,) = values(catalog, directory).values()
    np.testing.assert_array_equal(found, value.astype(dtype.newbyteorder("<")), strict=True)


@pytest.mark.parametrize("is_marked", [True, False], ids=["keras3", "keras2"])
def test_bfloat16(tmp_path: Path, is_marked: bool) -> None:
    value = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        stored = file.create_dataset("layers/dense/vars/0", data=value)
        if is_marked:
            stored.attrs["dtype"] = "bfloat16"
    (found,) = values(read_keras(tmp_path / "m.weights.h5"), tmp_path).values()
    np.testing.assert_array_equal(found, value, strict=True)


def test_large_chunked_data_streams_in_blocks(tmp_path: Path) -> None:
    value = np.arange(3_000_000, dtype=np.float32).reshape(-1, 10)
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file.create_dataset("layers/dense/vars/0", data=value, compression="gzip", compression_opts=1)
    (ref,) = read_keras(tmp_path / "m.weights.h5").tensors.values()
    assert isinstance(ref.content, Packed)
    blocks = list(ref.content.blocks())
    assert max(block.nbytes for block in blocks) <= 4 << 20
    np.testing.assert_array_equal(np.concatenate(blocks), value.ravel())


def test_packed_values_may_be_read_side_by_side_and_left_half_way(tmp_path: Path) -> None:
    path = tmp_path / "m.weights.h5"
    value = np.arange(3_000_000, dtype=np.float32).reshape(-1, 10)
    with h5py.File(path, "w") as file:
        for number in range(2):
            file.create_dataset(
                f"layers/dense/vars/{number}", data=value + number, compression="gzip", compression_opts=1
            )
    first, second = (ref.content for ref in read_keras(path).tensors.values())
    assert isinstance(first, Packed)
    assert isinstance(second, Packed)
    left = first.blocks()
    next(left)
    left.close()
    for one, other in zip(first.blocks(), second.blocks(), strict=True):
        np.testing.assert_array_equal(one + 1, other)


def test_a_reader_may_take_its_time_with_each_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.checkpoint.hdf5._STEP_SECONDS", 2.0)
    value = np.arange(3_000_000, dtype=np.float32).reshape(-1, 10)
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file.create_dataset("layers/dense/vars/0", data=value, compression="gzip", compression_opts=1)
    (ref,) = read_keras(tmp_path / "m.weights.h5").tensors.values()
    assert isinstance(ref.content, Packed)
    blocks = ref.content.blocks()
    first = next(blocks)
    time.sleep(3)
    np.testing.assert_array_equal(np.concatenate([first, *blocks]), value.ravel())


def test_a_row_larger_than_a_block_is_cut(tmp_path: Path) -> None:
    value = np.arange(6_000_000, dtype=np.float32).reshape(2, 1500, 2000)
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        file.create_dataset("layers/dense/vars/0", data=value, chunks=(1, 100, 2000))
    (ref,) = read_keras(tmp_path / "m.weights.h5").tensors.values()
    assert isinstance(ref.content, Packed)
    blocks = list(ref.content.blocks())
    assert max(block.nbytes for block in blocks) <= 4 << 20
    np.testing.assert_array_equal(np.concatenate(blocks), value.ravel())


def test_the_library_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = weights_file(tmp_path / "m.weights.h5")
    code = (
        "import sys; from pathlib import Path; from exporter.checkpoint import open_checkpoint; "
        f"catalog = open_checkpoint(Path({str(path)!r})); print(len(catalog.tensors), 'h5py' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["4", "False"]


def test_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    catalog = read_keras(weights_file(tmp_path / "m.weights.h5"))
    other = {path: (name, [value + 1 for value in arrays]) for path, (name, arrays) in LAYERS.items()}
    (tmp_path / "m.weights.h5").unlink()
    weights_file(tmp_path / "m.weights.h5", other)
    with pytest.raises(CheckpointChanged, match="replaced"):
        values(catalog, tmp_path)


def test_a_flipped_bit_in_an_archive_is_found(tmp_path: Path) -> None:
    path = keras_archive(tmp_path / "m.keras")
    at = path.read_bytes().index(np.full(3, 2, np.float32).tobytes())
    patched(path, lambda data: data.__setitem__(at, data[at] ^ 1))
    with pytest.raises(CorruptFile, match="crc32"):
        values(read_keras(path), tmp_path)


def test_a_file_without_weights(tmp_path: Path) -> None:
    h5py.File(tmp_path / "m.weights.h5", "w").close()
    with pytest.raises(CorruptFile, match="no weights"):
        read_keras(tmp_path / "m.weights.h5")


def test_compressed_weights_inside_an_archive(tmp_path: Path) -> None:
    import zipfile

    path = keras_archive(tmp_path / "m.keras", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedFormat, match="compressed") as caught:
        read_keras(path)
    assert "zip -0" in caught.value.hint


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        read_keras(tmp_path / "m.keras")


@pytest.mark.landing
def test_every_cut_and_every_flip_ends_in_a_named_error(tmp_path: Path) -> None:
    """Nothing that is left of a file, or that a bit makes of it, brings down more than the export."""
    from exporter.errors import CheckpointError

    whole = weights_file(io.BytesIO()).getvalue()
    path = tmp_path / "m.weights.h5"
    refused = 0
    every = 388 // times(1)
    for at in range(0, len(whole), every):
        for spoilt in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :]):
            path.write_bytes(spoilt)
            try:
                values(read_keras(path), tmp_path)
            except CheckpointError:
                refused += 1
    assert refused > len(whole) // every

"""Archives made to do harm: each is refused by name, in bounded time and memory, and touches nothing else."""

from __future__ import annotations

import json
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.keras_archive import read_config, read_keras
from exporter.checkpoint.npz import read_npz
from exporter.checkpoint.zip_members import read_members
from exporter.errors import (
    BuilderError,
    CheckpointError,
    CodeRefused,
    CorruptFile,
    TruncatedFile,
    UnsafeArchive,
    UnsupportedFormat,
    UsageError,
)
from exporter.graph.archived_model import archive_builder
from tests.support.archives import keras_archive, npy, patched, values, weights_file, zip_of

ARRAY = npy(np.arange(4, dtype=np.float32))


# --- zip ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../w.npy", "/etc/w.npy", "a/../../w.npy", "..\\w.npy", "\\w.npy", "C:/w.npy"]
)
def test_a_member_that_leads_out(tmp_path: Path, name: str) -> None:
    info = zipfile.ZipInfo("x")
    info.filename = name
    with pytest.raises(UnsafeArchive, match=r"not the name of a file|leads out"):
        read_npz(zip_of(tmp_path / "m.npz", [(info, ARRAY)]))
    assert [path.name for path in tmp_path.iterdir()] == ["m.npz"]


def test_a_member_that_is_a_link(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("w.npy")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(UnsafeArchive, match="symbolic link"):
        read_npz(zip_of(tmp_path / "m.npz", [(info, b"/etc/passwd")]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(UnsafeArchive, match="two members"):
        read_npz(zip_of(tmp_path / "m.npz", [("w.npy", ARRAY), ("w.npy", ARRAY)]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["config.json", "metadata.json", "model.weights.h5", "assets/words.txt"])
def test_two_members_of_one_name_in_an_archive_of_keras(tmp_path: Path, name: str) -> None:
    """Readers differ in which of the two counts: what is checked may not be what is used."""
    path = keras_archive(tmp_path / "m.keras")
    with zipfile.ZipFile(path, "a") as archive:
        for _ in range(2):
            archive.writestr(name, "{}")
    for read in (read_config, read_keras, archive_builder):
        with pytest.raises(UnsafeArchive, match="two members"):
            read(path)


def central(path: Path, field: int, value: int, width: str = "<I") -> Path:
    """Overwrite a field of the first entry of the directory, by its offset there."""

    def change(data: bytearray) -> None:
        struct.pack_into(width, data, data.index(b"PK\x01\x02") + field, value)

    return patched(path, change)


def test_a_bomb_by_its_declared_size(tmp_path: Path) -> None:
    """DEFLATE cannot shrink by more than 1032 to 1."""
    path = zip_of(tmp_path / "m.npz", [("w.npy", ARRAY)], compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsafeArchive, match="no packing does that"):
        read_npz(central(path, 24, (1 << 32) - 2))


def test_a_bomb_by_its_actual_size(tmp_path: Path) -> None:
    """The directory says little and the stream holds much: reading stops at what was said."""
    data = npy(np.zeros(50 << 20, np.uint8))
    path = zip_of(tmp_path / "m.npz", [("w.npy", data)], compression=zipfile.ZIP_DEFLATED)
    central(path, 24, 1000)
    with pytest.raises(CheckpointError, match="unpacks to more than"):
        read_members(path)["w.npy"].read(1 << 20)


def test_a_bomb_in_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces pack 1000 to 1; what a config may have is far less."""
    monkeypatch.setattr("exporter.checkpoint.keras_archive._MAX_JSON_BYTES", 1 << 20)
    config = "{" + " " * (2 << 20) + "}"
    path = keras_archive(tmp_path / "m.keras", config=config, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsafeArchive, match=r"config\.json"):
        read_config(path)


def test_a_stored_member_that_says_another_size(tmp_path: Path) -> None:
    with pytest.raises(UnsafeArchive, match="no packing"):
        read_npz(central(zip_of(tmp_path / "m.npz", [("w.npy", ARRAY)]), 24, 1 << 20))


def test_members_that_share_their_bytes(tmp_path: Path) -> None:
    """A bomb without nesting lets one member's bytes hold another whole member."""
    path = zip_of(tmp_path / "m.npz", [("a.npy", ARRAY), ("b.npy", ARRAY)])
    for field in (20, 24):  # both sizes of the first
        central(path, field, len(ARRAY) + 40)
    with pytest.raises(UnsafeArchive, match="share bytes"):
        read_members(path)


def test_a_member_with_two_names(tmp_path: Path) -> None:
    """What one program sees in the directory another one reads under another name."""
    path = patched(
        zip_of(tmp_path / "m.npz", [("w.npy", ARRAY)]), lambda data: data.__setitem__(30, ord("v"))
    )
    with pytest.raises(UnsafeArchive, match="its own header"):
        read_npz(path)


def test_members_that_are_encrypted_or_packed_otherwise(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="encrypted"):
        read_npz(central(zip_of(tmp_path / "a.npz", [("w.npy", ARRAY)]), 8, 1, "<H"))
    with pytest.raises(UnsupportedFormat, match="method 12"):
        read_npz(zip_of(tmp_path / "b.npz", [("w.npy", ARRAY)], compression=zipfile.ZIP_BZIP2))


def test_a_zip_without_its_end(tmp_path: Path) -> None:
    path = zip_of(tmp_path / "m.npz", [("w.npy", ARRAY)])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TruncatedFile, match="without its end"):
        read_npz(path)


@pytest.mark.parametrize("name", ["m.npz", "m.keras", "m.weights.h5", "m.h5"])
@pytest.mark.parametrize("data", [b"", b"hello, world", bytes(4096)], ids=["empty", "text", "zeros"])
def test_what_is_no_archive_at_all(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptFile, match="is no"):
        open_checkpoint(tmp_path / name)


def test_an_archive_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="no model"):
        read_keras(zip_of(tmp_path / "m.keras", [("readme", b"hello")]))


def test_a_zip_inside_another_is_not_opened(tmp_path: Path) -> None:
    inner = zip_of(tmp_path / "inner.npz", [("w.npy", ARRAY)]).read_bytes()
    with pytest.raises(CorruptFile):
        read_npz(zip_of(tmp_path / "m.npz", [("inner.npz", inner)]))


# --- HDF5 --------------------------------------------------------------------------------------------------


def hostile(path: Path, spoil: Callable[[h5py.File], Any]) -> Path:
    weights_file(path)
    with h5py.File(path, "a") as file:
        spoil(file)
    return path


def _external_link(file: h5py.File) -> None:
    file["layers/dense/vars/9"] = h5py.ExternalLink("/etc/passwd", "/")


def _soft_link(file: h5py.File) -> None:
    file["layers/dense/vars/9"] = h5py.SoftLink("/layers/dense_1/vars/0")


def _dangling_link(file: h5py.File) -> None:
    file["layers/dense/vars/9"] = h5py.SoftLink("/nowhere")


def _loop(file: h5py.File) -> None:
    file["layers/dense/again"] = file["layers"]


def _second_link(file: h5py.File) -> None:
    file["layers/dense/vars/9"] = file["layers/dense/vars/0"]


def _external_storage(file: h5py.File) -> None:
    outside = Path(file.filename).with_name("outside.bin")
    outside.write_bytes(bytes(64))
    file.create_dataset("layers/dense/vars/9", (4,), "f4", external=[(str(outside), 0, 64)])


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "w", (4,))
    file.create_virtual_dataset("layers/dense/vars/9", layout)


def _huge_chunked(file: h5py.File) -> None:
    file.create_dataset(
        "layers/dense/vars/9", (1 << 40, 1 << 10), "f4", chunks=(1024, 1024), compression="gzip"
    )


def _huge_unallocated(file: h5py.File) -> None:
    file.create_dataset("layers/dense/vars/9", (1 << 40,), "f4")


def _deep(file: h5py.File) -> None:
    file.create_group("/".join("a" * 100))


SPOILT = {
    "an external link": (_external_link, "a link to '/' in file '/etc/passwd'"),
    "a soft link": (_soft_link, "a link to '/layers/dense_1/vars/0'"),
    "a dangling link": (_dangling_link, "a link to '/nowhere'"),
    "a loop of hard links": (_loop, "again, by a second link"),
    "a second hard link": (_second_link, "again, by a second link"),
    "external storage": (_external_storage, "another file"),
    "a virtual dataset": (_virtual, "virtual"),
    "a huge chunked shape": (_huge_chunked, "declares"),
    "a huge shape without data": (_huge_unallocated, "declares"),
    "deep groups": (_deep, "deep"),
}


@pytest.mark.parametrize(("spoil", "what"), SPOILT.values(), ids=SPOILT.keys())
def test_hostile_hdf5(tmp_path: Path, spoil: Callable[[h5py.File], None], what: str) -> None:
    path = hostile(tmp_path / "m.weights.h5", spoil)
    with pytest.raises(UnsafeArchive, match=what):
        read_keras(path)


def test_datasets_that_share_their_bytes(tmp_path: Path) -> None:
    """A file of 1 GB could be a checkpoint of terabytes."""
    path, nowhere, size = weights_file(tmp_path / "m.weights.h5"), b"\xff" * 8, (20_000).to_bytes(8, "little")
    with h5py.File(path, "a") as file:
        group = file["layers/dense/vars"]
        place = group.create_dataset("a", data=np.ones(5000, np.float32)).id.get_offset()
        for name in "bcde":
            group.create_dataset(name, (5000,), "f4")
    path.write_bytes(path.read_bytes().replace(nowhere + size, place.to_bytes(8, "little") + size))
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["layers/dense/vars/e"][()], 1)
    with pytest.raises(UnsafeArchive, match="refused as an HDF5 file") as caught:
        read_keras(path)
    assert "datasets declare" in caught.value.cause


def test_many_shapes_without_data(tmp_path: Path) -> None:
    """Each is small enough to be filled in; all of them would fill a disk."""

    def spoil(file: h5py.File) -> None:
        for number in range(9):
            file.create_dataset(f"layers/dense/vars/x{number}", (15 << 20,), "f4", chunks=(1 << 20,))

    with pytest.raises(UnsafeArchive, match="refused as an HDF5 file") as caught:
        read_keras(hostile(tmp_path / "m.weights.h5", spoil))
    assert "datasets declare" in caught.value.cause


def test_a_chunk_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.checkpoint.hdf5._MAX_CHUNK_BYTES", 1 << 20)

    def spoil(file: h5py.File) -> None:
        data = np.zeros(1 << 19, np.float32)
        file.create_dataset("layers/dense/vars/9", data=data, chunks=data.shape, compression="gzip")

    with pytest.raises(UnsafeArchive, match="one chunk"):
        read_keras(hostile(tmp_path / "m.weights.h5", spoil))


@pytest.mark.parametrize("spoil", [_external_link, _virtual, _external_storage])
def test_the_same_inside_a_zip(tmp_path: Path, spoil: Callable[[h5py.File], None]) -> None:
    weights = hostile(tmp_path / "m.weights.h5", spoil).read_bytes()
    with pytest.raises(UnsafeArchive):
        read_keras(keras_archive(tmp_path / "m.keras", weights=weights))


def test_a_huge_dimension_beside_one_of_zero(tmp_path: Path) -> None:
    def spoil(file: h5py.File) -> None:
        file.create_dataset("layers/dense/vars/9", (1 << 60, 0), "f4")

    catalog = read_keras(hostile(tmp_path / "m.weights.h5", spoil))
    assert values(catalog, tmp_path)["layers/dense/vars/9"].size == 0


def test_a_filter_that_would_be_loaded_from_a_plug_in(tmp_path: Path) -> None:
    def spoil(file: h5py.File) -> None:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((4,))
        plist.set_filter(305, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((4,))
        h5py.h5d.create(file["layers/dense/vars"].id, b"9", h5py.h5t.IEEE_F32LE, space, plist)

    with pytest.raises(UnsupportedFormat, match="filter 305"):
        read_keras(hostile(tmp_path / "m.weights.h5", spoil))


def _endless(data: bytearray) -> None:
    """An object of no size in the heap of texts: the library reads it again and again."""
    data[data.index(b"GCOL") + 48] = 0


@pytest.mark.landing
@pytest.mark.parametrize("name", ["m.weights.h5", "m.keras"])
def test_damage_that_the_library_never_returns_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("exporter.checkpoint.hdf5._STEP_CPU_SECONDS", 1)
    path = tmp_path / name
    patched(weights_file(path) if name.endswith("h5") else keras_archive(path), _endless)
    with pytest.raises(UnsafeArchive, match="refused as an HDF5 file") as caught:
        open_checkpoint(path)
    assert "came to no end" in caught.value.cause


def test_a_process_that_stays_silent_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.checkpoint.hdf5._STEP_SECONDS", 0.5)
    path = patched(weights_file(tmp_path / "m.weights.h5"), _endless)
    with pytest.raises(UnsafeArchive, match="refused as an HDF5 file") as caught:
        read_keras(path)
    assert "in 0.5 s" in caught.value.cause


def test_memory_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.checkpoint.hdf5._MEMORY_BYTES", 64 << 20)

    def spoil(file: h5py.File) -> None:
        data = np.zeros(40 << 20, np.float32)
        file.create_dataset("layers/dense/vars/9", data=data, chunks=data.shape, compression="gzip")

    catalog = read_keras(hostile(tmp_path / "m.weights.h5", spoil))
    with pytest.raises(CheckpointError, match="HDF5"):
        list(catalog.tensors["layers/dense/vars/9"].content.blocks())  # type: ignore[union-attr]


def test_a_file_cut_off(tmp_path: Path) -> None:
    path = weights_file(tmp_path / "m.weights.h5")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TruncatedFile):
        read_keras(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "m.weights.json")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "m.weights.json")


@pytest.mark.parametrize("name", ["../m_00000.weights.h5", "/etc/passwd", "", ".", "..", "a/b.h5", "a\0b"])
def test_a_shard_that_leads_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.weights.json"
    path.write_text(json.dumps({"weight_map": {"/layers/dense/vars": name}}))
    with pytest.raises(UnsafeArchive, match=r"not the name of a file|not beside it"):
        read_keras(path)


# --- configs -----------------------------------------------------------------------------------------------


def layer(class_name: str, **fields: Any) -> str:
    entry = {"class_name": class_name, "config": {}, **fields}
    return json.dumps({"class_name": "Sequential", "module": "keras", "config": {"layers": [entry]}})


@pytest.mark.parametrize("name", ["Lambda", "__lambda__", "TFSMLayer", "TorchModuleWrapper", "JaxLayer"])
def test_code_in_a_config(tmp_path: Path, name: str) -> None:
    path = keras_archive(tmp_path / "m.keras", config=layer(name, module="keras.layers"))
    with pytest.raises(CodeRefused, match=f"{name} at /config/layers/0") as caught:
        archive_builder(path)
    assert "--allow code" in caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"module": "os", "registered_name": None},
        {"module": "mine.layers", "registered_name": "mine>Special"},
        {"module": None, "registered_name": "mine>Special"},
    ],
)
def test_classes_of_other_modules(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = keras_archive(tmp_path / "m.keras", config=layer("Special", **fields))
    with pytest.raises(CodeRefused, match="not Keras' own") as caught:
        archive_builder(path)
    assert "--custom-objects" in caught.value.hint


def test_a_config_without_end(tmp_path: Path) -> None:
    nested = '{"a":' * 500 + "{}" + "}" * 500
    with pytest.raises(CodeRefused, match="deep"):
        archive_builder(keras_archive(tmp_path / "m.keras", config=nested))


def test_weights_alone_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model") as caught:
        archive_builder(weights_file(tmp_path / "m.weights.h5"))
    assert "--model" in caught.value.hint


def test_modules_that_cannot_be_imported(tmp_path: Path) -> None:
    path = keras_archive(tmp_path / "m.keras", config=layer("Dense", module="keras.layers"))
    with pytest.raises(UsageError, match=r"--custom-objects nowhere\.at_all"):
        archive_builder(path, custom_objects=["nowhere.at_all"])


def test_a_module_that_ends_the_program_is_an_error(tmp_path: Path) -> None:
    code = tmp_path / "a_script.py"
    code.write_text("import sys\nsys.exit(0)\n")
    path = keras_archive(tmp_path / "m.keras", config=layer("Dense", module="keras.layers"))
    with pytest.raises(UsageError, match="cannot be imported"):
        archive_builder(path, custom_objects=[str(code)])


def test_a_file_of_classes_is_named_as_a_builders_file_is(tmp_path: Path) -> None:
    code = tmp_path / "my_special_layers.py"
    code.write_text("import keras\n\n\nclass Special(keras.layers.Dense):\n    pass\n")
    path = keras_archive(tmp_path / "m.keras", config=layer("Special", module="elsewhere"))
    assert archive_builder(path, custom_objects=[str(code)])


def test_trusted_code_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    config = layer("Special", module=None, registered_name="mine>Special")
    path = keras_archive(tmp_path / "m.keras", config=config)
    with pytest.raises(BuilderError, match="Keras cannot make the model") as caught:
        archive_builder(path, allow_code=True)()
    assert "Special" in caught.value.cause
    assert "--custom-objects" in caught.value.hint


def test_bombs_do_not_grow_when_they_are_deflated_twice(tmp_path: Path) -> None:
    """A deflate stream of a deflate stream unpacks once."""
    twice = zlib.compress(zlib.compress(bytes(10 << 20)))
    with pytest.raises(CorruptFile, match="not an npy"):
        read_npz(zip_of(tmp_path / "m.npz", [("w.npy", twice)], compression=zipfile.ZIP_DEFLATED))

"""Hostile archives from the command line: a named error, its exit code, and nothing published or touched."""

from __future__ import annotations

import io
import json
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from exporter.errors import Exit
from tests.support.archives import Trap, keras_archive, npy, patched, weights_file, zip_of
from tests.support.commands import export_model

ARRAY = npy(np.arange(4, dtype=np.float32))
SECRET = b"not for you"


def bomb(directory: Path) -> Path:
    path = zip_of(directory / "m.npz", [("w.npy", ARRAY)], compression=zipfile.ZIP_DEFLATED)

    def declare(data: bytearray) -> None:
        struct.pack_into("<I", data, data.index(b"PK\x01\x02") + 24, (1 << 32) - 2)

    return patched(path, declare)


def bomb_in_a_config(directory: Path) -> Path:
    weights_file(weights := io.BytesIO())
    with zipfile.ZipFile(directory / "m.keras", "w") as archive:
        archive.writestr("config.json", "{" + " " * (257 << 20) + "}", zipfile.ZIP_DEFLATED)
        archive.writestr("model.weights.h5", weights.getvalue())
    return directory / "m.keras"


def chunk_bomb(directory: Path) -> Path:
    def spoil(file: h5py.File) -> None:
        file.create_dataset("w", (1 << 40, 1 << 10), "f4", chunks=(1024, 1024), compression="gzip")

    return spoilt_weights(directory, spoil)


def upwards(directory: Path) -> Path:
    return zip_of(directory / "m.npz", [("../w.npy", ARRAY)])


def upwards_in_keras(directory: Path) -> Path:
    path = keras_archive(directory / "m.keras")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("assets/../../secret", b"")
    return path


def symlink(directory: Path) -> Path:
    info = zipfile.ZipInfo("w.npy")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return zip_of(directory / "m.npz", [(info, str(directory / "secret").encode())])


def pickled(directory: Path) -> Path:
    trap = np.empty(1, object)
    trap[0] = Trap(directory / "sprung")
    return zip_of(directory / "m.npz", [("w.npy", npy(trap))])


def spoilt_weights(directory: Path, spoil: Callable[[h5py.File], Any]) -> Path:
    path = weights_file(directory / "m.weights.h5")
    with h5py.File(path, "a") as file:
        spoil(file)
    return path  # type: ignore[no-any-return]


def external_link(directory: Path) -> Path:
    target = h5py.ExternalLink(str(directory / "secret"), "/")
    return spoilt_weights(directory, lambda file: file.__setitem__("layers/dense/vars/9", target))


def external_link_in_keras(directory: Path) -> Path:
    def spoil(file: h5py.File) -> None:
        file["layers/dense/vars/9"] = h5py.ExternalLink(str(directory / "secret"), "/")

    weights_file(buffer := io.BytesIO())
    with h5py.File(buffer, "a") as file:
        spoil(file)
    return keras_archive(directory / "m.keras", weights=buffer.getvalue())


def external_storage(directory: Path) -> Path:
    data = [(str(directory / "secret"), 0, len(SECRET))]
    return spoilt_weights(
        directory, lambda file: file.create_dataset("w", (len(SECRET),), "u1", external=data)
    )


def virtual(directory: Path) -> Path:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource(str(directory / "secret"), "w", (4,))
    return spoilt_weights(directory, lambda file: file.create_virtual_dataset("w", layout))


def soft_link(directory: Path) -> Path:
    target = h5py.SoftLink("/layers/dense_1/vars/0")
    return spoilt_weights(directory, lambda file: file.__setitem__("layers/dense/vars/9", target))


def shard_elsewhere(directory: Path) -> Path:
    path = directory / "m.weights.json"
    path.write_text(json.dumps({"weight_map": {"/layers/dense/vars": "../secret"}}))
    return path


def code(directory: Path) -> Path:
    layer = {"class_name": "Lambda", "module": "keras.layers", "config": {}}
    model = {"class_name": "Sequential", "module": "keras", "config": {"layers": [layer]}}
    return keras_archive(directory / "m.keras", config=json.dumps(model))


HOSTILE = {
    bomb: ("UnsafeArchive", "no packing does that"),
    bomb_in_a_config: ("UnsafeArchive", "config.json"),
    chunk_bomb: ("UnsafeArchive", "declares"),
    upwards: ("UnsafeArchive", "not the name of a file"),
    upwards_in_keras: ("UnsafeArchive", "not the name of a file"),
    symlink: ("UnsafeArchive", "symbolic link"),
    pickled: ("UnsafeArchive", "pickle"),
    external_link: ("UnsafeArchive", "a link to"),
    external_link_in_keras: ("UnsafeArchive", "a link to"),
    external_storage: ("UnsafeArchive", "another file"),
    virtual: ("UnsafeArchive", "virtual"),
    soft_link: ("UnsafeArchive", "a link to"),
    shard_elsewhere: ("UnsafeArchive", "not the name of a file"),
    code: ("CodeRefused", "Lambda"),
}


@pytest.mark.landing
@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_nothing_is_published(ranker_graph: Path, tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/secret").write_bytes(SECRET)
    source = make(tmp_path / "in")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    model = [] if source.suffix == ".keras" else ["--model", ranker_graph]
    ran = export_model("--ckpt-dir", source, *model, "--out", tmp_path / "out", "--json")
    error, says = HOSTILE[make]
    assert (ran.error["error"], ran.out) == (error, ""), ran.err
    assert ran.code == ran.error["exit_code"] == (Exit.CHECKPOINT if error == "UnsafeArchive" else Exit.USAGE)
    assert says in ran.error["message"] + ran.error["cause"]
    assert SECRET.decode() not in ran.err
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if "out" not in path.parts}
    assert after.keys() == before.keys()
    assert not [path for path in (tmp_path / "out").glob("*") if path.name not in {".lock", ".turn"}]


def test_a_directory_with_a_hostile_archive(ranker_graph: Path, tmp_path: Path) -> None:
    """It is not passed over for another file."""
    (tmp_path / "in").mkdir()
    upwards(tmp_path / "in")
    ran = export_model(
        "--ckpt-dir", tmp_path / "in", "--model", ranker_graph, "--out", tmp_path / "out", "--json"
    )
    assert (ran.code, ran.error["error"]) == (Exit.CHECKPOINT, "UnsafeArchive")

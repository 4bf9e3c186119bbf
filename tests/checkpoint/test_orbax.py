"""Directories that Orbax wrote, whole, half-written, damaged, and made to do harm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts

from exporter import ExportRequest, export
from exporter.catalog import ExtraKind
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.keras_archive import read_config
from exporter.checkpoint.orbax import read_orbax
from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CodeRefused,
    CorruptFile,
    MissingShard,
    UnsafeArchive,
)
from exporter.mapping.extras import classify_extras
from tests.support.archives import values
from tests.support.commands import export_model
from tests.support.object_stores import Bucket

FIXTURE = Path(__file__).parents[1] / "fixtures/orbax/0.12.8.tar.xz"
TREE = {
    "table": np.arange(42 * 6, dtype=np.float32).reshape(42, 6),
    "step": np.array(7),
    "layers/0/kernel": np.ones((2, 3), np.float32),
    "layers/1/kernel": np.zeros((2, 3), np.float32),
}


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("orbax")
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture
def written(packed: Path, tmp_path: Path) -> Path:
    """What Orbax wrote, to be changed."""
    return Path(shutil.copytree(packed, tmp_path / "written"))


def arrays_in(directory: Path, arrays: dict[str, Any], chunk: list[int] | None = None, **store: Any) -> Path:
    """A tree whose arrays tensorstore wrote, in an OCDBT store."""
    place = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}, **store}
    for name, value in arrays.items():
        metadata = {"chunks": chunk or list(value.shape), "compressor": {"id": "zstd"}}
        spec = {"driver": "zarr", "kvstore": {**place, "path": f"{name}/"}, "metadata": metadata}
        ts.open(spec, create=True, dtype=value.dtype, shape=value.shape).result().write(value).result()
    return directory


# --- what the library writes -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["ocdbt", "zarr", "zarr3", "standard"])
def test_each_layout(packed: Path, tmp_path: Path, layout: str) -> None:
    """Also a table that four devices had a part of, and types that numpy lacks."""
    catalog = open_checkpoint(packed / layout)
    assert (catalog.step, catalog.family) == (7, "Orbax")
    found = values(catalog, tmp_path)
    assert found.keys() == TREE.keys() | {"halves"}
    for name, value in TREE.items():
        np.testing.assert_array_equal(found[name], value)
    assert catalog.tensors["halves"].dtype.label == "bfloat16"
    np.testing.assert_array_equal(found["halves"].astype(np.float32), np.arange(5))


def test_a_directory_means_its_newest_finished_step(written: Path) -> None:
    managed = written / "managed"
    (managed / "9").rename(managed / "900.orbax-checkpoint-tmp")
    (managed / "11").mkdir()  # what a pruning trainer has not removed yet
    assert open_checkpoint(managed).prefix == managed / "10"
    shutil.rmtree(managed / "10")
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(managed)
    (managed / "900.orbax-checkpoint-tmp").rename(managed / "step_9")
    catalog = open_checkpoint(managed)
    assert (catalog.prefix.name, catalog.step) == ("step_9", 9)


def test_an_unfinished_step_is_not_taken(written: Path) -> None:
    half = (written / "managed/10").rename(written / "managed/10.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointNotFound):
        open_checkpoint(half)


def test_items_of_one_step_are_told_apart(written: Path) -> None:
    step = written / "managed/10"
    assert "params/table/embedding" in open_checkpoint(step).tensors
    shutil.copytree(step / "state", step / "averages")
    names = open_checkpoint(step).tensors
    assert {"state/params/table/embedding", "averages/params/table/embedding"} <= names.keys()


def test_variables_of_keras_have_their_own_names(packed: Path) -> None:
    catalog = open_checkpoint(packed / "keras")
    assert (catalog.prefix.name, catalog.step, catalog.family) == ("2", 12, "Orbax, of Keras")
    assert catalog.tensors["recurrent/lstm_cell/kernel"].owner == "recurrent"
    kinds = {extra.tensor.name.partition("/")[0]: extra.kind for extra in classify_extras(catalog)}
    assert kinds["optimizer_variables"] is ExtraKind.SLOT
    assert json.loads(read_config(catalog.prefix).text)["class_name"] == "Functional"  # type: ignore[union-attr]
    assert read_config(packed / "weights/2") is None


def test_a_model_whose_layers_keep_files_is_not_described(written: Path) -> None:
    (written / "keras/2/assets").mkdir()
    assert read_config(written / "keras/2") is None


def test_the_library_runs_in_a_process_of_its_own(packed: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from exporter.checkpoint import open_checkpoint; "
        f"found = open_checkpoint(Path({str(packed / 'zarr')!r})); "
        "print(len(found.tensors), 'tensorstore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "False"]


def test_a_missing_library_is_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exporter.checkpoint.orbax.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="tensorstore reads: it is not installed") as caught:
        open_checkpoint(packed / "zarr")
    assert "[orbax]" in caught.value.hint


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ((300_000, 10), [300_000, 3]),  # columns
        ((300_000, 10), [1000, 10]),
        ((70_000, 3), [1, 3]),
        ((2, 700, 1500), [1, 100, 1500]),
        ((2, 700, 1500), [2, 700, 400]),
        ((3_000_000,), [7]),
    ],
)
def test_values_stream_in_blocks_whatever_the_chunks(
    tmp_path: Path, shape: tuple[int, ...], chunk: list[int]
) -> None:
    if chunk == [1, 3] or chunk == [7]:  # a value in the store for each chunk: few of them
        shape = (400, *shape[1:])
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    catalog = read_orbax(arrays_in(tmp_path / "tree", {"w": value}, chunk))
    blocks = list(catalog.tensors["w"].content.blocks())  # type: ignore[union-attr]
    assert max(block.nbytes for block in blocks) <= 4 << 20
    np.testing.assert_array_equal(np.concatenate(blocks), value.ravel())


def test_threads_read_side_by_side(packed: Path) -> None:
    content = read_orbax(packed / "zarr3").tensors["table"].content
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: np.concatenate(list(content.blocks())), range(8)))  # type: ignore[union-attr]
    for each in found:
        np.testing.assert_array_equal(each, TREE["table"].ravel())


def test_steps_in_a_store(packed: Path, bucket: Bucket, tmp_path: Path) -> None:
    """There nothing is renamed: a step that lacks its mark is still being written."""
    bucket.upload(packed / "managed", "run")
    catalog = open_checkpoint(Path(bucket.url("run")))
    assert catalog.prefix.name == "10"
    found = values(catalog, tmp_path)["params/table/embedding"]
    own = open_checkpoint(packed / "managed")
    np.testing.assert_array_equal(found, values(own, tmp_path)["params/table/embedding"])
    bucket.delete("run/10/commit_success.txt")
    assert open_checkpoint(Path(bucket.url("run"))).prefix.name == "9"


def test_inspect_prints_it(packed: Path) -> None:
    done = export_model("inspect", packed / "managed")
    assert "10 (Orbax), step 10: 4 tensors" in done.out


# --- damage ------------------------------------------------------------------------------------------------


def test_a_chunk_that_is_not_there(written: Path, tmp_path: Path) -> None:
    (written / "zarr/table/1.0").unlink()
    catalog = read_orbax(written / "zarr")
    with pytest.raises(MissingShard, match="lacks values") as caught:
        values(catalog, tmp_path)
    assert "table" in caught.value.cause


def test_chunks_of_zeros_that_were_not_stored(written: Path, tmp_path: Path) -> None:
    metadata = written / "zarr/_METADATA"
    described = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(described | {"store_array_data_equal_to_fill_value": False}))
    (written / "zarr/table/1.0").unlink()
    found = values(read_orbax(written / "zarr"), tmp_path)["table"]
    assert not found[21:, :3].any()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"tree_metadata": 3}', b"[" * 100_000, b"\xff"])
def test_a_tree_that_is_none(written: Path, content: bytes) -> None:
    (written / "ocdbt/_METADATA").write_bytes(content)
    with pytest.raises(CorruptFile, match="_METADATA"):
        read_orbax(written / "ocdbt")


def test_data_cut_off(written: Path, tmp_path: Path) -> None:
    (data,) = (written / "ocdbt/d").iterdir()
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises((CorruptFile, MissingShard)):
        values(read_orbax(written / "ocdbt"), tmp_path)


def test_a_step_that_was_replaced_meanwhile(written: Path, tmp_path: Path) -> None:
    step = written / "managed/10"
    catalog = read_orbax(step)
    shutil.rmtree(step)
    shutil.copytree(written / "managed/9", step)
    with pytest.raises(CheckpointChanged):
        values(catalog, tmp_path)


def test_a_step_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """Its files may have the names of those before."""
    step = arrays_in(tmp_path / "step", {"w": np.zeros((3 << 20, 2), np.float32)}, [1 << 18, 2])
    content = read_orbax(step).tensors["w"].content
    blocks = content.blocks()  # type: ignore[union-attr]
    next(blocks)
    other = (step / "manifest.ocdbt").read_bytes()
    (step / "manifest.ocdbt").unlink()
    (step / "manifest.ocdbt").write_bytes(other)
    with pytest.raises(CheckpointChanged):
        list(blocks)


def test_a_step_that_a_trainer_prunes_meanwhile(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it is taken, and a note says so."""
    managed, looked = written / "managed", Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.parent.name == "10":
            shutil.rmtree(managed / "10", ignore_errors=True)
        return looked(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    catalog = open_checkpoint(managed)
    assert (catalog.prefix.name, len(catalog.notes)) == ("9", 1)


# --- made to do harm ---------------------------------------------------------------------------------------


def test_a_link_is_refused(written: Path) -> None:
    (written / "zarr/table/1.0").unlink()
    (written / "zarr/table/1.0").symlink_to("/etc/passwd")
    with pytest.raises(UnsafeArchive, match=r"1\.0 is neither a file nor a directory"):
        read_orbax(written / "zarr")


def test_a_pipe_is_not_waited_for(written: Path) -> None:
    os.mkfifo(written / "ocdbt/d/pipe")
    with pytest.raises(UnsafeArchive, match="neither a file"):
        read_orbax(written / "ocdbt")


def test_a_store_whose_data_lies_elsewhere(tmp_path: Path) -> None:
    """An OCDBT store has the paths of its files: here one leads to a file beside the checkpoint."""
    tree, outside = tmp_path / "in", tmp_path / "out"
    config = {"max_inline_value_bytes": 0, "compression": None}
    arrays_in(tree, {"w": np.arange(9, dtype=np.float32)}, value_data_prefix="ab/out/", config=config)
    catalog = read_orbax(tree)
    np.testing.assert_array_equal(values(catalog, tmp_path)["w"], np.arange(9))
    (tree / "ab/out").rename(outside)
    for node in (tree / "d").iterdir():
        content = node.read_bytes().replace(b"ab/out/", b"../out/")[:-4]
        node.write_bytes(content + google_crc32c.value(content).to_bytes(4, "little"))
    with pytest.raises(CorruptFile) as caught:
        values(read_orbax(tree), tmp_path)
    assert "../out" in caught.value.cause


def test_a_config_that_asks_for_code(written: Path, tmp_path: Path) -> None:
    """It is as little trusted as that of a `.keras` archive."""
    file = written / "keras/2/model_config/_strings.json"
    text = json.loads(file.read_text())["config"].replace('"class_name": "Dense"', '"class_name": "Lambda"')
    file.write_text(json.dumps({"config": text}))
    with pytest.raises(CodeRefused, match="Lambda"):
        export(ExportRequest(written / "keras", tmp_path / "m"))
    for content in (b"", b"[]", b'{"config": 7}', b"\xff"):
        file.write_bytes(content)
        with pytest.raises(CorruptFile, match=r"_strings\.json is damaged"):
            export(ExportRequest(written / "keras", tmp_path / "m"))


def zarray(directory: Path, **changes: Any) -> Path:
    """A tree in plain zarr whose array says of itself what is not so."""
    described = json.loads((directory / "zarr/table/.zarray").read_text())
    (directory / "zarr/table/.zarray").write_text(json.dumps(described | changes))
    return directory / "zarr"


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [1 << 40, 6]},
        {"shape": [1 << 60, 1 << 2]},
        {"shape": [1 << 40, 1 << 20], "chunks": [1 << 40, 1 << 20]},
        {"shape": [1 << 62, 6], "fill_value": 0},
    ],
)
def test_an_array_that_declares_more_than_there_is(written: Path, changes: dict[str, Any]) -> None:
    with pytest.raises((UnsafeArchive, CorruptFile)):
        read_orbax(zarray(written, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [-1, 6]},
        {"shape": "x"},
        {"dtype": "|O"},
        {"dtype": [["a", "<f2"], ["b", "<f2"]]},
        {"compressor": {"id": "nobody's"}},
        {"chunks": [0, 3]},
        {"zarr_format": 9},
    ],
)
def test_a_description_that_is_none(written: Path, changes: dict[str, Any]) -> None:
    with pytest.raises((CorruptFile, UnsafeArchive)):
        read_orbax(zarray(written, **changes))


def test_chunks_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = np.random.default_rng(3).normal(size=(2_000_000, 2)).astype(np.float32)
    catalog = read_orbax(arrays_in(tmp_path / "tree", {"w": value}, [2_000_000, 1]))
    monkeypatch.setattr("exporter.checkpoint.orbax._MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr("exporter.checkpoint.orbax.available_bytes", lambda: 40 << 20)
    with pytest.raises(UnsafeArchive, match="side by side have 16000000 bytes") as caught:
        list(catalog.tensors["w"].content.blocks())  # type: ignore[union-attr]
    assert "chunk_byte_size" in caught.value.hint


@pytest.mark.landing
@pytest.mark.parametrize("layout", ["ocdbt", "zarr3"])
def test_every_flip_ends_in_a_named_error(written: Path, tmp_path: Path, layout: str) -> None:
    """Or in the same values, or in others where a layout has no checksum; never in anything else."""
    tree, refused = written / layout, 0
    for file in (tree / "_METADATA", tree / "manifest.ocdbt", *(tree / "d").iterdir()):
        content = file.read_bytes()
        for at in range(0, len(content), max(1, len(content) // 6)):
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
            try:
                values(read_orbax(written / layout), tmp_path)
            except CheckpointError:
                refused += 1
        file.write_bytes(content)
    assert refused > 3

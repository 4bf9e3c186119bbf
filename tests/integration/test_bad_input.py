"""Every way in which input can be bad ends in a named error and its exit code; nothing is published."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.bundle_writer import BundleWriter
from exporter.checkpoint.tensor_bundle import read_array, read_catalog
from exporter.errors import Exit
from tests.support import bundles, small_disks
from tests.support.commands import export_model
from tests.support.logs import damage_tensor

ROOT = Path(__file__).parent.parent.parent
USER = "ranker/user_embedding"


@pytest.fixture
def train(ranker: Path, tmp_path: Path) -> Path:
    """A checkpoint directory to spoil."""
    shutil.copytree(ranker, tmp_path / "train")
    return tmp_path / "train"


def assert_refused(error: str, code: Exit, out: Path, *options: object, says: str = "") -> None:
    ran = export_model("--out", out, *options, "--json")
    assert ran.error["error"] == error, ran.err
    assert ran.code == ran.error["exit_code"] == code
    assert says in ran.error["message"] + ran.error["cause"]
    assert ran.error["hint"]
    assert ran.out == ""
    published = [path.name for path in out.iterdir()] if out.is_dir() else []
    assert not [name for name in published if name not in {".lock", ".turn"}]


# --- the checkpoint -----------------------------------------------------------------------------------------


def remove_everything(train: Path) -> None:
    for path in train.iterdir():
        path.unlink()


def remove_index(train: Path) -> None:
    (train / "model.ckpt-20.index").unlink()


def remove_shard(train: Path) -> None:
    (train / "model.ckpt-20.data-00000-of-00001").unlink()


def truncate_index(train: Path) -> None:
    os.truncate(train / "model.ckpt-20.index", 700)


def truncate_shard(train: Path) -> None:
    os.truncate(train / "model.ckpt-20.data-00000-of-00001", 1000)


def flip_bit_in_index(train: Path) -> None:
    path = train / "model.ckpt-20.index"
    data = bytearray(path.read_bytes())
    data[400] ^= 4
    path.write_bytes(data)


def big_endian(train: Path) -> None:
    bundles.write_index(train / "model.ckpt-20", [bundles.header(endianness=1), bundles.entry("w")])


def future_version(train: Path) -> None:
    header = bundles.header()
    message = type(bundles.protos.BundleHeaderProto()).FromString(header[1])
    message.version.min_consumer = 99
    bundles.write_index(train / "model.ckpt-20", [(b"", message.SerializeToString()), bundles.entry("w")])


def compressed(train: Path) -> None:
    empty = bundles.block([])
    (train / "model.ckpt-20.index").write_bytes(bundles.table([empty], type_=2))


def huge_lengths(train: Path) -> None:
    lies = bundles.block([(0, b"\x00" * 4, b""), (1 << 40, b"x", b"y")])
    (train / "model.ckpt-20.index").write_bytes(bundles.table([lies]))


def offsets_outside(train: Path) -> None:
    far = bundles.Extent(0, 1 << 62, 8, 0)
    bundles.write_index(train / "model.ckpt-20", [bundles.header(), bundles.entry("w", extent=far)])


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (shutil.rmtree, "CheckpointNotFound"),
        (remove_everything, "CheckpointNotFound"),
        (remove_index, "CheckpointNotFound"),
        (remove_shard, "MissingShard"),
        (truncate_index, "TruncatedFile"),
        (truncate_shard, "TruncatedFile"),
        (flip_bit_in_index, "CorruptFile"),
        (big_endian, "UnsupportedFormat"),
        (future_version, "UnsupportedFormat"),
        (compressed, "UnsupportedFormat"),
        (huge_lengths, "CorruptFile"),
        (offsets_outside, "TruncatedFile"),
    ],
)
def test_checkpoint(
    train: Path, ranker_graph: Path, tmp_path: Path, spoil: Callable[[Path], None], error: str
) -> None:
    spoil(train)
    options = ("--ckpt-dir", train, "--model", ranker_graph)
    assert_refused(error, Exit.CHECKPOINT, tmp_path / "out", *options)


def test_damage_in_a_shard_is_found_by_bytes(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    damage_tensor(train / "model.ckpt-20", USER)
    options = ("--ckpt-dir", train, "--model", ranker_graph, "--verify", "bytes")
    assert_refused("VerificationError", Exit.VERIFICATION, tmp_path / "out", *options, says=USER)


# --- the mapping --------------------------------------------------------------------------------------------


def rewrite(train: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Write the checkpoint again, unpartitioned, with some tensors changed."""
    catalog = read_catalog(train / "model.ckpt-20")
    tensors = {name: np.array(read_array(catalog, ref)) for name, ref in catalog.tensors.items()}
    change(tensors)
    for path in train.glob("model.ckpt-20.[di]*"):
        path.unlink()
    with BundleWriter(train / "model.ckpt-20") as writer:
        for name, value in sorted(tensors.items()):
            writer.add(name, value)


def test_wrong_shape(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    rewrite(train, lambda tensors: tensors.update({"ranker/hidden/bias": np.zeros(33, np.float32)}))
    options = ("--ckpt-dir", train, "--model", ranker_graph)
    assert_refused("ShapeMismatch", Exit.MAPPING, tmp_path / "out", *options, says="[33]")


def test_wrong_dtype(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    rewrite(train, lambda tensors: tensors.update({"ranker/hidden/bias": np.zeros(32, np.float64)}))
    options = ("--ckpt-dir", train, "--model", ranker_graph)
    assert_refused("ShapeMismatch", Exit.MAPPING, tmp_path / "out", *options, says="float64")


def test_missing_variable(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    rewrite(
        train, lambda tensors: tensors.update({"ranker/hidden/offset": tensors.pop("ranker/hidden/bias")})
    )
    options = ("--ckpt-dir", train, "--model", ranker_graph)
    assert_refused("MissingTensors", Exit.MAPPING, tmp_path / "out", *options, says="ranker/hidden/bias")


def test_the_missing_variable_is_found_by_a_rename(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    rewrite(
        train, lambda tensors: tensors.update({"ranker/hidden/offset": tensors.pop("ranker/hidden/bias")})
    )
    options = ("--ckpt-dir", train, "--model", ranker_graph, "--rename", "(.*hidden)/bias=\\1/offset")
    assert export_model("--out", tmp_path / "out", *options).code == 0


def test_ambiguous_rename(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    rules = ("--rename", "ranker/.*/bias=ranker/hidden/bias")
    options = ("--ckpt-dir", train, "--model", ranker_graph, *rules)
    assert_refused("AmbiguousRename", Exit.MAPPING, tmp_path / "out", *options, says="claimed by 2")


# --- the graph ----------------------------------------------------------------------------------------------


def test_unknown_tensor_in_a_signature(train: Path, tmp_path: Path) -> None:
    names = ("--input", "user=nobody:0", "--output", "click=ranker/Relu:0")
    options = ("--ckpt-dir", train, *names)
    assert_refused("UnknownTensor", Exit.USAGE, tmp_path / "out", *options, says="nobody:0")


def test_builder_that_raises(train: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def serving():\n    raise KeyError('vocabulary')\n")
    options = ("--ckpt-dir", train, "--model", f"{tmp_path / 'broken.py'}:serving")
    assert_refused("BuilderError", Exit.FAILURE, tmp_path / "out", *options, says="vocabulary")


def test_builder_that_is_not_there(train: Path, tmp_path: Path) -> None:
    options = ("--ckpt-dir", train, "--model", "no_such_package.module:serving")
    ran = export_model("--out", tmp_path / "out", *options, "--json")
    assert ran.code in (Exit.FAILURE, Exit.USAGE)
    assert "no_such_package" in ran.error["message"] + ran.error["cause"]


def test_damaged_meta(train: Path, tmp_path: Path) -> None:
    os.truncate(train / "model.ckpt-20.meta", 5_001)
    options = ("--ckpt-dir", train, "--output", "click=click:0")
    assert_refused("CorruptFile", Exit.CHECKPOINT, tmp_path / "out", *options, says=".meta")


# --- the target ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with too little space."""
    with small_disks.small_disk(tmp_path / "disk", "200k") as disk:
        yield disk.path


def test_full_disk(train: Path, ranker_graph: Path, small_disk: Path) -> None:
    options = ("--ckpt-dir", train, "--model", ranker_graph)
    assert_refused("DiskFull", Exit.FAILURE, small_disk / "out", *options)
    assert not list((small_disk / "out").glob(".staging-*"))


def test_read_only_target(train: Path, ranker_graph: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    options = ("--ckpt-dir", train, "--model", ranker_graph)
    assert_refused("TargetNotWritable", Exit.FAILURE, small_disk / "out", *options)


def test_target_that_is_a_file(train: Path, ranker_graph: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    options = ("--ckpt-dir", train, "--model", ranker_graph)
    assert_refused("TargetNotWritable", Exit.FAILURE, tmp_path / "out", *options)


def test_link_across_file_systems_is_refused_if_asked_for_alone(train: Path, ranker_graph: Path) -> None:
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == train.stat().st_dev:
        pytest.skip("there is no other file system to link to")
    out = Path("/dev/shm") / f"export-model-{os.getpid()}"
    try:
        options = ("--ckpt-dir", train, "--model", ranker_graph)
        assert_refused("LinkRefused", Exit.FAILURE, out, *options, "--data", "link")
        assert export_model("--out", out, *options, "--data", "auto").code == 0
        copied, original = read_catalog(out / "20/variables/variables"), read_catalog(train / "model.ckpt-20")
        tables = [read_array(catalog, catalog.tensors[USER]) for catalog in (copied, original)]
        np.testing.assert_array_equal(*tables)
    finally:
        shutil.rmtree(out, ignore_errors=True)


# --- interruption -------------------------------------------------------------------------------------------


@pytest.mark.landing
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_exports_leave_nothing(train: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A builder that waits gives us the time to interrupt it."""
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def serving():\n"
        f"    pathlib.Path({str(tmp_path / 'started')!r}).touch()\n"
        "    time.sleep(60)\n"
    )
    code = "from exporter.cli import main; main()"
    options = [
        "--ckpt-dir",
        str(train),
        "--model",
        f"{tmp_path / 'slow.py'}:serving",
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline, "the builder was never called"
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == Exit.INTERRUPTED
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert not [path for path in tmp_path.glob("out/*") if path.name not in {".lock", ".turn"}]

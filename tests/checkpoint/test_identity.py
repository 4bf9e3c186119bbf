"""Checkpoints are told apart by content, and a checkpoint that is replaced under our hands is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from exporter import open_checkpoint
from exporter.catalog import Catalog
from exporter.checkpoint.identity import Identity
from exporter.checkpoint.tensor_bundle import BundleWriter, shard_path
from exporter.errors import CheckpointChanged


def save(prefix: Path, value: float) -> Identity:
    with BundleWriter(prefix) as writer:
        writer.add("w", np.full(3, value, np.float32))
    return Identity.of(open_checkpoint(prefix))


def test_a_bundle_is_its_content_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    first, other = save(tmp_path / "model.ckpt-1", 1), save(tmp_path / "model.ckpt-2", 2)
    assert save(tmp_path / "copy/renamed-7", 1).digest == first.digest != other.digest
    assert save(tmp_path / "model.ckpt-1", 3).digest != first.digest, "the same name again"


def test_an_archive_is_its_name_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    np.savez(path, w=np.ones(3, np.float32))
    first = Identity.of(open_checkpoint(path))
    assert Identity.of(open_checkpoint(path)) == first
    os.utime(path, ns=(0, 10**18))
    assert Identity.of(open_checkpoint(path)).digest != first.digest


@pytest.mark.parametrize("name", ["weights.npz.sha256", "weights.npz.tmp", "weights.npz.index"])
def test_what_lies_beside_an_archive_is_not_the_archive(tmp_path: Path, name: str) -> None:
    path = tmp_path / "weights.npz"
    np.savez(path, w=np.ones(3, np.float32))
    (tmp_path / name).write_bytes(b"0")
    first = Identity.of(open_checkpoint(path))
    (tmp_path / name).write_bytes(b"0123")
    first.require_same_files()
    assert first.is_untouched
    assert Identity.of(open_checkpoint(path)) == first


def test_what_lies_beside_a_bundle_is_not_the_bundle(tmp_path: Path) -> None:
    beside = [tmp_path / "model.index.md5", tmp_path / "model.json", tmp_path / "model"]
    for path in beside:
        path.write_bytes(b"0")
    identity = save(tmp_path / "model", 1)
    for path in beside:
        path.write_bytes(b"0123")
    identity.require_same_files()
    assert [name for name, *_ in identity.files] == ["model.data-00000-of-00001", "model.index"]


def test_a_replaced_shard_of_an_archive_is_refused(tmp_path: Path) -> None:
    shards = tuple(tmp_path / f"m_0000{number}.weights.h5" for number in range(2))
    for path in (tmp_path / "m.weights.json", *shards):
        path.write_bytes(b"0")
    identity = Identity.of(Catalog("Keras weights, sharded", tmp_path / "m.weights.json", {}, shards, (1, 1)))
    identity.require_same_files()
    shards[1].write_bytes(b"other")
    with pytest.raises(CheckpointChanged, match="m_00001"):
        identity.require_same_files()


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001"])
def test_a_replaced_file_is_refused(tmp_path: Path, suffix: str) -> None:
    identity = save(tmp_path / "model.ckpt", 1)
    path = tmp_path / f"model.ckpt{suffix}"
    identity.require_same_files()
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.rename(path)
    with pytest.raises(CheckpointChanged, match="replaced"):
        identity.require_same_files()


def test_a_pruned_checkpoint_and_a_late_meta_do_no_harm(tmp_path: Path) -> None:
    identity = save(tmp_path / "model.ckpt", 1)
    (tmp_path / "model.ckpt.meta").write_bytes(b"late")
    identity.require_same_files()
    for path in tmp_path.iterdir():
        path.unlink()
    identity.require_same_files()


def test_a_checkpoint_that_is_gone_has_none(tmp_path: Path) -> None:
    save(tmp_path / "model.ckpt", 1)
    catalog = open_checkpoint(tmp_path)
    for path in (tmp_path / "model.ckpt.index", shard_path(tmp_path / "model.ckpt", 0, 1)):
        path.unlink()
    with pytest.raises(CheckpointChanged, match="vanished"):
        Identity.of(catalog)


def test_a_bundle_that_was_replaced_after_it_was_read_has_none(tmp_path: Path) -> None:
    save(tmp_path / "model.ckpt", 1)
    catalog = open_checkpoint(tmp_path)
    save(tmp_path / "model.ckpt", 2)
    with pytest.raises(CheckpointChanged, match="replaced after it was read"):
        Identity.of(catalog)

"""Damage to files, and the names of a delta's files."""

from __future__ import annotations

from pathlib import Path

from exporter.checkpoint.tensor_bundle import shard_path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


SHARD, INDEX = shard_path(Path("delta"), 0, 1).name, "delta.index"

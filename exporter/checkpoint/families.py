"""Recognise which family of checkpoints a path belongs to: archives by name, tensor bundles by index, else
V1.

What reads the other families is imported when one is met: a delta is made in the time that imports take.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from exporter.catalog import Catalog
from exporter.checkpoint.bundle_writer import index_path
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.checkpoint.trainers import recognise
from exporter.layout import SAVED_MODEL_FILES, VARIABLES_PREFIX

KERAS_SUFFIXES = (".keras", ".weights.json", ".h5", ".hdf5")
NPZ_SUFFIXES = (".npz",)
V1_SHARD = re.compile(r"-([0-9]{5}|\?{5})-of-[0-9]{5}$")
"""Behind a prefix: which shard of how many, or, in a pattern, each of them."""


_ARCHIVES = (*KERAS_SUFFIXES, *NPZ_SUFFIXES)
_KERAS_SHARD = re.compile(r"(.+)_[0-9]{5}\.weights\.h5$")
_BACKUP = "latest.weights.h5"
"""What `keras.callbacks.BackupAndRestore` keeps up to date."""


def read_family(path: Path) -> Catalog:
    """The checkpoint that a prefix or an archive's path names.

    Raises:
        CheckpointError: a subclass of it says why it cannot be read.
    """
    if path.name.endswith(KERAS_SUFFIXES):
        from exporter.checkpoint.keras_archive import read_keras

        return read_keras(path)
    if path.name.endswith(NPZ_SUFFIXES):
        from exporter.checkpoint.npz import read_npz

        return read_npz(path)
    if not index_path(path).exists() and (files := v1_files(path)):
        from exporter.checkpoint.v1 import read_v1

        return read_v1(path.with_name(v1_pattern(files[0].name)), files)
    if (model := saved_model_without_variables(path)) is not None:
        return Catalog("SavedModel without variables", path, {}, (model,), (model.stat().st_size,))
    return recognise(read_catalog(path))


def saved_model_without_variables(prefix: Path) -> Path | None:
    """The SavedModel's file if `prefix` is where its variables would be, and there is none of their files."""
    directory = prefix.parent
    if Path(directory.name, prefix.name) != VARIABLES_PREFIX or (
        directory.is_dir() and any(directory.iterdir())
    ):
        return None
    files = (directory.parent / name for name in SAVED_MODEL_FILES)
    return next((file for file in files if file.is_file()), None)


def is_archive(path: Path) -> bool:
    """True for a file that is an archive by its name."""
    return path.name.endswith(_ARCHIVES) and path.is_file()


def describes_model(path: Path) -> bool:
    """True for an archive that holds a model's config beside the weights.

    Raises:
        CheckpointError: it is damaged or hostile.
    """
    if not is_archive(path) or path.name.endswith(NPZ_SUFFIXES):
        return False
    from exporter.checkpoint.keras_archive import read_config

    return read_config(path) is not None


def archives(names: Collection[str]) -> list[str]:
    """The archives that a directory's path may mean: one, or several of a series.

    Of a sharded one only its list counts; of a directory of backups only the latest.
    """
    found = [name for name in names if name.endswith(_ARCHIVES) and not name.startswith(".")]
    if _BACKUP in found:
        return [_BACKUP]
    return [
        name
        for name in found
        if not ((shard := _KERAS_SHARD.fullmatch(name)) and f"{shard[1]}.weights.json" in found)
    ]


def is_series(names: Collection[str]) -> bool:
    """True if names differ in numbers alone, so that one of them is the newest."""
    return len({re.sub(r"[0-9]+", "0", name) for name in names}) == 1


def v1_pattern(name: str) -> str:
    """What TensorFlow calls a checkpoint of format V1 by one of its files: the file, or a pattern."""
    return V1_SHARD.sub(lambda shard: f"-?????{shard.group()[6:]}", name)


def v1_files(prefix: Path) -> list[Path]:
    """Files of a checkpoint of format V1: one named as the prefix, or shards that a glob pattern names."""
    pattern = re.escape(prefix.name).replace(r"\?", "[0-9]")
    with suppress(OSError):
        return sorted(
            path
            for path in prefix.parent.iterdir()
            if re.fullmatch(rf"{pattern}({V1_SHARD.pattern})?", path.name) and path.is_file()
        )
    return []

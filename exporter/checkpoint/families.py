"""The families of checkpoints: how to recognise each, which files belong together, which module reads it.

A family's reader is imported only when a checkpoint of it is met: imports dominate the time of a small delta.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.bundle_writer import index_path
from exporter.checkpoint.source_shard import shard_status
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.checkpoint.trainers import recognise
from exporter.errors import CheckpointNotFound
from exporter.storage.layout import (
    ORBAX_FILES,
    SAVED_MODEL_FILES,
    VARIABLES_DIRECTORY,
    VARIABLES_NAME,
    VARIABLES_PREFIX,
    is_saved_model,
)

# The end of a name behind the prefix: the shard's number and their count; in a pattern, any number.
V1_SHARD = re.compile(r"-([0-9]{5}|\?{5})-of-[0-9]{5}$")


class Family(Protocol):
    """One family of checkpoints. A path is a file's, or the common prefix of several files."""

    def matches(self, path: Path) -> bool:
        """True if `path` is a checkpoint of this family, by its name and its files.

        False if the files do not exist, or cannot be looked at. A SavedModel's directory `variables` that
        cannot be listed raises OSError.
        """

    def candidates(self, directory: Path, names: Collection[str]) -> list[Path]:
        """Return the checkpoints of this family among `names`, a directory's entries, in any order."""

    def files(self, path: Path, names: Collection[str]) -> list[str]:
        """Return the names of the checkpoint's files among `names`, the entries of its directory."""

    def read(self, path: Path) -> Catalog:
        """Read the checkpoint's catalog; CheckpointError or a subclass if that is impossible."""


class _TensorBundle:
    """TensorFlow's format V2: an index, shards, and often the trainer's graph beside them."""

    def matches(self, path: Path) -> bool:
        with suppress(OSError, ValueError):
            return index_path(path).exists()
        return False

    def candidates(self, directory: Path, names: Collection[str]) -> list[Path]:
        return [directory / name.removesuffix(".index") for name in names if name.endswith(".index")]

    def files(self, path: Path, names: Collection[str]) -> list[str]:
        found = [name for name in names if name.startswith(path.name) and self._is_of(path, name)]
        return [name for name in found if name != path.name] if index_path(path).name in found else found

    def _is_of(self, path: Path, name: str) -> bool:
        rest = name.removeprefix(path.name)
        return rest in ("", ".index", ".meta") or rest.startswith(".data-")

    def read(self, path: Path) -> Catalog:
        return recognise(read_catalog(path))


class _FormatV1:
    """TensorFlow's format V1: one file, or shards that a glob pattern names."""

    def matches(self, path: Path) -> bool:
        return not BUNDLE.matches(path) and bool(v1_files(path))

    def candidates(self, directory: Path, names: Collection[str]) -> list[Path]:
        # A file counts if its graph is beside it: nothing else identifies one.
        found = {v1_pattern(name) for name in names if f"{V1_SHARD.sub('', name)}.meta" in names}
        return [directory / name for name in found]

    def files(self, path: Path, names: Collection[str]) -> list[str]:
        graph = f"{V1_SHARD.sub('', path.name)}.meta"
        return [name for name in names if name == graph or _is_v1(path, name)]

    def read(self, path: Path) -> Catalog:
        from exporter.checkpoint.v1 import read_v1

        files = v1_files(path)
        if not files:  # it matched, and its files have vanished since
            raise CheckpointNotFound(f"there is no {path}")
        return read_v1(path.with_name(v1_pattern(files[0].name)), files)


class _SavedModelAlone:
    """A SavedModel without variables; its path is the prefix that they would have."""

    def matches(self, path: Path) -> bool:
        return saved_model_without_variables(path) is not None

    def candidates(self, directory: Path, names: Collection[str]) -> list[Path]:
        places = (directory / VARIABLES_PREFIX, directory / VARIABLES_NAME)
        return [prefix for prefix in places if self.matches(prefix)][:1]

    def files(self, path: Path, names: Collection[str]) -> list[str]:
        return []

    def read(self, path: Path) -> Catalog:
        model = saved_model_without_variables(path)
        if model is None:  # it matched, and has vanished since
            raise CheckpointNotFound(f"there is no {path}")
        return Catalog("SavedModel without variables", path, {}, (model,), (shard_status(model).st_size,))


class _Orbax:
    """Directories that Orbax writes: for a step, or for one tree."""

    def matches(self, path: Path) -> bool:
        with suppress(OSError, ValueError):
            if any((path / name).is_file() for name in ORBAX_FILES):
                from exporter.checkpoint.orbax import is_orbax

                return is_orbax(path)
        return False

    def candidates(self, directory: Path, names: Collection[str]) -> list[Path]:
        # Finished steps end in their number; names of unfinished ones do not.
        return [directory / name for name in names if name[-1:].isdigit() and self.matches(directory / name)]

    def files(self, path: Path, names: Collection[str]) -> list[str]:
        return [name for name in names if name == path.name]

    def read(self, path: Path) -> Catalog:
        from exporter.checkpoint.orbax import read_orbax

        return read_orbax(path)


class _Archives(Struct, frozen=True):
    """Files that each hold a whole checkpoint, recognised by the endings of their names.

    `shards` matches one file of a sharded checkpoint, from which `listed_by` makes the name of the list of
    shards; `latest` is the name of the newest checkpoint, "" without such a name.
    """

    suffixes: tuple[str, ...]
    reader: Callable[[Path], Catalog]
    shards: re.Pattern[str] | None = None
    listed_by: str = ""
    latest: str = ""

    def matches(self, path: Path) -> bool:
        with suppress(OSError, ValueError):
            return path.name.endswith(self.suffixes) and path.is_file()
        return False

    def candidates(self, directory: Path, names: Collection[str]) -> list[Path]:
        # A sharded checkpoint is named by its list alone.
        found = [name for name in names if name.endswith(self.suffixes) and not name.startswith(".")]
        return [directory / name for name in found if self._list(name) not in names]

    def _list(self, name: str) -> str | None:
        shard = self.shards and self.shards.fullmatch(name)
        return shard.expand(self.listed_by) if shard else None

    def files(self, path: Path, names: Collection[str]) -> list[str]:
        return [name for name in names if name == path.name]

    def read(self, path: Path) -> Catalog:
        return self.reader(path)


def _read_keras(path: Path) -> Catalog:
    from exporter.checkpoint.keras_archive import read_keras

    return read_keras(path)


def _read_npz(path: Path) -> Catalog:
    from exporter.checkpoint.npz import read_npz

    return read_npz(path)


def _read_safetensors(path: Path) -> Catalog:
    from exporter.checkpoint.safetensors import read_safetensors

    return read_safetensors(path)


BUNDLE = _TensorBundle()
V1 = _FormatV1()
SAVED_MODEL = _SavedModelAlone()
ORBAX = _Orbax()
KERAS = _Archives(
    (".keras", ".weights.json", ".h5", ".hdf5"),
    _read_keras,
    shards=re.compile(r"(.+)_[0-9]{5}\.weights\.h5"),
    listed_by=r"\1.weights.json",
    latest="latest.weights.h5",  # what `keras.callbacks.BackupAndRestore` keeps up to date
)
NPZ = _Archives((".npz",), _read_npz)
SAFETENSORS = _Archives(
    (".safetensors", ".safetensors.index.json"),
    _read_safetensors,
    shards=re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}\.safetensors"),
    listed_by=r"\1.safetensors.index.json",
)
ARCHIVES: tuple[_Archives, ...] = (KERAS, NPZ, SAFETENSORS)
ARCHIVE_SUFFIXES = tuple(suffix for family in ARCHIVES for suffix in family.suffixes)
FAMILIES: tuple[Family, ...] = (*ARCHIVES, V1, SAVED_MODEL, BUNDLE, ORBAX)


def family_of(path: Path) -> Family:
    """Return the first of `FAMILIES` that matches a path; the tensor bundle's if none does.

    OSError as `Family.matches`.
    """
    return next((family for family in FAMILIES if family.matches(path)), BUNDLE)


def read_family(path: Path) -> Catalog:
    """Read the catalog of the checkpoint with this prefix, or in this archive.

    CheckpointError and subclasses if there is none, or it is damaged or cannot be read. OSError as
    `Family.matches`.
    """
    return family_of(path).read(path)


def is_checkpoint(path: Path) -> bool:
    """True if a path is a checkpoint of some family. OSError as `Family.matches`."""
    return any(family.matches(path) for family in FAMILIES)


def archives(directory: Path, names: Collection[str]) -> list[Path]:
    """Return the archives among a directory's entries `names`, in no particular order.

    If one has a framework's name for the latest checkpoint (`latest.weights.h5`), only that one.
    """
    latest = [directory / family.latest for family in ARCHIVES if family.latest in names]
    return latest or [path for family in ARCHIVES for path in family.candidates(directory, names)]


def is_archive(path: Path) -> bool:
    """True for an existing file named as an archive, and for a finished directory that Orbax wrote."""
    return any(family.matches(path) for family in ARCHIVES) or ORBAX.matches(path)


def describes_model(path: Path) -> bool:
    """True for an archive that holds a model's config beside the weights; the archive is opened.

    Raises:
        CheckpointError: it, or a subclass: the archive is damaged or hostile.
    """
    if not (KERAS.matches(path) or ORBAX.matches(path)):
        return False
    from exporter.checkpoint.keras_archive import read_config

    return read_config(path) is not None


def model_beside(checkpoint: Path) -> str | None:
    """Return the path of a graph for a checkpoint: its `.meta`, the SavedModel around it, or the checkpoint.

    The first that exists counts; the checkpoint itself only if it is an archive that describes a model, for
    which it is opened. None without a graph.

    Raises:
        CheckpointError: it, or a subclass: the archive is damaged or hostile.
    """
    for path in (meta_beside(checkpoint), saved_model_around(checkpoint)):
        if path is not None and path.exists():
            return str(path)
    return str(checkpoint) if describes_model(checkpoint) else None


def meta_beside(checkpoint: Path) -> Path:
    """Return the path where a Saver writes the graph of a checkpoint; the file need not exist."""
    return checkpoint.with_name(f"{V1_SHARD.sub('', checkpoint.name)}.meta")  # V1's shards share one graph


def saved_model_around(checkpoint: Path) -> Path | None:
    """Return the SavedModel whose `variables/` holds the checkpoint; None for a checkpoint elsewhere."""
    directory = checkpoint.parent.parent
    return directory if checkpoint.parent.name == VARIABLES_DIRECTORY and is_saved_model(directory) else None


def is_series(names: Collection[str]) -> bool:
    """True if the names differ only in numbers, so that one of them is the newest; False without names."""
    return len({re.sub(r"[0-9]+", "0", name) for name in names}) == 1


def saved_model_without_variables(prefix: Path) -> Path | None:
    """Return the graph file of a SavedModel without variables that would have this `prefix`.

    None if its directory of variables has entries or may not be listed, or there is no such SavedModel.
    """
    directory = prefix.parent
    if Path(directory.name, prefix.name) != VARIABLES_PREFIX:
        return None
    with suppress(PermissionError):
        if not directory.is_dir() or not any(directory.iterdir()):
            files = (directory.parent / name for name in SAVED_MODEL_FILES)
            return next((file for file in files if file.is_file()), None)
    return None


def v1_pattern(name: str) -> str:
    """Return the name of a file's V1 checkpoint: the file's own, or a pattern of all shards' names."""
    return V1_SHARD.sub(lambda shard: f"-?????{shard.group()[6:]}", name)


def v1_files(prefix: Path) -> list[Path]:
    """Return the files, sorted, of a checkpoint of format V1.

    `prefix` is a file's path, a glob pattern of shards, or their common prefix. Empty if there are none, or
    the directory cannot be listed.
    """
    with suppress(OSError):
        return sorted(
            path for path in prefix.parent.iterdir() if _is_v1(prefix, path.name) and path.is_file()
        )
    return []


def _is_v1(prefix: Path, name: str) -> bool:
    pattern = re.escape(prefix.name).replace(r"\?", "[0-9]")
    return re.fullmatch(rf"{pattern}({V1_SHARD.pattern})?", name) is not None

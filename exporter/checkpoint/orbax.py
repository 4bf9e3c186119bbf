"""Read the checkpoints of Orbax: directories of arrays, one for each step, from JAX, Flax and Keras.

    10/                     a step; `10.orbax-checkpoint-tmp` while it is written, then renamed
      _CHECKPOINT_METADATA  which items it has, and when it was committed
      state/                an item: a tree of arrays; a step that was saved without items is one itself
        _METADATA           the tree's keys, in JSON
        manifest.ocdbt, d/  a key-value store (OCDBT) with arrays in the format zarr or zarr3,
        params.kernel/      or a directory of zarr for each array
        ocdbt.process_0/    files of one process: the store above refers to them, or has a copy

tensorstore reads the arrays, in a process of its own (`orbax_process.py`). A tensor's name is its keys,
joined by `/`. Checkpoints of `keras.callbacks.OrbaxCheckpoint` are grouped by kinds of variables; there the
variables' own paths are the names, and the model's config is beside them.

(Source: orbax/checkpoint/_src/metadata/tree.py, _src/path/step.py; keras/src/callbacks/orbax_checkpoint.py.)
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, TensorRef
from exporter.checkpoint.file_range import FileRange
from exporter.checkpoint.library import Reading, library
from exporter.checkpoint.tensor_values import read_step
from exporter.errors import (
    CheckpointChanged,
    CheckpointError,
    CheckpointNotFound,
    CorruptFile,
    UnsafeArchive,
    UnsupportedFormat,
    to_install,
)
from exporter.storage import mirror
from exporter.storage.files import close_quietly, open_regular, read_regular
from exporter.storage.layout import ASSETS_DIRECTORY, ORBAX_FILES
from exporter.storage.memory import available_bytes
from exporter.wire.dtypes import DType
from exporter.wire.json_documents import DocumentError, Text, decode

_STEP, _TREE, _STORE = ORBAX_FILES
_COMMITTED = "commit_success.txt"
_UNFINISHED = ".orbax-checkpoint-tmp"
_CONFIG = ("model_config", "_strings.json")
_TRAINABLE = "trainable_variables"
_OF_OPTIMIZER = "optimizer_variables"
_GROUPS_OF_KERAS = {_TRAINABLE, f"non_{_TRAINABLE}", _OF_OPTIMIZER, "metrics_variables"}
_NUMBER = re.compile(r"([0-9]+)$")
_MAX_DIGITS = 19  # a number of so many may be no int64

_MAX_TREE_BYTES = 256 << 20
_MAX_OBJECTS = 1_000_000
_MAX_RANK = 254  # TensorShape::MaxDimensions
_RATIO_FLOOR_BYTES = 64 << 20
_MAX_RATIO = 33_000  # zstd's 128 KiB in 4 bytes
_MEMORY_BYTES = 1 << 30  # beyond what the process needs to start, and three times a box
_CPU_SECONDS, _SECONDS = 20, 120.0  # for a block of values, and as long again for each further GiB in it


class _Key(Struct, frozen=True):
    key: Text


class _Leaf(Struct, frozen=True):
    key_metadata: tuple[_Key, ...]


class _Tree(Struct, frozen=True):
    """The metadata of an item.

    Before 0.6 `_METADATA` had no second flag, and missing values were not filled.
    """

    tree_metadata: dict[str, _Leaf]
    store_array_data_equal_to_fill_value: bool = True


class _Config(Struct, frozen=True):
    config: Text


class OrbaxValues(Struct, frozen=True):
    """The values of the array at `path` in an item; at most `box_bytes` of them are read at once."""

    item: Item
    path: str
    dtype: DType
    shape: tuple[int, ...]
    box_bytes: int

    def blocks(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the values as flat numpy arrays in C order, from the process that reads the checkpoint.

        CheckpointChanged if the step was replaced, which may be noticed only after the last block;
        UnsafeArchive beyond a limit, MissingShard if values are missing, CorruptFile if they are damaged,
        CheckpointError if tensorstore is not installed. All are raised during the iteration.
        """
        size = math.prod(self.shape) * self.dtype.numpy.itemsize
        if not size:
            return
        try:
            with library(self.item.reading(self.box_bytes)) as process:
                for data in process.values(self.path, size):
                    yield np.frombuffer(data, self.dtype.numpy)
        except CheckpointError:
            self._require_unchanged()
            raise
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        # a step that was replaced by one of the same number has files of the same names
        with self.item.mark.open():
            pass


class Item(Struct, frozen=True):
    """A directory with a tree of arrays.

    `mark` is a file replaced with it, `stored` the bytes of its files. With `fills`, values that are not
    stored are read as the fill value.
    """

    directory: Path
    mark: FileRange
    stored: int
    fills: bool

    def reading(self, box_bytes: int) -> Reading:
        """Return the description of the process that reads boxes of at most `box_bytes` bytes.

        UnsafeArchive if there is too little memory for them. CheckpointError if tensorstore is not installed.
        """
        if find_spec("tensorstore") is None:
            raise CheckpointError(
                f"{self.directory} is an Orbax checkpoint, which tensorstore reads: it is not installed",
                hint=to_install("orbax"),
            )
        # few sizes, so that one process reads many arrays
        extra = 1 << max(0, 3 * box_bytes - 1).bit_length()
        available = available_bytes()
        if extra > _MEMORY_BYTES and available is not None and 3 * box_bytes > available:
            raise UnsafeArchive(
                f"{self.directory} has an array whose chunks side by side have {box_bytes} bytes",
                cause=f"unpacking them takes three times that, and {available} bytes of memory are available",
                hint="save it with smaller chunks: ocp.SaveArgs(chunk_byte_size=64 << 20)",
            )
        times = 1 + (extra >> 30)
        return Reading(
            self.mark,
            "exporter.checkpoint.orbax_process",
            "Orbax checkpoint",
            _MEMORY_BYTES + extra,
            _CPU_SECONDS * times,
            _SECONDS * times,
            {
                "directory": str(self.directory),
                "is_ocdbt": (self.directory / _STORE).is_file(),
                "fills": self.fills,
            },
        )


def is_orbax(path: Path) -> bool:
    """True for the finished directory of a step or of a tree; in a store, only once it is committed.

    OSError if the directory cannot be read.
    """
    if _UNFINISHED in path.name or not path.is_dir() or next(_items(path), None) is None:
        return False
    # in a store nothing is renamed: a step has its name before it is complete
    return not mirror.is_remote(path) or (path / _COMMITTED).is_file()


def step_of(path: Path) -> int | None:
    """Return the number at the end of a step's name: 10 for `10` and for `checkpoint_10`.

    None without one, or if it has 19 digits or more.
    """
    found = _NUMBER.search(path.name)
    return int(found[1]) if found and len(found[1]) < _MAX_DIGITS else None


def config_of(path: Path) -> str | None:
    """Return the model's config, in JSON, that Keras keeps beside its variables; None without one.

    None, too, for a model whose layers keep files: their vocabularies are not read. CorruptFile if the file
    is not a config, CheckpointError if it cannot be read.
    """
    file = path.joinpath(*_CONFIG)
    if not file.is_file() or (path / ASSETS_DIRECTORY).exists():
        return None
    try:
        content = read_regular(file, _MAX_TREE_BYTES)
        found: _Config = decode(content, _Config, file.name, written=lambda _: b"")
    except DocumentError as error:
        raise CorruptFile(f"{file} is damaged", cause=str(error)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}", cause=str(error)) from error
    return found.config


def _items(path: Path) -> Iterator[Path]:
    """Yield the directories of trees: `path` itself if it is one, else the items of a step, sorted.

    Nothing for other paths. OSError, during the iteration, if a directory cannot be listed.
    """
    if _is_tree(path):
        yield path
    elif (path / _STEP).is_file():
        yield from (item for item in sorted(path.iterdir()) if item.is_dir() and _is_tree(item))


def _is_tree(path: Path) -> bool:
    return (path / _STORE).is_file() or ((path / _TREE).is_file() and any(path.glob("*/.zarray")))


def read_orbax(path: Path) -> Catalog:
    """Read the catalog of a checkpoint's arrays, of all its items.

    With several items, names begin with the item's: `item/name`. Arrays whose type no variable has are left
    out; a note of the catalog names some of them.

    Raises:
        CheckpointNotFound: it does not exist, or is not finished.
        CheckpointChanged: a trainer removes it.
        CorruptFile, MissingShard, UnsafeArchive, UnsupportedFormat: see errors.py.
        CheckpointError: it may not be read, or tensorstore is not installed.
    """
    try:
        return _read(path)
    except FileNotFoundError as error:
        raise CheckpointChanged(f"{path} is being written or removed", cause=str(error)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}", cause=str(error)) from error


def _read(path: Path) -> Catalog:
    items = list(_items(path))
    if not items:
        raise CheckpointNotFound(f"{path} is not an Orbax checkpoint, or is not finished")
    stored = _stored_bytes(path)
    found: dict[str, TensorRef] = {}
    skipped: list[str] = []
    family = "Orbax"
    for item in items:
        tree = _tree(item)
        groups = {leaf.key_metadata[0].key for leaf in tree.tree_metadata.values() if leaf.key_metadata}
        is_keras = _TRAINABLE in groups and groups <= _GROUPS_OF_KERAS
        family = "Orbax, of Keras" if is_keras else family
        for ref in _tensors(item, tree, stored, skipped):
            group, _, name = ref.name.partition("/")
            if is_keras and group in (_TRAINABLE, f"non_{_TRAINABLE}"):
                ref = replace(ref, name=name, owner=name.partition("/")[0])
            elif len(items) > 1:
                ref = replace(ref, name=f"{item.name}/{ref.name}")
            if not ref.name or ref.name in found:
                which = "two arrays" if ref.name else "an array"
                raise CorruptFile(f"{path} holds {which} named {ref.name!r:.99}")
            found[ref.name] = ref
    if not found:
        raise CorruptFile(f"{path} holds no arrays of numbers")
    notes = (f"left out, because no variable has their type: {', '.join(skipped[:5])}",) if skipped else ()
    mark = _mark(path, items[0])
    catalog = Catalog(family, path, found, (mark.path,), (mark.size,), notes=notes)
    step = read_step(catalog, *_steps_of(found))
    return replace(catalog, step=step_of(path) if step is None else step)


def _steps_of(names: Mapping[str, object]) -> list[str]:
    """Return the names of tensors that may hold the step, the preferred first: `step`, then optimizers' own.

    `step`, as Flax calls it, is included whether or not it is among `names`; `iteration` of a Keras optimizer
    only if it is.
    """
    iterations = (
        name for name in names if name.startswith(f"{_OF_OPTIMIZER}/") and name.endswith("/iteration")
    )
    return ["step", *iterations]


def _mark(path: Path, item: Path) -> FileRange:
    """Return a file of the checkpoint at `path` with this `item` that each save writes anew.

    The first that exists: the step's metadata, the item's metadata, its store or its tree. CheckpointError
    and subclasses, as `FileRange.whole`, if it vanishes meanwhile.
    """
    names = (path / _STEP, item / _STEP, item / _STORE, item / _TREE)
    return FileRange.whole(next(name for name in names if name.is_file()))


def _stored_bytes(path: Path) -> int:
    """Return the total bytes of all files of a checkpoint; files in a store are fetched.

    UnsafeArchive for more than a million entries, or anything else than files and directories: a link leads
    elsewhere, a pipe would block. CheckpointError if an object cannot be fetched; OSErrors pass.
    """
    total = count = 0
    waiting = [path]
    while waiting:
        for entry in waiting.pop().iterdir():
            found = entry.lstat()
            count += 1
            if stat.S_ISDIR(found.st_mode):
                waiting.append(entry)
            elif not stat.S_ISREG(found.st_mode):
                raise UnsafeArchive(f"{entry} is neither a file nor a directory, as all of a checkpoint is")
            elif mirror.is_remote(entry):
                close_quietly(open_regular(entry))
            total += found.st_size
            if count > _MAX_OBJECTS:
                raise UnsafeArchive(f"{path} is refused: it has more than {_MAX_OBJECTS} files")
    return total


def _tree(item: Path) -> _Tree:
    """Return the metadata of an item; without keys before 0.5, when Orbax wrote no `_METADATA`.

    CorruptFile if that is damaged, CheckpointError if it cannot be read.
    """
    if not (item / _TREE).is_file():
        return _Tree({})
    try:
        content = read_regular(item / _TREE, _MAX_TREE_BYTES)
        tree: _Tree = decode(content, _Tree, _TREE, written=lambda _: b"")
    except DocumentError as error:
        raise CorruptFile(f"{item / _TREE} is damaged", cause=str(error)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {item / _TREE}", cause=str(error)) from error
    return tree


def _tensors(path: Path, tree: _Tree, stored: int, skipped: list[str]) -> Iterator[TensorRef]:
    """Yield the arrays of the item at `path`, named by their keys, after a check of their declared sizes.

    `stored` is the size of the whole checkpoint in bytes. Names of arrays whose type no variable has are
    added to `skipped`.

    Raises:
        UnsafeArchive: the arrays are far larger than what is stored.
        UnsupportedFormat: an array has too many dimensions.
        CheckpointError: it, or a subclass: the item cannot be listed.
    """
    keys = {".".join(part.key for part in leaf.key_metadata): leaf for leaf in tree.tree_metadata.values()}
    item = Item(path, _mark(path, path), stored, not tree.store_array_data_equal_to_fill_value)
    with library(item.reading(0)) as process:
        listed = process.contents({"objects": _MAX_OBJECTS})
    declared = 0
    for found in listed:
        param, shape = found["path"].rpartition("/")[0], tuple(found["shape"])
        parts = [part.key for part in keys[param].key_metadata] if param in keys else param.split(".")
        name = "/".join(parts)
        try:
            dtype = DType.of(found["dtype"])
        except KeyError:
            skipped.append(name)
            continue
        declared += math.prod(shape) * dtype.numpy.itemsize
        if declared > max(_RATIO_FLOOR_BYTES, _MAX_RATIO * stored):
            raise UnsafeArchive(
                f"{path} is refused: with {name!r:.99} its arrays have {declared} bytes, it stores {stored}"
            )
        if len(shape) > _MAX_RANK:
            raise UnsupportedFormat(f"{path}: {name!r:.99} has {len(shape)} dimensions")
        values = OrbaxValues(item, found["path"], dtype, shape, found["box_bytes"])
        yield TensorRef(name, dtype, shape, content=values)

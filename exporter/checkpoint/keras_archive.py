"""Read Keras' own files: `.keras`, `.weights.h5`, `.weights.json`, legacy `.h5`.

Keras 3 stores a layer's values under the layer's class and number, whatever its name:
`layers/dense_1/vars/0`. The name (`hidden`) is an attribute of the group `vars`; it becomes the tensor's
`owner`. A sharded file's `.weights.json` maps such groups to files beside it. A `.keras` archive is a zip
with `config.json` and `model.weights.h5`, which is read in place. (Source: keras/src/saving/saving_lib.py.)

The values of a layer of `exporter.tables`, `layers/trainable_embedding/vars/user-keys` for example, are named
after the table alone: an embedding variable, as in other checkpoints.

Legacy files, also those of Keras 2 and of TensorLayer, list the layers in `layer_names` and each layer's
tensors, by the variables' names, in `weight_names`; optimizer slots are in `optimizer_weights`. (Source:
keras/src/legacy/saving/legacy_h5_format.py; tensorlayer/files/utils.py.)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog, Naming, TensorRef
from exporter.checkpoint.embedding_variables import table_tensor
from exporter.checkpoint.file_range import FileRange, listed_shard
from exporter.checkpoint.hdf5 import MAGIC, Dataset, FileContents, read_hdf5
from exporter.checkpoint.tensor_values import read_step
from exporter.checkpoint.zip_members import Member, read_members
from exporter.errors import CheckpointError, CorruptFile, UnsafeArchive, UnsupportedFormat
from exporter.storage.files import below

_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
_ASSETS = "assets"
_MAX_JSON_BYTES = 256 << 20
_MAX_ASSET_BYTES = 1 << 30
_VARS = "vars"
# Tensors with an optimizer's step count: Keras 3, its legacy files, Keras 2. An optimizer may contain others;
# one that scales losses does not count itself.
_OPTIMIZER_STEP = re.compile(r"optimizer(/.+)?/vars/0|([^/]+/)*(iteration|iter)")

_LAYER_ATTRIBUTES = {"name": False}
_LEGACY_ATTRIBUTES = {
    "layer_names": True,
    "weight_names": True,
    "keras_version": False,
    "model_config": False,
}


class ModelConfig(Struct, frozen=True):
    """An archive's model: JSON text, and the version of Keras that wrote it ("" if unknown)."""

    text: str
    keras_version: str
    is_legacy: bool


def read_keras(path: Path) -> Catalog:
    """Read the catalog of a Keras file, in any of its formats.

    Raises:
        CheckpointNotFound: the file does not exist.
        CheckpointChanged: a file was replaced while it was read.
        MissingShard: a sharded file names a shard that does not exist.
        CheckpointError: a file cannot be read, or h5py is not installed.
        CorruptFile, TruncatedFile, UnsupportedFormat, UnsafeArchive: see errors.py.
    """
    if path.name.endswith(".weights.json"):
        return _sharded(path)
    if _is_zip_by_name(path):
        weights = _weights_member(path, read_members(path))
        return _catalog(path, "Keras archive", _layers(read_hdf5(weights, _LAYER_ATTRIBUTES)), [path])
    source = FileRange.whole(path)
    contents = read_hdf5(source, _LAYER_ATTRIBUTES | _LEGACY_ATTRIBUTES)
    if not any("layer_names" in attributes for attributes in contents.attributes.values()):
        return _catalog(path, "Keras weights", _layers(contents), [path])
    family = "Keras legacy h5" if _version(contents) else "h5 weights by layer"
    return _catalog(path, family, _by_names(path, contents), [path], Naming.NAMES)


def read_config(path: Path) -> ModelConfig | None:
    """Return the model that an archive describes, None for weights alone; nothing in it is executed.

    Raises:
        CorruptFile: the file is damaged, or a `.keras` zip has no `config.json`.
        CheckpointError: the file cannot be read, or is hostile (UnsafeArchive): see `read_keras`.
    """
    if _is_zip_by_name(path):
        members = read_members(path)
        if _CONFIG not in members:
            raise CorruptFile(f"{path} has no {_CONFIG}", cause=f"it holds {_listed(members)}")
        metadata = _json(path, members["metadata.json"]) if "metadata.json" in members else {}
        text = json.dumps(_json(path, members[_CONFIG]))
        return ModelConfig(text, str(metadata.get("keras_version", "")), is_legacy=False)
    if path.is_dir():
        from exporter.checkpoint.orbax import config_of

        config = config_of(path)
        return None if config is None else ModelConfig(config, "", is_legacy=False)
    if path.suffix not in (".h5", ".hdf5", ".keras"):
        return None
    contents = read_hdf5(FileRange.whole(path), _LEGACY_ATTRIBUTES)
    text = next(iter(contents.attributes.get("", {}).get("model_config", ())), "")
    return ModelConfig(text, _version(contents), is_legacy=True) if text else None


def list_assets(path: Path) -> list[Member]:
    """Return the files that layers of a `.keras` archive keep beside their weights, sorted by name.

    Empty for other files.

    Raises:
        CheckpointError: it, or a subclass: the archive is damaged or hostile, or cannot be read.
    """
    if not _is_zip_by_name(path):
        return []
    return [member for name, member in sorted(read_members(path).items()) if name.startswith(f"{_ASSETS}/")]


def unpack_assets(path: Path, directory: Path) -> bool:
    """Write the files that layers of a `.keras` archive keep beside their weights into `directory`.

    Files of the same names are overwritten. Return False if there are none, and nothing was written.

    Raises:
        UnsafeArchive: a name leads out of `directory`, or a file has more than 1 GiB.
        CheckpointError: it, or a subclass: the archive is damaged or hostile, or cannot be read.
        OSError: a file cannot be written. In each case files may have been written before.
    """
    assets = list_assets(path)
    for member in assets:
        name = member.name.removeprefix(f"{_ASSETS}/")
        target = below(directory, name, f"{path}: the asset", UnsafeArchive, writes=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(member.read(_MAX_ASSET_BYTES))
    return bool(assets)


def _is_zip_by_name(path: Path) -> bool:
    """True for a file called `.keras`, unless it begins like HDF5.

    Until 2.12 Keras wrote HDF5 under any name. CheckpointError if the file cannot be read.
    """
    if path.suffix != ".keras":
        return False
    whole = FileRange.whole(path)
    return whole.part(0, min(len(MAGIC), whole.size)).read() != MAGIC


def _weights_member(path: Path, members: Mapping[str, Member]) -> FileRange:
    weights = members.get(_WEIGHTS)
    if weights is None:
        raise CorruptFile(f"{path} has no {_WEIGHTS}", cause=f"it holds {_listed(members)}")
    if weights.is_deflated:
        raise UnsupportedFormat(
            f"{path}: {_WEIGHTS} is compressed, so that no tensor in it can be found without unpacking it",
            hint="store it as Keras does: unzip the archive, then zip -0 -r it again",
        )
    return weights.stored


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:5]) or "nothing"


def _json(path: Path, member: Member) -> Any:
    try:
        found = json.loads(member.read(_MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: {member.name} is not JSON", cause=str(error)) from None
    if not isinstance(found, dict):
        raise CorruptFile(f"{path}: {member.name} is not a JSON object")
    return found


def _layers(*files: FileContents) -> Iterator[TensorRef]:
    """Yield the tensors of files of weights, one file after the other, named by their paths in the files.

    A tensor's owner is the names of the layers around it, found in any of the files; "" if Keras wrote none.
    """
    names = {
        path: "".join(texts["name"])
        for contents in files
        for path, texts in contents.attributes.items()
        if "name" in texts
    }
    for contents in files:
        for dataset in contents.datasets:
            yield replace(_tensor(dataset), owner=_owner(dataset.path, names))


def _owner(path: str, names: Mapping[str, str]) -> str:
    """Return the names, joined by `/`, of the objects on a tensor's path, except the model's own.

    `names` has the name of each object by the path of its group `vars`. "" if Keras wrote none.
    """
    group, _, _ = path.rpartition("/")
    # groups that Keras divided between shards have no name
    if not group.endswith(f"/{_VARS}") or group not in names:
        return ""
    parts = group.removesuffix(f"/{_VARS}").split("/")
    scopes = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return "/".join(names[key] for scope in scopes if (key := f"{scope}/{_VARS}") in names)


def _sharded(path: Path) -> Catalog:
    """Read the catalog of a `.weights.json` and of the shards that it names, each a file beside it.

    CheckpointNotFound if the list does not exist, CorruptFile if it is not such a list, UnsafeArchive if it
    is too large or a name is not of a file beside it, MissingShard if a shard does not exist; else the
    CheckpointErrors of `read_hdf5`.
    """
    source = FileRange.whole(path)
    if source.size > _MAX_JSON_BYTES:
        raise UnsafeArchive(f"{path} has {source.size} bytes, expected {_MAX_JSON_BYTES} at most")
    try:
        groups = json.loads(source.read())["weight_map"]
        named = {group: [files] if isinstance(files, str) else list(files) for group, files in groups.items()}
        files = dict.fromkeys(name for names in named.values() for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path} is not a list of Keras shards", cause=str(error)) from None
    shards = [listed_shard(path, name) for name in files]
    contents = [read_hdf5(FileRange.whole(shard), _LAYER_ATTRIBUTES) for shard in shards]
    # Keras writes the groups of a `weight_map` with a slash before them.
    tensors = (ref for ref in _layers(*contents) if f"/{ref.name.rpartition('/')[0]}" in named)
    return _catalog(path, "Keras weights, sharded", tensors, shards)


def _by_names(path: Path, contents: FileContents) -> Iterator[TensorRef]:
    """Yield tensors under the variables' names; if two have one name, each begins with its layer's name.

    CorruptFile if the file lists a name that it does not contain.
    """
    datasets = {dataset.path: dataset for dataset in contents.datasets}
    found: list[tuple[str, Dataset]] = []
    owners: dict[str, str] = {}
    for group, texts in contents.attributes.items():
        for name in texts.get("weight_names", ()):
            place = f"{group}/{name}" if group else name
            if place not in datasets:
                raise CorruptFile(f"{path} lists {place!r}, which is not in it")
            found.append((name.partition(":")[0], datasets[place]))
            if "optimizer_weights" not in group:
                owners[place] = group.rpartition("/")[2]
    counts = Counter(name for name, _ in found)
    for name, dataset in found:
        unique = name if counts[name] == 1 else dataset.path.partition(":")[0]
        yield replace(_tensor(dataset), name=unique, owner=owners.get(dataset.path, ""))


def _version(contents: FileContents) -> str:
    texts = (text for texts in contents.attributes.values() for text in texts.get("keras_version", ()))
    return next(texts, "")


def _tensor(dataset: Dataset) -> TensorRef:
    return TensorRef(dataset.path, dataset.dtype, dataset.shape, content=dataset.content)


def _catalog(
    path: Path, family: str, tensors: Iterator[TensorRef], files: list[Path], naming: Naming = Naming.LAYERS
) -> Catalog:
    found = {}
    for ref in tensors:
        if (table := table_tensor(ref.name.rpartition(f"/{_VARS}/")[2])) is not None:
            ref = replace(ref, name=table)
        if ref.name in found:
            raise CorruptFile(f"{path} holds two tensors named {ref.name!r}")
        found[ref.name] = ref
    if not found and read_config(path) is None:
        raise CorruptFile(f"{path} holds no weights, and no model that could do without")
    sizes = tuple(FileRange.whole(file).size for file in files)
    notes = tuple(_backup_notes(path))
    catalog = Catalog(family, path, found, tuple(files), sizes, notes=notes, naming=naming)
    counts = (name for name, ref in found.items() if ref.dtype.is_integer and _OPTIMIZER_STEP.fullmatch(name))
    steps = [step for name in counts if (step := read_step(catalog, name)) is not None]
    return replace(catalog, step=max(steps, default=catalog.step))


def _backup_notes(path: Path) -> Iterator[str]:
    """Yield a note with the epoch at which a backup of `BackupAndRestore` would continue, if `path` is one.

    The epoch is in a file beside it; if that is damaged, the note says so.
    """
    metadata = path.with_name("training_metadata.json")
    if path.name != "latest.weights.h5" or not metadata.is_file():
        return
    try:
        source = FileRange.whole(metadata)
        epoch = int(json.loads(source.part(0, min(source.size, 4096)).read())["epoch"])
    except (CheckpointError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        yield f"{metadata} cannot be read; the weights beside it are what counts"
        return
    yield f"a backup of training that would go on with epoch {epoch} (counted from 0)"

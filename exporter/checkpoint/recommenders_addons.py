"""Find the tables of TensorFlow Recommenders-Addons (TFRA) in a checkpoint.

0.6.0 and 0.8.1 write them alike. A `tfra.dynamic_embedding.Variable` called `<name>` is n hash tables; a key
is in table `key % n` unless the trainer says otherwise. Each is two tensors of exactly the keys that it
holds, `<stem>-keys` (int64 or int32 [N]) and `<stem>-values` ([N, dim]). In a graph a stem consists of the
scopes in which the variable was made, the last part of its name, and its whole name with underscores for
slashes:

    user/emb/user_emb_mht_1of3          the first of three shards of `user/emb`
    m/user_emb_Adam_m_mht_1of3          of its optimizer's slot `user/emb/Adam/m`; another's scope is `m_1`

In an object-based checkpoint the edge `tables_of_<name>` leads from the variable's node to a list, whose
children 0..n-1 are the shards, each with an attribute `table`, of which only the checkpoint key is useful. A
Keras layer called `user` has the variable `user-parameter`.

Tables of integers, which restrict policies keep beside them (`status/timestamp/...`), are not embeddings.

Source: tensorflow/recommenders-addons, dynamic_embedding/python/ops: dynamic_embedding_variable.py
(Variable.__init__, _make_name), cuckoo_hashtable_ops.py (_Saveable), dynamic_embedding_optimizer.py
(create_slots), tf_save_restore_patch.py; files of both versions are in tests/fixtures/tfra.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from exporter.catalog import Catalog
from exporter.checkpoint.object_graph import ObjectGraph, read_object_graph
from exporter.errors import CorruptFile, UnsupportedFormat
from exporter.wire.dtypes import DType

_SHARD = re.compile(r"((?:.+/)?([^/]+))_mht_([0-9]{1,6})of([0-9]{1,6})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,6}")
_NUMBERED = re.compile(r"_[0-9]+$")
# Names of slots, by optimizers of TensorFlow and of both Keras.
_SLOTS = re.compile(r"m|v|u|vhat|rms|mg|momentum|velocity(_hat)?|average_gradient|accum\w*|linear")

_KEYS, _VALUES = "-keys", "-values"
_LIST, _LAYER = "tables_of_", "-parameter"
KEY_DTYPES = (DType.INT64, DType.INT32)
VALUE_DTYPES = (DType.FLOAT, DType.DOUBLE, DType.HALF, DType.BFLOAT16)
# The end of the tensor that a FileSystemSaver stores instead of a shard's keys and values.
_ROWS_IN_FILES = "-shard_upsert_restore"


class AddonsTable(Struct, frozen=True):
    """A table: its name and path, the stems of its tensors by shard (from 0), and the count of shards.

    `also` are further names. `slot_of` is the name of its owner if it is an optimizer's slot, else None.
    """

    name: str
    path: str
    stems: Mapping[int, str]
    count: int
    also: tuple[str, ...] = ()
    slot_of: str | None = None

    @property
    def flat(self) -> str:
        """The table's name with underscores for slashes."""
        return self.name.replace("/", "_")


def addons_tables(catalog: Catalog) -> list[AddonsTable]:
    """Return TFRA's tables that map integers to rows of numbers: from the object graph, then by tensor names.

    Tables of one name are named by their paths; an optimizer's slot is named below its owner.

    Raises:
        CorruptFile: shards disagree about their number, or the object graph is damaged.
        UnsupportedFormat: rows are in files beside the checkpoint.
        CheckpointChanged: the object graph's shard vanished or shrank since the catalog was read.
        CheckpointError: the object graph cannot be read.
    """
    found = [*_by_objects(catalog), *_by_names(catalog)]
    twice = Counter(table.name for table in found)
    found = [replace(table, name=table.path) if twice[table.name] > 1 else table for table in found]
    return [_with_owner(table, found) for table in found]


def _by_names(catalog: Catalog) -> Iterator[AddonsTable]:
    shards: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for tensor in catalog.tensors:
        match = _SHARD.fullmatch(_stem(tensor)) if "_mht_" in tensor else None
        if match is None:
            continue
        _check_is_here(catalog, tensor)
        number, count = int(match[3]) - 1, int(match[4])
        if not 0 <= number < count or counts.setdefault(match[1], count) != count:
            expected = f", and another is of {counts[match[1]]}" if match[1] in counts else ""
            raise CorruptFile(f"{catalog.prefix}: {match[0]!r} is shard {number + 1} of {count}{expected}")
        if _is_embedding(catalog, match[0]):
            shards.setdefault(match[1], {})[number] = match[0]
    for path, stems in shards.items():
        name = _name_in_graph(path)
        yield AddonsTable(name, path, stems, counts[path], (path, name.replace("/", "_")))


def _by_objects(catalog: Catalog) -> Iterator[AddonsTable]:
    if not any(_LIST in tensor for tensor in catalog.tensors) or not (objects := read_object_graph(catalog)):
        return
    for item in objects.objects:
        for edge, number in item.children.items():
            if edge.startswith(_LIST):
                yield from _listed(catalog, objects, edge.removeprefix(_LIST), number)


def _listed(catalog: Catalog, objects: ObjectGraph, name: str, number: int) -> Iterator[AddonsTable]:
    """Yield the table `name`, whose shards are the children of object `number`.

    Nothing if its values are integers.

    Raises:
        UnsupportedFormat: its rows are in files beside the checkpoint.
    """
    edges = objects.objects[number].children
    stems = {int(edge): objects.objects[edges[edge]].table for edge in edges if _NUMBER.fullmatch(edge)}
    for stem in stems.values():
        _check_is_here(catalog, stem + _ROWS_IN_FILES)
    own = {place: stem for place, stem in stems.items() if _is_embedding(catalog, stem)}
    if own:
        path = min(own.values()).partition(f"/{_LIST}")[0]
        also = (path, name.removesuffix(_LAYER)) if name.endswith(_LAYER) else (path,)
        yield AddonsTable(name, path, own, len(stems), also)


def _stem(tensor: str) -> str:
    for suffix in (_KEYS, _ROWS_IN_FILES):
        if tensor.endswith(suffix):
            return tensor.removesuffix(suffix)
    return ""


def _is_embedding(catalog: Catalog, stem: str) -> bool:
    keys, values = catalog.tensors.get(stem + _KEYS), catalog.tensors.get(stem + _VALUES)
    if keys is None or values is None or len(values.shape) != 2:
        return False
    return keys.dtype in KEY_DTYPES and values.dtype in VALUE_DTYPES


def _check_is_here(catalog: Catalog, tensor: str) -> None:
    if tensor.endswith(_ROWS_IN_FILES) and tensor in catalog.tensors:
        raise UnsupportedFormat(
            f"{catalog.prefix} lacks the rows of {tensor.removesuffix(_ROWS_IN_FILES)!r}",
            cause="TFRA's FileSystemSaver wrote them to files of its own, TFRADynamicEmbedding*/*-keys and "
            "*-values, which the next save may overwrite",
            hint="in the trainer make the variable without saver=FileSystemSaver(), read the rows with "
            "variable.load_from_file_system(DIRECTORY), and save again",
        )


def table_in_graph(node: str) -> str:
    """Return the name of TFRA's variable that has the graph node `node` as a shard; "" for other nodes."""
    match = _SHARD.fullmatch(node)
    return "" if match is None else _name_in_graph(match[1])


def _name_in_graph(path: str) -> str:
    """Return a variable's name from its node's path: scopes, then the name with underscores for slashes.

    Underscores become slashes again where the name repeats the scopes.
    """
    *scopes, flat = path.split("/")
    name = flat
    # Scopes that the name repeats belong to the name; numbers behind them distinguish equal scopes.
    for first in range(len(scopes)):
        for parts in (scopes[first:], [_NUMBERED.sub("", part) for part in scopes[first:]]):
            end = "_".join(parts)
            if flat == end or flat.endswith(f"_{end}"):
                before = flat.removesuffix(end).removesuffix("_")
                return "/".join([before, *parts] if before else parts)
    return name


def _with_owner(table: AddonsTable, tables: Iterable[AddonsTable]) -> AddonsTable:
    """Return the table named as an optimizer slot below its owner's name, with `slot_of` set.

    It is returned unchanged if its last part is not a slot's name, or no other table in `tables` is the
    owner.
    """
    head, _, slot = table.name.rpartition("/")
    if not _SLOTS.fullmatch(slot):
        return table
    flat = head.replace("/", "_") + "_"
    owners = (other for other in tables if other is not table and flat.startswith(f"{other.flat}_"))
    owner = max(owners, key=lambda other: len(other.flat), default=None)
    if owner is None:
        return table
    rest = head[len(owner.flat) + 1 :]
    name = "/".join(part for part in (owner.name, rest, slot) if part)
    return replace(table, name=name, slot_of=owner.name)

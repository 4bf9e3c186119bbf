"""Read the object graph of a TensorFlow 2 checkpoint: which object holds which variable, under which name.

An object-based checkpoint has one string tensor `_CHECKPOINTABLE_OBJECT_GRAPH`, a `TrackableObjectGraph`:
nodes with named edges, node 0 the root, and for each saved value the program's own name and its tensor's. A
tensor's name is one of many paths to its object, the first that TensorFlow found; so names differ between a
training job and a served model, while the edges agree. Source:
tensorflow/core/protobuf/trackable_object_graph.proto, tensorflow/python/checkpoint/graph_view.py.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property

from google.protobuf.message import DecodeError
from msgspec import Struct

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import OBJECT_GRAPH
from exporter.checkpoint.tensor_values import read_array
from exporter.errors import CorruptFile
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto

VARIABLE_VALUE = "VARIABLE_VALUE"
# The end of a table's name in a checkpoint, behind the path of its object; `-keys` and `-values` follow.
TABLE_SUFFIX = "/.ATTRIBUTES/table"
# The end of a variable's tensor name, behind the path of its object.
SUFFIX = f"/.ATTRIBUTES/{VARIABLE_VALUE}"

ROOT = 0

_ESCAPE = re.compile(r"\.[.S]")
_OPTIMIZER_EDGES = frozenset({"_iterations", "iter", "_index_dict", "_trainable_variables_indices"})


class TrackedVariable(Struct, frozen=True):
    """A variable's name in the program, and its tensor in a checkpoint or its node in a served graph."""

    name: str
    tensor: str


class TrackedObject(Struct, frozen=True):
    """An object: its edges by name, its variable or None, its slots' numbers, its hash table's name or "".

    In a served graph, `table` is the table's node.
    """

    children: Mapping[str, int]
    variable: TrackedVariable | None = None
    slots: tuple[int, ...] = ()
    table: str = ""
    slot_names: tuple[tuple[str, int], ...] = ()  # of each slot: its name, and the number of its variable


# `dict`: `cached_property` needs a `__dict__`.
class ObjectGraph(Struct, frozen=True, dict=True):
    """All objects; number 0 is the root."""

    objects: tuple[TrackedObject, ...]

    def at(self, path: str, start: int = ROOT) -> int | None:
        """Return the number of the object at a path such as `model/layers/0` below object number `start`.

        The paths "" and "." are `start` itself; a dot in a name is written `..`, a slash `.S`, as in tensor
        names. None if there is no such object.
        """
        found = start
        for name in path.split("/") if path not in ("", ".") else ():
            # as in tensors' names: `/` is written `.S`, and `.` is written `..`
            edge = _ESCAPE.sub(lambda escape: "/" if escape.group() == ".S" else ".", name)
            following = self.objects[found].children.get(edge)
            if following is None:
                return None
            found = following
        return found

    @cached_property
    def optimizers(self) -> frozenset[int]:
        """The numbers of the objects that are optimizers, of Keras 2 or 3."""
        return frozenset(
            number
            for number, item in enumerate(self.objects)
            if item.slots or _OPTIMIZER_EDGES & item.children.keys()
        )

    @cached_property
    def paths(self) -> Mapping[int, str]:
        """A shortest path from the root to each object that can be reached, by number; the root's is ""."""
        return self.paths_from(ROOT)

    def leading_to(self, targets: Iterable[int]) -> frozenset[int]:
        """Return the numbers of `targets` and of all objects from which one of them can be reached."""
        parents: dict[int, list[int]] = {}
        for number, item in enumerate(self.objects):
            for child in item.children.values():
                parents.setdefault(child, []).append(number)
        found = {*targets}
        pending = [*found]
        while pending:
            for parent in parents.get(pending.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    pending.append(parent)
        return frozenset(found)

    def paths_from(self, start: int) -> dict[int, str]:
        """Return a shortest path to each object that can be reached from object number `start`, by number.

        The path of `start` is "".
        """
        found, pending = {start: ""}, deque([start])
        while pending:
            number = pending.popleft()
            for name, child in self.objects[number].children.items():
                if child not in found:
                    escaped = name.replace(".", "..").replace("/", ".S")
                    found[child] = f"{found[number]}/{escaped}".lstrip("/")
                    pending.append(child)
        return found


def read_object_graph(catalog: Catalog) -> ObjectGraph | None:
    """Read the object graph of a checkpoint; None for a checkpoint by names.

    Raises:
        CorruptFile: it cannot be decoded, its checksum is wrong, or an edge leads nowhere.
        CheckpointChanged: the shard vanished or shrank since the catalog was read.
        CheckpointError: the shard cannot be read.
    """
    ref = catalog.tensors.get(OBJECT_GRAPH)
    if ref is None:
        return None
    where = f"{catalog.prefix}: {OBJECT_GRAPH}"
    if ref.dtype is not DType.STRING or ref.shape != ():
        raise CorruptFile(f"{where} is {ref.dtype.label}{list(ref.shape)}, expected one string")
    return parse_object_graph(read_array(catalog, ref).item(), where)


def parse_object_graph(data: bytes, where: str) -> ObjectGraph:
    """Decode a serialised `TrackableObjectGraph`, which is called `where` in errors.

    CorruptFile if it cannot be decoded, has no object, or an edge leads nowhere.
    """
    try:
        message = protos.TrackableObjectGraph.FromString(data)
    except DecodeError as error:
        raise CorruptFile(f"{where} is not an object graph", cause=str(error)) from None
    count = len(message.nodes)
    if not count:
        raise CorruptFile(f"{where} holds no object")
    objects = tuple(map(_object, message.nodes))
    for number, node in enumerate(objects):
        for child in (*node.children.values(), *node.slots, *(of for _, of in node.slot_names)):
            if not 0 <= child < count:
                raise CorruptFile(f"{where} is damaged: object {number} leads to {child} of {count}")
    return ObjectGraph(objects)


def _object(node: Proto) -> TrackedObject:
    variable, table = None, ""
    for attribute in node.attributes:
        if attribute.name == VARIABLE_VALUE:
            variable = TrackedVariable(attribute.full_name, attribute.checkpoint_key)
        elif attribute.name == "table":  # lookup_ops.MutableHashTable, and those made like it
            table = attribute.checkpoint_key
    return TrackedObject(
        {child.local_name: child.node_id for child in node.children},
        variable,
        tuple(slot.slot_variable_node_id for slot in node.slot_variables),
        table,
        tuple((slot.slot_name, slot.original_variable_node_id) for slot in node.slot_variables),
    )

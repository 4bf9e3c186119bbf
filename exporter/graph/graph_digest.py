"""Digest an inference graph and its files. Graphs that compute the same from the same variables are equal.

Two runs of one builder, or two `.meta` files of one program, differ in details that do not count: the order
of nodes and functions, names of functions (which are numbered), hints and names of shared resources,
debugging information, the version of TensorFlow. Names of nodes count, because another name may be another
variable. The sizes of dynamic tables, which the checkpoint gives, do not count.

*Files* (`FileDigests`). A vocabulary may be large, and a delta is made every few seconds, so an unchanged
file is not read again. It is recognised by device, inode, size and the times of its last modification and
change, as in Git's index, and with the same care: a file that was changed just before it was read may change
again within one tick of the clock, so it is read once more.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.nodes import called
from exporter.newer_python import sha256_of
from exporter.storage.files import SETTLED_NS, kept_identity, open_regular
from exporter.tables.lookup import SIZE
from exporter.wire.protos import Proto


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        return sha256_of(file)


class FileDigests(Struct):
    """Digests by path, each with its file's identity; `is_new` is true once there is one worth keeping."""

    known: dict[str, tuple[list[int], str]] = field(default_factory=dict)
    is_new: bool = False

    def __call__(self, path: Path, of: Callable[[Path], str] = file_digest) -> str:
        """The digest of a file, taken by `of`, which must always be the same for one path.

        Raises:
            OSError: it cannot be read, or is not a regular file.
        """
        name, looks = str(path.absolute()), kept_identity(path)
        was, digest = self.known.get(name, ([], ""))
        if was == looks:
            return digest
        digest = of(path)
        if time.time_ns() - max(looks[-2:]) > SETTLED_NS and kept_identity(path) == looks:
            self.known[name] = (looks, digest)
            self.is_new = True
        return digest

    def to_json(self) -> dict[str, Any]:
        """The digests as a JSON object."""
        return {name: [*looks, digest] for name, (looks, digest) in self.known.items()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FileDigests:
        """The digests that `to_json` gave; entries of another form are left out."""
        entries = {name: entry for name, entry in document.items() if isinstance(entry, list) and entry}
        return cls({name: (looks, str(digest)) for name, (*looks, digest) in entries.items()})


_MEANINGLESS = ("shared_name", "container", "config_proto", "executor_type")


def graph_digest(graph: InferenceGraph) -> str:
    """The digest of a graph, without the files that its tables read."""
    graph_def = graph.meta_graph.graph_def
    functions = {function.signature.name: function for function in graph_def.library.function}
    names = _FunctionNames(functions)
    total = hashlib.sha256()
    sized = {node for table in graph.dynamic_tables for node in table.nodes}
    sized |= {node.name for node in graph_def.node if SIZE in node.attr}
    for node in sorted(graph_def.node, key=lambda node: str(node.name)):
        total.update(_node(_without_size(node) if node.name in sized else node, names))
    for table in sorted(graph.dynamic_tables, key=lambda table: table.name):
        total.update(f"{table.name}\0{table.defaults.shape}\0".encode() + table.defaults.tobytes())
    for name, signature in sorted(graph.meta_graph.signature_def.items()):
        total.update(name.encode() + b"\0" + signature.SerializeToString(deterministic=True))
    total.update((graph.init_op or "").encode())
    return total.hexdigest()


def _without_size(node: Proto) -> Proto:
    copy = deepcopy(node)
    for size in ("shape", "value"):
        copy.attr.pop(size, None)
    return copy


class _FunctionNames:
    """Names of functions that depend on their bodies alone: digests."""

    def __init__(self, functions: Mapping[str, Proto]) -> None:
        self._functions, self._known = functions, dict[str, str]()

    def __call__(self, name: str) -> str:
        if name not in self._functions:
            return name
        if name not in self._known:
            self._known[name] = name  # a function that calls itself
            self._known[name] = self._digest(self._functions[name])
        return self._known[name]

    def _digest(self, function: Proto) -> str:
        copy = deepcopy(function)
        nodes = sorted(copy.node_def, key=lambda node: str(node.name))
        body = [_node(node, self) for node in nodes]
        for part in ("node_def", "attr", "arg_attr", "resource_arg_unique_id"):
            copy.ClearField(part)
        copy.signature.ClearField("name")
        own = [copy.SerializeToString(deterministic=True), *body]
        return hashlib.sha256(b"\0".join(own)).hexdigest()


def _node(node: Proto, names: _FunctionNames) -> bytes:
    copy = deepcopy(node)
    copy.ClearField("experimental_debug_info")
    copy.op = names(copy.op)
    for name in [*copy.attr]:
        if name.startswith("_") or name in _MEANINGLESS:
            del copy.attr[name]
    for function in called(copy):
        function.name = names(function.name)
    return bytes(copy.SerializeToString(deterministic=True))

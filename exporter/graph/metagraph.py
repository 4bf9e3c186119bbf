"""Read a `.meta` file: a MetaGraphDef, binary or (`.pbtxt`) as text.

Dynamic tables that a graph's own nodes tell of: those that authors made with `exporter.tables`.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from exporter.checkpoint.trainers import AUTODIST_SCOPE
from exporter.errors import CorruptFile, GraphError, NotServable, UsageError
from exporter.files import read_regular
from exporter.graph.addons_ops import check_addons
from exporter.graph.deeprec_conversion import convert_deeprec
from exporter.graph.feeds import parse_feeds
from exporter.graph.inference_graph import GraphDynamicTable
from exporter.graph.keys import variable_keys
from exporter.graph.likely_ends import input_placeholders, likely_outputs
from exporter.graph.nodes import GraphIndex
from exporter.graph.signatures import (
    SignatureSpec,
    check_signatures,
    collection_spec,
    drop_internal,
    parse_examples,
    requested_specs,
    set_signatures,
)
from exporter.graph.source_graph import GraphRequest, SourceGraph
from exporter.graph.tables import add_init_op, table_keys
from exporter.local_paths import quoted
from exporter.tables.geometry import PARTS
from exporter.tables.lookup import DEFAULTS, PART, TABLE
from exporter.wire import protos
from exporter.wire.dtypes import DType
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import to_array


def marked_tables(graph_def: Proto) -> tuple[GraphDynamicTable, ...]:
    """The tables by the attributes of their variables' nodes.

    Raises:
        GraphError: a variable of one is missing.
    """
    found: dict[str, dict[str, Proto]] = {}
    for node in graph_def.node:
        if PART in node.attr and node.op == "VarHandleOp":
            found.setdefault(node.attr[TABLE].s.decode(), {})[node.attr[PART].s.decode()] = node
    return tuple(_table(name, nodes) for name, nodes in found.items())


def _table(name: str, nodes: dict[str, Proto]) -> GraphDynamicTable:
    if set(nodes) != set(PARTS) or DEFAULTS not in nodes[PARTS[-1]].attr:
        raise GraphError(
            f"dynamic table {name!r} has the variables {', '.join(sorted(nodes))}",
            cause=f"expected {', '.join(PARTS)}",
        )
    values = nodes[PARTS[-1]]
    defaults = to_array(values.attr[DEFAULTS].tensor)
    index_seeds, index_rows, keys, _ = (nodes[part].name for part in PARTS)
    return GraphDynamicTable(
        name,
        (index_seeds, index_rows, keys, values.name),
        DType.INT64,
        DType(values.attr["dtype"].type),
        int(defaults.shape[1]),
        defaults,
    )


MAX_GRAPH_BYTES = (1 << 31) - 1
"""No reader of protocol buffers takes a larger message."""

_VERSION = re.compile(r"(?P<release>\d+(\.\d+)*)(-?(a|b|rc|dev|alpha|beta)\.?\d*)?(\+[\w.]+)?", re.ASCII)
_SHOWN = 6


def load_metagraph(path: Path, request: GraphRequest) -> SourceGraph:
    """The graph of a `.meta` file with the signatures asked for, else those in it.

    Raises:
        CorruptFile: the file holds no MetaGraphDef.
        UsageError: there is no such file, or nothing says what to serve.
        UnknownTensor: a signature names a tensor that is not there.
        NotServable: the graph is one that AutoDist made.
    """
    meta_graph = read_metagraph(path)
    if is_autodist(meta_graph):
        raise NotServable(
            f"{path} holds the graph that AutoDist made of the program's, once for each replica",
            cause=f"its names begin with {AUTODIST_SCOPE}0/; the checkpoint has the program's own names",
            hint="name the program's graph: --model with a builder, or AutoDist's SavedModel",
        )
    return with_signatures(meta_graph, request, label=str(path), directory=path.parent)


def is_autodist(meta_graph: Proto) -> bool:
    """True for a graph that AutoDist has transformed; such a graph fits no checkpoint."""
    return any(node.name.startswith(AUTODIST_SCOPE) for node in meta_graph.graph_def.node)


def read_metagraph(path: Path) -> Proto:
    """The `protos.MetaGraphDef` in a file.

    Raises:
        CorruptFile: it is truncated, or something else.
        UsageError: it cannot be opened.
    """
    try:
        data = read_graph_file(path)
    except OSError as error:
        raise UsageError(f"the graph {path} cannot be read", cause=error.strerror or str(error)) from error
    return parse_message("MetaGraphDef", data, path, is_text=path.suffix == ".pbtxt", nonempty="graph_def")


def read_graph_file(path: Path) -> bytes:
    """The bytes of a graph's file.

    Raises:
        CorruptFile: it has more than a protocol buffer may have; nothing of it was read.
        OSError: it cannot be read.
    """
    try:
        return read_regular(path, MAX_GRAPH_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise CorruptFile(
            f"{path} holds no graph: it has more than 2 GiB", cause="no protocol buffer is larger"
        ) from None


def readable_version(text: str) -> str:
    """A TensorFlow's version as `tf.saved_model.load` parses it (PEP 440): without what forks put behind it.

    Of `1.15.5-deeprec2402` that is `1.15.5`, of `0.12.head` `0.12`; "" if nothing is left.
    """
    found = _VERSION.match(text)
    return "" if found is None else found[0] if found.end() == len(text) else found["release"]


def parse_message(kind: str, data: bytes, path: Path, *, is_text: bool, nonempty: str) -> Proto:
    """A protocol buffer of the private pool from a file's bytes; the field `nonempty` must be there.

    Raises:
        CorruptFile: the bytes are not such a message.
    """
    message = protos.message_class(kind)()
    try:
        if is_text:
            text_format.Parse(data, message)
        else:
            message.ParseFromString(data)
    except (DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{path} holds no {kind}", cause=str(error)) from error
    if not _has(message, nonempty):
        raise CorruptFile(f"{path} holds no {kind}", cause=f"it has no {nonempty}, or is cut off")
    return message


def _has(message: Proto, field: str) -> bool:
    return any(descriptor.name == field for descriptor, _ in message.ListFields())


def with_signatures(meta_graph: Proto, request: GraphRequest, *, label: str, directory: Path) -> SourceGraph:
    """A source graph whose signatures are, in this order: the request's, the collections', its own.

    Raises:
        UsageError: there are none of these.
        UnknownTensor: one names a tensor that is not there.
        NotServable: outputs need an embedding variable of a kind that cannot be served, or operations of
            TFRA.
    """
    index = GraphIndex.of(meta_graph)
    drop_internal(meta_graph)
    specs = requested_specs(request) or _own_specs(meta_graph)
    if specs:
        specs = parse_examples(meta_graph, index, specs)
        index = GraphIndex.of(meta_graph)
        set_signatures(meta_graph, index, specs)
    elif meta_graph.signature_def:
        check_signatures(meta_graph, index)
    if not request.trust.foreign_ops:
        check_addons(meta_graph, index, label)
    if not meta_graph.signature_def:
        raise _nothing_to_serve(index, label)
    converted = convert_deeprec(meta_graph, request.absent_keys)
    if converted.tables:
        index = GraphIndex.of(meta_graph)
    return SourceGraph(
        label=label,
        meta_graph=meta_graph,
        keys=variable_keys(meta_graph, index),
        feeds=parse_feeds(index, request.feeds),
        init_op=add_init_op(meta_graph, index),
        directory=directory,
        tables=table_keys(meta_graph, index),
        notes=converted.notes,
        dynamic_tables=(*converted.tables, *marked_tables(meta_graph.graph_def)),
        trust=request.trust,
    )


def _own_specs(meta_graph: Proto) -> list[SignatureSpec]:
    spec = collection_spec(meta_graph)
    return [spec] if spec is not None else []


def _nothing_to_serve(index: GraphIndex, label: str) -> UsageError:
    """Name what looks like an input and what looks like an output."""
    placeholders = [node.name for node in input_placeholders(index)]
    scores = [tensor.as_input for tensor in likely_outputs(index)]
    return UsageError(
        f"nothing says what to serve: {label} has no signatures",
        cause=f"its placeholders are {_listed(placeholders)}; likely outputs are {_listed(scores)}",
        hint="--input NAME=TENSOR --output NAME=TENSOR; "
        f"all names: export-model inspect {quoted(label)} --tensors",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "") if names else "none"

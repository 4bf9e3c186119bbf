"""Read files of graphs: protocol buffers, and whole SavedModels.

A trainer's Saver writes the nodes that `IncrementHook` adds into the `.meta`, with the whole graph. They read
every variable and have placeholders of their own, so that they look like lookups and inputs of the model,
which they are not: `without_recording` finds them by their scopes, and leaves them out.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from exporter.errors import CorruptFile, UnsupportedFormat, UsageError
from exporter.storage.files import read_regular
from exporter.storage.layout import SAVED_MODEL_FILE, SAVED_MODEL_PARTS_FILE, SAVED_MODEL_TEXT_FILE
from exporter.wire import protos
from exporter.wire.protos import MAX_MESSAGE_BYTES, Proto

SERVE_TAG = "serve"
TRAINING_TAGS = {"train", "eval"}


def read_saved_model(path: Path) -> Proto:
    """Return the `protos.SavedModel` in a directory, its graphs without the nodes that `IncrementHook` added.

    `saved_model.pb` is read, or `saved_model.pbtxt` if there is none.

    Raises:
        CorruptFile: it is damaged, or has more than 2 GiB.
        UnsupportedFormat: it is split into chunks (`saved_model.cpb`).
        UsageError: it does not exist, or the system refuses to read it.
        CheckpointError: its file is a pointer of Git LFS, or cannot be fetched from a store (subclasses).
        PublishError: what is fetched from a store cannot be written.
    """
    if (path / SAVED_MODEL_PARTS_FILE).is_file():
        raise UnsupportedFormat(
            f"{path} is a SavedModel split into chunks", hint="save it again below 2 GiB of constants"
        )
    file = path / SAVED_MODEL_FILE
    if not file.is_file():
        file = path / SAVED_MODEL_TEXT_FILE
    try:
        data = read_graph_file(file)
    except OSError as error:
        raise UsageError(
            f"no SavedModel can be read from {path}", cause=error.strerror or str(error)
        ) from error
    model = parse_message("SavedModel", data, file, is_text=file.suffix == ".pbtxt", nonempty="meta_graphs")
    for meta_graph in model.meta_graphs:
        without_recording(meta_graph)
    return model


def read_graph_file(path: Path) -> bytes:
    """Return the bytes of a graph's file.

    CorruptFile if there are more than 2 GiB; another CheckpointError (and subclasses) if it is a pointer of
    Git LFS, or cannot be fetched from a store; PublishError if what is fetched cannot be written; OSError if
    the file cannot be read.
    """
    try:
        return read_regular(path, MAX_MESSAGE_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise CorruptFile(
            f"{path} holds no graph: it has more than 2 GiB", cause="no protocol buffer is larger"
        ) from None


def parse_message(kind: str, data: bytes, path: Path, *, is_text: bool, nonempty: str) -> Proto:
    """Parse a file's bytes, and return the message of type `kind`, a class of `exporter.wire.protos`.

    With `is_text` the bytes are in protobuf's text format. `path` is for messages alone. CorruptFile if they
    cannot be parsed, or if the message's field `nonempty` is not set.
    """
    from google.protobuf import text_format

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


RECORDING_SCOPE = "increments"
"""The prefix of the names of everything that `IncrementHook` adds to a graph."""

_ADDED = re.compile(
    rf"{RECORDING_SCOPE}/((access|collect|count|mark|table|touched|plan(_\d+)?|recorded_steps(_\d+)?|Read(_\d+)?)/.*"
    r"|(are_ready|plan|recorded_steps|Identity|VarIsInitializedOp)(_\d+)?)"
)


def without_recording(meta_graph: Proto) -> Proto:
    """Remove, in place, the nodes that record increments, and control edges from them.

    Nodes that the rest of the graph or a signature reads stay: they are the program's own. Returns the same
    graph.
    """
    # A node that the rest of the graph reads, or that a signature names, is the program's own.
    nodes = meta_graph.graph_def.node
    added = {node.name: node for node in nodes if _ADDED.fullmatch(node.name)}
    if not added:
        return meta_graph
    from exporter.graph.nodes import (  # late: most graphs record nothing
        closure,
        drop_nodes,
        input_names,
        node_of,
    )
    from exporter.graph.signatures import signature_tensors, tensor_names

    read = {node_of(text) for node in nodes if node.name not in added for text in input_names(node)}
    read |= {
        node_of(text)
        for signature in meta_graph.signature_def.values()
        for _, _, info in signature_tensors(signature)
        for text in tensor_names(info)
    }

    def needed(name: str) -> Iterator[str]:
        return (source for source in map(node_of, added[name].input) if source in added)

    drop_nodes(nodes, added.keys() - closure(read & added.keys(), needed).keys())
    return meta_graph

"""Read files of graphs: protocol buffers, and whole SavedModels."""

from __future__ import annotations

import errno
from pathlib import Path

from google.protobuf.message import DecodeError

from exporter.errors import CorruptFile, UnsupportedFormat, UsageError
from exporter.graph.recording_nodes import without_recording
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

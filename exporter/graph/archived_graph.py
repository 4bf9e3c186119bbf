"""Have Keras make the graph of an archive's model, in a process with a deadline and a limit of memory.

A config is data, yet it may keep Keras busy for ever (layers that feed each other, 2^30 steps that are
unrolled) or ask for more memory than there is. That ends the process alone. The graph that comes back is a
value; Keras and TensorFlow are not imported here. An archive that is trusted as code is read in this process,
without limits, and so is one that names classes which this program registered with Keras: no other has them.

This module is the program of that process, too: see `exporter.limited.worker_process`.
"""

from __future__ import annotations

import json
import os
import site
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from exporter import errors
from exporter.catalog import Naming
from exporter.errors import BuilderError, ExportError, UnsafeArchive
from exporter.graph.archived_model import archive_builder, names_registered
from exporter.graph.builder import Built, run_builder
from exporter.graph.code_recorder import recording
from exporter.graph.session import SETTINGS
from exporter.graph.source_graph import GraphRequest
from exporter.graph.sources import importable
from exporter.limited.worker import Ended, LimitedWork, NotStarted, worker
from exporter.limited.worker_process import Deadline
from exporter.terminal.tensorflow_import import require_tensorflow
from exporter.wire import protos

LIBRARY = "tensorflow"

MEMORY_BYTES = 8 << 30
CPU_SECONDS, STEP_SECONDS = 300, 600.0
"""The limits of one archive, far beyond what large models take."""
_CHOOSE_KERAS = ("TF_USE_LEGACY_KERAS", "KERAS_BACKEND")


def archived_graph(path: Path, request: GraphRequest) -> Built:
    """Return the graph of the model that an archive describes, made by Keras in a process with limits.

    Waits for Keras, for about 10 minutes at most; the process is then kept for further archives. An archive
    that is trusted (`--allow code`), or that names objects registered with Keras in this program, is read in
    this process, without limits.

    Raises:
        UnsafeArchive: Keras exceeded its time or memory, or the process ended otherwise.
        BuilderError: Keras cannot make the model or is not installed, or no process can be started.
        CodeRefused: the archive names code that is not allowed, or its config is nested more than 200 deep.
        AccessRefused: the archive names a file that it may not read.
        CheckpointError: the archive cannot be read (and subclasses).
        UsageError: the archive holds no model, or a module of `--custom-objects` cannot be imported.
        TensorFlowNeeded: no supported TensorFlow is installed.
    """
    if request.allows("code") or names_registered(path):
        return _graph_here(path, request)
    require_tensorflow("the model of a Keras archive")
    asked = {
        "archive": str(path),
        "custom_objects": request.custom_objects,
        "allow": request.allow,
        "is_found": request.is_found,
        "naming": request.naming.value,
    }
    try:
        with worker(_work(request)) as process:
            head = json.loads(process.ask(asked))
            if "error" in head:  # here, so that the process ends: one that lacked memory may hang
                kind: type[ExportError] = getattr(errors, head["error"])
                raise kind(head["message"], cause=head["cause"], hint=head["hint"]) from _There(
                    head["traceback"]
                )
            content = b"".join(process.blocks(head["size"]))
    except NotStarted as error:
        cause = f"no process to make it in can be started: {error}"
        raise BuilderError(f"the model that {path} describes cannot be made", cause=cause) from None
    except Ended as ended:
        raise _error(path, ended) from None
    built = msgspec.msgpack.decode(content, type=Built, dec_hook=lambda kind, text: kind(text))
    return replace(built, meta_graph=protos.MetaGraphDef.FromString(built.meta_graph))


def _work(request: GraphRequest) -> LimitedWork:
    """Return the description of the process that makes graphs from archives, with its limits.

    A process is used again only for requests with the same working directory, import path, choice of Keras in
    the environment, and custom objects.
    """
    return LimitedWork(
        program=__name__,
        key=(Path.cwd(), [*sys.path], [*map(os.environ.get, _CHOOSE_KERAS)], request.custom_objects),
        memory_bytes=MEMORY_BYTES,
        cpu_seconds=CPU_SECONDS,
        step_seconds=STEP_SECONDS,
        details={"kind": "archive of Keras"},
        settings=SETTINGS,
    )


def _error(path: Path, ended: Ended) -> ExportError:
    """Return the error for an archive whose process ended.

    It is a BuilderError if the process wrote a reason before it ended (`Ended.refusal`), else UnsafeArchive.
    """
    if (refusal := ended.refusal) is not None:
        return BuilderError(f"{path}{refusal['message']}", cause=refusal["cause"], hint=refusal["hint"])
    ending = f"came to no end with it in {ended.limit}" if ended.limit else f"ended its process {ended.how}"
    return _unsafe(path, f"Keras {ending}")


def _unsafe(path: Path, cause: str) -> UnsafeArchive:
    hint = "if you trust it: --allow code, which sets no limits; otherwise name a builder: --model pkg.mod:fn"
    return UnsafeArchive(f"the model that {path} describes is refused", cause=cause, hint=hint)


class _There(Exception):
    """An error in the process; its text is the traceback."""


def _graph_here(path: Path, request: GraphRequest) -> Built:
    """Make, in this process and without limits, the graph of the model that an archive describes.

    Raises:
        BuilderError: Keras cannot make the model, or is not installed.
        CodeRefused, AccessRefused: the archive asks for what is not allowed.
        UsageError: the archive holds no model, or a module of `--custom-objects` cannot be imported.
        CheckpointError: the archive cannot be read (and subclasses).
        ImportError: TensorFlow is not installed.
        TensorFlowNeeded: the installed TensorFlow is not supported.
    """
    with importable(), recording():
        make = archive_builder(
            path,
            allow_code=request.allows("code"),
            custom_objects=request.custom_objects,
            trust=request.trust,
        )
        return run_builder(replace(request, model=make), str(path))


# --- in the process ----------------------------------------------------------------------------------------


def _answer(memory_bytes: int, asked: Mapping[str, Any], _deadline: Deadline) -> Iterator[bytes]:
    """Yield the answer to one request: a line of JSON, then the graph's bytes if Keras made it.

    The line has "size", the number of the graph's bytes (a `Built` in MessagePack). For an ExportError the
    size is 0, and the line has "error" (the name of the class), "message", "cause", "hint" and "traceback". A
    MemoryError, and an ExportError that it caused, are answered as UnsafeArchive; other errors are raised.
    `asked` has the path under "archive", and "custom_objects", "allow", "is_found" and "naming" of the
    GraphRequest; `memory_bytes` is the process's limit, for the message.
    """
    request = GraphRequest(
        custom_objects=tuple(asked["custom_objects"]),
        allow=tuple(asked["allow"]),
        is_found=asked["is_found"],
        naming=Naming(asked["naming"]),
    )
    path = Path(asked["archive"])
    try:
        content = msgspec.msgpack.encode(_graph_here(path, request), enc_hook=_plain)
    except (ExportError, MemoryError) as error:
        if _is_of_memory(error) or not isinstance(error, ExportError):
            error = _unsafe(path, f"Keras asked for more than {memory_bytes >> 20} MiB of memory to make it")
        told = {"error": type(error).__name__, "message": error.message, "cause": error.cause}
        told |= {"hint": error.hint, "traceback": traceback.format_exc()}
        yield json.dumps({"size": 0, **told}).encode() + b"\n"
    else:
        yield json.dumps({"size": len(content)}).encode() + b"\n"
        yield content


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, Path) else value.SerializeToString()


def _is_of_memory(error: BaseException | None) -> bool:
    """True if an error, or one in its chain of causes and contexts, is a MemoryError; False for None."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def opened(config: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any], Deadline], Iterator[Any]]]:
    """Yield the function that answers a request: it takes the request and a deadline, and yields the answer.

    `config["memory_bytes"]` is the process's limit of memory. First `site.main` runs, which may change
    `sys.path`.
    """
    site.main()  # editable installations find the user's modules by what `site` runs
    yield partial(_answer, config["memory_bytes"])

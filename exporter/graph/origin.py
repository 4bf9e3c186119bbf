"""Record the sources of a base besides its checkpoint: the model, its options, its tables' files.

A later delta fits the graph only while these are unchanged. A source that was not recorded, or that is not
named or found any more, is unknown, and does not count as a difference.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.errors import UsageError
from exporter.graph.sources import (
    MAX_SOURCE_BYTES,
    BuilderFile,
    SourceFile,
    changed_sources,
    code_digest,
    find_builder,
    read_sources,
    require_function,
)
from exporter.storage.files import FileDigests, file_digest, read_regular, require_size
from exporter.storage.layout import SAVED_MODEL_FILE, SAVED_MODEL_TEXT_FILE
from exporter.wire.json_documents import Sha256, Text, doc

if TYPE_CHECKING:
    from exporter.graph.inference_graph import InferenceGraph
    from exporter.graph.source_graph import GraphRequest


class GraphOrigin(Struct, frozen=True, rename={"is_beside": "beside"}):
    """The sources of a graph."""

    function: Annotated[Text, doc("the builder's name; empty for a finished graph")] = ""
    is_beside: Annotated[bool, doc("nothing was named: the graph lay beside the checkpoint")] = False
    files: Annotated[tuple[SourceFile, ...], doc("the builder's files, the one that was named first")] = ()
    options: Annotated[dict[Text, Any], doc("the options about the graph that were given")] = field(
        default_factory=dict
    )
    graph: Annotated[Sha256 | Literal[""], doc("a digest of the inference graph")] = ""
    assets: Annotated[dict[Text, Sha256], doc("a digest of each table's file, by its name")] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, request: GraphRequest, *, is_beside: bool = False) -> GraphOrigin:
        """The sources that a request names, before it is loaded; `pkg.mod:fn`'s files are known later."""
        if isinstance(request.model, str) and ":" in request.model and not Path(request.model).exists():
            return cls(request.model.rpartition(":")[2], is_beside, (), graph_options(request))
        function, builder, path = _named(request.model)
        files: tuple[SourceFile, ...] = ()
        if builder is not None:
            files = read_sources(builder) if _is_in(request.model, builder.path) else ()
        elif path is not None:
            with contextlib.suppress(OSError):  # loading the graph reports the error
                digest = _graph_file_digest(path)
                files = (SourceFile(path.name, digest, digest),)
        return cls(function, is_beside, files, graph_options(request))

    def with_graph(self, graph: InferenceGraph, assets: Mapping[str, Path]) -> GraphOrigin:
        """The origin with the digests of the graph made from it, and of `assets`, the files of its tables."""
        from exporter.graph.graph_digest import graph_digest  # late: a delta reads origins and makes none

        digests = {name: file_digest(path) for name, path in assets.items()}
        return replace(self, graph=graph_digest(graph), assets=digests)

    def differences(self, request: GraphRequest) -> Iterator[str]:
        """Yield how a later request's model and options differ, in words; it may leave them out."""
        given = graph_options(request)
        if given:
            for name in sorted(self.options.keys() | given.keys()):
                was, now = self.options.get(name), given.get(name)
                if was != now:
                    yield f"{name} was {was!r}, is {now!r}"
        if request.model is None:
            return
        function, builder, _ = _named(request.model)
        if function != self.function:
            yield f"the builder was {self.function or 'none'}, is {function or 'a finished graph'}"
        elif builder is not None and self.files:
            yield from (f"{name} has changed" for name in changed_sources(self.files, builder.path))

    def finished_graph(self, request: GraphRequest, digests: FileDigests) -> str | None:
        """The digest of the finished graph that a request names, if this origin is one, too; else None."""
        _, builder, path = _named(request.model)
        if self.function or builder is not None or path is None or not self.files:
            return None
        return digests(path, _graph_file_digest)


def graph_options(request: GraphRequest) -> dict[str, Any]:
    """{option: value} of the options about the graph that a request gives; of a file, its contents."""
    from exporter.graph.source_graph import read_signatures

    given: dict[str, Any] = {
        "--model-arg": dict(request.model_args),
        "--feed": dict(request.feeds),
        "--absent-key": dict(request.absent_keys),
        "--input": dict(request.inputs),
        "--output": dict(request.outputs),
        "--tag": request.tag,
        "--signatures": None if request.signatures is None else read_signatures(request.signatures),
        "--custom-objects": {Path(name).name: code_digest(name) for name in request.custom_objects},
    }
    return {name: value for name, value in given.items() if value}


def changed_assets(
    known: Mapping[str, str], places: Mapping[str, Path], digests: FileDigests
) -> Iterable[str]:
    """Yield the names of `known` files whose digests changed; a file that is gone does not count."""
    for name, digest in known.items():
        with contextlib.suppress(OSError):
            if name in places and digests(places[name]) != digest:
                yield name


def check_named(model: Any) -> None:
    """Refuse a named model that does not exist, without running anything.

    Raises:
        BuilderError: the file, module or function does not exist.
        UsageError: the graph does not exist.
    """
    _named(model)


def _named(model: Any) -> tuple[str, BuilderFile | None, Path | None]:
    """(builder's function, its file, None) or ("", None, finished graph's file); UsageError if not there."""
    if model is None:
        return "", None, None
    if callable(model):
        return *_function(model), None
    path = Path(model)
    if path.is_dir():
        pb = path / SAVED_MODEL_FILE
        return "", None, pb if pb.is_file() else path / SAVED_MODEL_TEXT_FILE
    if ":" in model and not path.exists():
        where, _, function = model.rpartition(":")
        builder = find_builder(where)
        if builder is not None:
            require_function(builder, where, function)
        return function, builder, None
    if not path.is_file():
        raise UsageError(
            f"--model {model}: there is no such file", hint="name a builder, a .meta or a SavedModel"
        )
    return "", None, path


def _function(model: Any) -> tuple[str, BuilderFile | None]:
    """The name of a builder given as a function, and the file that defines it; None for no file."""
    while isinstance(model, functools.partial):
        model = model.func
    model = model if hasattr(model, "__qualname__") else type(model)
    module = sys.modules.get(model.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or not file.endswith(".py"):
        return model.__qualname__, None
    path = Path(file)
    if module.__name__ == "__main__":
        return model.__qualname__, BuilderFile(path, path.resolve().parent)
    return model.__qualname__, BuilderFile.of_module(path, module.__name__)


def _is_in(builder: Any, path: Path) -> bool:
    """True if a builder given as a function is still what its file says: it may have been edited since."""
    while isinstance(builder, functools.partial):
        builder = builder.func
    code = getattr(inspect.unwrap(builder), "__code__", None)
    pending: list[Any] = []
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        pending = [compile(read_regular(path, MAX_SOURCE_BYTES), path, "exec", dont_inherit=True)]
    while pending:
        found = pending.pop()
        if found == code:
            return True
        pending += [constant for constant in found.co_consts if isinstance(constant, CodeType)]
    return False


def _graph_file_digest(path: Path) -> str:
    """The digest of a graph's file; of an archive, that of its model, because its weights are not the graph.

    BuilderError if an archive holds weights alone.
    """
    from exporter.checkpoint.families import is_archive
    from exporter.wire.protos import MAX_MESSAGE_BYTES

    if not is_archive(path):
        require_size(path, path.stat().st_size, MAX_MESSAGE_BYTES)
        return file_digest(path)
    from exporter.graph.archived_model import model_digest  # late: few deltas are of archives

    return model_digest(path)

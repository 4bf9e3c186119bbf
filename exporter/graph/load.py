"""The entry of the graph stage: load what `--model` names, and make the graph to serve.

    source = load_source(GraphRequest(model="train/model.meta", inputs={"x": "x:0"}, outputs={"y": "y:0"}))
    graph = clean(source)

Only a builder needs TensorFlow; a `.meta` file and a SavedModel are read as protocol buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from exporter.checkpoint.families import describes_model, is_archive
from exporter.errors import UsageError
from exporter.graph.clean import clean
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.metagraph import load_metagraph
from exporter.graph.own_signatures import keep_servable
from exporter.graph.saved_model import load_saved_model
from exporter.graph.signatures import requested_specs
from exporter.graph.source_graph import GraphRequest, SourceGraph
from exporter.storage.files import nearest
from exporter.storage.layout import is_saved_model
from exporter.storage.local_paths import quoted

__all__ = [
    "GraphRequest",
    "GraphSource",
    "InferenceGraph",
    "SourceGraph",
    "clean",
    "load_graph",
    "load_source",
    "run_builders_once",
]

GraphSource: TypeAlias = Callable[[GraphRequest], SourceGraph]
"""A function from a request to its graph: `load_source`, or one that caches."""

_GRAPH_FILES = {".meta", ".pbtxt"}


def load_graph(request: GraphRequest) -> InferenceGraph:
    """Load the inference graph that a request describes.

    A process of its own may run the graph, for up to minutes, to find out which batch sizes it accepts.

    Raises:
        GraphError: a builder failed, or the graph cannot be served; the subclass says why. An ExportError of
            a builder is raised as it is.
        CheckpointError: a file is damaged, is a pointer of Git LFS, or cannot be fetched from a store; its
            subclass UnsafeArchive if Keras exceeds its time or memory with an archive.
        PublishError: what is fetched from a store cannot be written.
        UsageError: the request names no model, or does not fit it.
        ImportError, TensorFlowNeeded: a builder or a Keras archive is named, and TensorFlow is not installed.
        OSError: the vocabularies of a model object cannot be written to a temporary directory.
    """
    return clean(load_source(request))


def load_source(request: GraphRequest) -> SourceGraph:
    """Load the graph of a request as its author made it, with complete signatures.

    So it can be restored and run. If a builder or a SavedModel has several signatures, those that cannot be
    served are left out, with notes; to find them, a process of its own may run the graph for up to minutes.

    Raises:
        GraphError: a builder failed, a signature names an unknown tensor or cannot be served, or an asset is
            missing or may not be read; the subclass says why. An ExportError of a builder is raised as it is.
        CheckpointError: a file is damaged, is a pointer of Git LFS, or cannot be fetched from a store; its
            subclass UnsafeArchive if Keras exceeds its time or memory with an archive.
        PublishError: what is fetched from a store cannot be written.
        UsageError: the request names no model, or does not fit it.
        ImportError, TensorFlowNeeded: a builder or a Keras archive is named, and TensorFlow is not installed.
        OSError: the vocabularies of a model object cannot be written to a temporary directory.
    """
    if request.model is None:
        raise nothing_to_serve()
    path = Path(request.model) if isinstance(request.model, str) else None
    if request.tag is not None and not (path is not None and is_saved_model(path)):
        raise UsageError("--tag chooses among a SavedModel's graphs", cause=f"{request.model} is none")
    if path is not None and is_archive(path):
        return _load_archive(path, request)
    if path is not None and (path.is_dir() or path.suffix in _GRAPH_FILES):
        if request.model_args:
            raise UsageError("--model-arg is for builders", cause=f"{path} is a finished graph")
        if not path.exists() and (meant := _meant(path)):
            raise UsageError(f"--model {path} cannot be read", cause="there is no such file", hint=meant)
        return _load_path(path, request)
    if path is not None:
        require_function_named(path)
    from exporter.graph.builder import load_builder
    from exporter.graph.object_models import keras_of

    if keras_of(request.model) is not None:
        return _load_model(request)
    source = load_builder(request)
    return keep_servable(source) if len(source.meta_graph.signature_def) > 1 else source


def nothing_to_serve(checkpoint: object = "CHECKPOINT") -> UsageError:
    """Return the error for a request without a model.

    `checkpoint` is the path in the command that the hint suggests.
    """
    return UsageError(
        "nothing says what to serve: no --model, and no .meta beside the checkpoint",
        hint="name a builder, a .meta file or a SavedModel: --model pkg.mod:fn; or begin a builder: "
        f"export-model init {quoted(checkpoint)} --write serving.py",
    )


def require_function_named(path: Path) -> None:
    """Raise UsageError for a path that is neither a graph nor a builder with its function (`pkg.mod:fn`).

    A directory, an existing archive, and each name that ends in `.meta` or `.pbtxt` are accepted.
    """
    if not (":" in str(path) or is_archive(path) or path.is_dir() or path.suffix in _GRAPH_FILES):
        raise UsageError(
            f"--model {path}: expected pkg.mod:fn, file.py:fn, a .meta file, a SavedModel "
            "directory or a Keras archive",
            cause="there is no such file" if not path.exists() else "it is none of these",
            hint=_meant(path) or "name a builder by file and function: --model path/file.py:fn",
        )


def run_builders_once() -> GraphSource:
    """Return a function like `load_source` that runs a builder only once for equal requests.

    It keeps each builder's graph, and returns the same object again. Models in files are loaded at each call.
    Its errors are those of `load_source`; a builder that failed runs again.
    """
    # A second run would be slow, and make other names: Keras numbers layers through the whole process.
    built: list[tuple[GraphRequest, SourceGraph]] = []

    def load(request: GraphRequest) -> SourceGraph:
        if isinstance(request.model, str) and Path(request.model).exists():
            return load_source(request)
        for known, source in built:
            if known == request:
                return source
        built.append((request, load_source(request)))
        return built[-1][1]

    return load


def _load_archive(path: Path, request: GraphRequest) -> SourceGraph:
    """Load the graph of the model that a Keras archive describes.

    Keras makes the model in another process with limits, unless the archive is trusted. UsageError if the
    archive has only weights, if the request has `--model-arg` or names tensors, or if a module of
    `--custom-objects` cannot be imported; GraphError (and subclasses) if the model cannot be built or served;
    CheckpointError (and subclasses) if the archive cannot be read, UnsafeArchive if Keras exceeds its time or
    memory; TensorFlowNeeded if no supported TensorFlow is installed.
    """
    from exporter.graph.archived_graph import archived_graph
    from exporter.graph.builder import require_no_tensors, source_of

    if path.exists() and not describes_model(path):
        raise UsageError(
            f"--model {path} holds weights and no model",
            hint="name what builds the model: --model pkg.mod:fn; or begin it: "
            f"export-model init {quoted(path)} --write serving.py; weights are what --ckpt-dir takes",
        )
    if request.model_args:
        raise UsageError("--model-arg is for builders", cause=f"{path} describes its model itself")
    require_no_tensors(request)
    return source_of(archived_graph(path, request), request)


def _load_model(request: GraphRequest) -> SourceGraph:
    """Build a Keras model object of this program once more, and return the graph of the new model.

    UsageError if the request has arguments, or names tensors; BuilderError if the model cannot be built,
    another GraphError if its signatures cannot be served; OSError if its vocabularies cannot be written to a
    temporary directory.
    """
    from exporter.graph.archived_model import model_builder
    from exporter.graph.builder import load_builder

    if request.model_args:
        raise UsageError("model_args are for builders", cause="a Keras model is finished")
    make = model_builder(request.model)
    return load_builder(replace(request, model=make), label="the Keras model")


def _load_path(path: Path, request: GraphRequest) -> SourceGraph:
    """Load the graph of a `.meta` file or a SavedModel.

    UsageError for another directory, for a graph without signatures, for an option that does not fit the
    graph, or if the file cannot be opened. GraphError (and subclasses) if it cannot be served;
    CheckpointError if a file is damaged, a pointer of Git LFS, or cannot be fetched from a store,
    PublishError if what is fetched cannot be written.
    """
    if not path.is_dir():
        return load_metagraph(path, request)
    if not is_saved_model(path):
        raise UsageError(
            f"--model {path}: the directory holds no saved_model.pb",
            hint=_meant(path) or "name a version directory",
        )
    source = load_saved_model(path, request)
    return source if requested_specs(request) else keep_servable(source)


def _meant(path: Path) -> str:
    """Return a hint with the path that the user probably meant instead of `path`; "" if none is similar.

    OSError if a directory on the way to it cannot be listed.
    """
    found = path if path.exists() else nearest(path)
    if found is None and path.name.isdecimal() and path.parent.is_dir():
        found = path.parent  # a version that does not exist, or no longer exists
    if found is None:
        return ""
    if found.suffix == ".py":
        return f"name the function too: --model {quoted(found)}:FUNCTION"
    if found.is_dir() and not is_saved_model(found):
        versions = [entry for entry in found.iterdir() if entry.name.isdecimal() and is_saved_model(entry)]
        if not versions:
            return ""
        found = max(versions, key=lambda version: int(version.name))
    return f"did you mean --model {quoted(found)}?"

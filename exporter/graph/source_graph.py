"""`GraphRequest`, the request of an inference graph, and `SourceGraph`, the graph as its author left it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from exporter.catalog import Naming, SliceSpec, TensorRef
from exporter.errors import AccessRefused, UsageError
from exporter.graph.sources import Code
from exporter.options import ExportRequest, GraphOptions, Model
from exporter.storage.files import read_regular
from exporter.storage.local_paths import quoted

if TYPE_CHECKING:
    import numpy as np

    from exporter.checkpoint.object_graph import ObjectGraph
    from exporter.graph.inference_graph import GraphDynamicTable
    from exporter.wire.protos import Proto


class Trust(Struct, frozen=True):
    """The permissions of a graph, which may be another author's."""

    foreign_ops: bool = False  # operations that stock TensorFlow lacks are allowed
    file_ops: bool = False  # operations that reach out of the model while it is served are allowed
    code: bool = False  # operations with effects beyond reading are allowed when this process runs the graph
    files: tuple[Path, ...] = ()  # directories besides its own that its files may come from
    is_found: bool = False  # the request does not name the graph: files are limited to its own and `files`

    def require_file(self, path: Path, directory: Path) -> None:
        """Raise AccessRefused for a file that a found graph in `directory` may not read.

        A link counts as its target. Nothing is refused to a graph that the request names. OSError or
        ValueError for a path that the system cannot resolve, as one that is too long.
        """
        places = [directory, *self.files]
        if not self.is_found or any(path.resolve().is_relative_to(place.resolve()) for place in places):
            return
        raise AccessRefused(
            f"the graph beside the checkpoint asks for a file in another directory: {str(path)!r}",
            cause=f"this graph was found, not named by --model, so it may read only files below {directory}",
            hint=f"if it may have them: --allow {quoted(f'files={path.parent}')}; or name the graph: --model",
        )


ANY_FILES = Trust()


class GraphRequest(GraphOptions, frozen=True):
    """The request to the graph stage: a model, the options about its graph, and whether it was found.

    `inputs` and `outputs` map names in the signature `serving_default` to names of tensors; `signatures` is a
    JSON file with several signatures (see `exporter.graph.signatures`).
    """

    model: Model = None
    is_found: bool = False  # the request named no graph: it was found beside the checkpoint
    naming: Naming = Naming.NAMES  # of the checkpoint's tensors

    @classmethod
    def of(
        cls, request: ExportRequest, beside: str | None = None, naming: Naming = Naming.NAMES
    ) -> GraphRequest:
        """Return the request for the graph that `request` names, else for the graph beside the checkpoint.

        It has the options of `request`. `beside` is the path of the graph beside the checkpoint, None if
        there is none; `naming` is the way in which the checkpoint names its tensors.
        """
        options = {name: getattr(request, name) for name in GraphOptions.__struct_fields__}
        is_found = request.model is None
        return cls(beside if is_found else request.model, is_found, naming, **options)

    @property
    def trust(self) -> Trust:
        """Return the permissions that the options give to the graph."""
        return Trust(
            foreign_ops=self.allows("foreign-ops"),
            file_ops=self.allows("file-ops"),
            code=self.allows("code"),
            files=self.allowed_directories,
            is_found=self.is_found,
        )


def read_signatures(path: Path) -> Any:
    """Return the JSON value in the file of `--signatures`.

    UsageError if it cannot be read, has more than 64 MiB, or is not JSON; CheckpointError if it is a pointer
    of Git LFS, or cannot be fetched from a store.
    """
    try:
        return json.loads(read_regular(path, 64 << 20))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--signatures {path} cannot be read", cause=str(error)) from error


class VariableKey(Struct, frozen=True):
    """The name under which a variable is stored, and a part's box in the whole; None: it is the whole."""

    key: str
    part: SliceSpec | None = None


class TableKey(Struct, frozen=True):
    """The names under which a table's keys and values are stored."""

    keys: str
    values: str

    @classmethod
    def of(cls, name: str) -> TableKey:
        """Return the names that a stock Saver uses for a table whose node has this name."""
        return cls(f"{name}-keys", f"{name}-values")


class SourceGraph(Struct, frozen=True):
    """A graph before any part of it is removed; it can be restored and run as in training."""

    label: str
    meta_graph: Proto  # with complete signatures, of any tensors: a session can feed all of them
    keys: Mapping[str, VariableKey]  # {variable's node: how a checkpoint stores it}
    feeds: Mapping[str, np.ndarray] = field(default_factory=dict)  # by placeholder, for every signature
    assets: Mapping[str, Path] = field(default_factory=dict)  # {node that holds a file's path: the file}
    init_op: str | None = None  # the node that initialises tables
    directory: Path = Path()  # where relative paths are looked up after the working directory
    objects: ObjectGraph | None = None  # with nodes as its variables; None if the graph has no objects
    # {variable's node: its places in a weights file}, of a Keras model.
    layers: Mapping[str, tuple[TensorRef, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the user who exports
    tables: Mapping[str, TableKey] = field(default_factory=dict)  # by node, of tables that training fills
    code: Code = Code()  # the code, at the time of running it, of a builder or of an archive's own classes
    dynamic_tables: tuple[GraphDynamicTable, ...] = ()
    trust: Trust = Trust()

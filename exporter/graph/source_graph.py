"""SourceGraph and GraphRequest: the graph as its author left it, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from exporter.catalog import SliceSpec, TensorRef
from exporter.checkpoint.object_graph import ObjectGraph
from exporter.errors import AccessRefused
from exporter.graph.inference_graph import GraphDynamicTable
from exporter.graph.sources import SourceFile
from exporter.local_paths import quoted
from exporter.options import GraphOptions
from exporter.wire.protos import Proto


class Trust(Struct, frozen=True):
    """What is allowed to a graph, which somebody else may have written."""

    foreign_ops: bool = False
    """Operations that stock TensorFlow does not have."""
    file_ops: bool = False
    """Operations that reach out of the model while it is served."""
    code: bool = False
    """Whatever it does while it is run here."""
    files: tuple[Path, ...] = ()
    """Directories that its files may come from beside its own."""
    is_found: bool = False
    """Nobody named the graph, which therefore takes files from there alone."""

    def require_file(self, path: Path, directory: Path) -> None:
        """Refuse a file that a found graph in `directory` may not take; a link counts as what it leads to.

        Raises:
            AccessRefused: it lies elsewhere.
        """
        places = [directory, *self.files]
        if not self.is_found or any(path.resolve().is_relative_to(place.resolve()) for place in places):
            return
        raise AccessRefused(
            f"the graph beside the checkpoint asks for a file in another directory: {str(path)!r}",
            cause=f"nobody named the graph, so it gets files below {directory} alone",
            hint=f"if it may have them: --allow-files {quoted(path.parent)}; or name the graph: --model",
        )


ANY_FILES = Trust()


class GraphRequest(GraphOptions, frozen=True):
    """What the graph stage is asked for: the options about the graph, and whether somebody named one.

    `inputs` and `outputs` map signature names to tensor names and make the signature `serving_default`;
    `signatures` is JSON with several (see `exporter.graph.signatures`).
    """

    is_found: bool = False
    """Nobody named the graph: it lay beside the checkpoint."""

    @classmethod
    def of(cls, options: GraphOptions, beside: str | None = None) -> GraphRequest:
        """The graph that options name or, if they name none, the one that lies `beside` the checkpoint."""
        asked = cls(**{name: getattr(options, name) for name in GraphOptions.__struct_fields__})
        is_found = options.model is None
        return replace(asked, model=beside if is_found else options.model, is_found=is_found)

    @property
    def trust(self) -> Trust:
        """What the options allow to the graph."""
        return Trust(
            foreign_ops=self.allow_foreign_ops,
            file_ops=self.allow_file_ops,
            code=self.allow_code,
            files=self.allow_files,
            is_found=self.is_found,
        )


class VariableKey(Struct, frozen=True):
    """The name a variable is stored under, and the box of the whole that it holds if it is a part."""

    key: str
    part: SliceSpec | None = None


class TableKey(Struct, frozen=True):
    """The names that a table's keys and values are stored under."""

    keys: str
    values: str

    @classmethod
    def of(cls, name: str) -> TableKey:
        """The names that a stock Saver uses."""
        return cls(f"{name}-keys", f"{name}-values")


class SourceGraph(Struct, frozen=True):
    """A graph before anything is removed from it; it can be restored and run as it was trained.

    `meta_graph` is a `protos.MetaGraphDef` whose `signature_def` is complete and names the graph's own
    tensors (also ones that are no placeholders: a session can feed any). `feeds` holds values by placeholder
    node, to be fed beside every signature. `keys` tells for each variable's node what it is stored under,
    `tables` for the nodes of tables that training fills; `dynamic_tables` have been rewritten to variables.
    `assets` maps a node that holds a file's path to that file; `init_op` is the node that initialises tables.
    Relative paths in the graph mean `directory` if they do not exist where the process runs. `objects` are
    those that the graph was made from, their variables naming nodes; None if it was made without objects.
    `layers` tells, for a Keras 3 model, where a weights file has each variable (by node). `code` are the
    files behind a builder as they were when it was run. `notes` are for the person who exports. `trust` is
    the request's.
    """

    label: str
    meta_graph: Proto
    keys: Mapping[str, VariableKey]
    feeds: Mapping[str, np.ndarray] = field(default_factory=dict)
    assets: Mapping[str, Path] = field(default_factory=dict)
    init_op: str | None = None
    directory: Path = Path()
    objects: ObjectGraph | None = None
    layers: Mapping[str, TensorRef] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tables: Mapping[str, TableKey] = field(default_factory=dict)
    code: tuple[SourceFile, ...] = ()
    dynamic_tables: tuple[GraphDynamicTable, ...] = ()
    trust: Trust = Trust()

"""Read a path of any kind: a checkpoint, a graph, a published version, or a model with its versions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from exporter.catalog import Catalog
from exporter.checkpoint.tensor_bundle import index_path, read_catalog
from exporter.delta.spans import Position
from exporter.errors import ExportError, ManifestError, NotUpdatable
from exporter.graph.graph_files import SERVE_TAG, read_saved_model
from exporter.pipeline.inspected import BundleView, Inspection, ModelView, ServedTableView, signatures_of
from exporter.publish.delta_log import read_log
from exporter.publish.mapped_state import tables_state
from exporter.publish.permission import hold_in_force
from exporter.publish.versions import read_manifest, version_dirs
from exporter.storage import mirror
from exporter.storage.files import is_gone
from exporter.storage.layout import (
    MANIFEST_FILE,
    SAVED_MODEL_FILES,
    VARIABLES_DIRECTORY,
    VARIABLES_NAME,
    is_saved_model,
)
from exporter.tables.parts import INDEX_SEEDS
from exporter.wire.protos import Proto


def inspect(path: Path) -> Inspection:
    """Read the checkpoint, graph, published version or model at `path`, without importing TensorFlow.

    A URL of a store is read through a local mirror.

    Raises:
        CheckpointNotFound: nothing of these is there.
        CheckpointError: it is damaged.
        GraphError: a graph has constants or operations that cannot be understood.
        UsageError: a file cannot be opened.
        VerificationError: a manifest is damaged, or a signed file differs.
        PositionError: deltas of the model are missing.
        OSError: a file of the model cannot be read.
    """
    path = mirror.local(path)
    if path.name in SAVED_MODEL_FILES:
        path = path.parent
    if is_saved_model(path):
        return _bundle(path)
    if path.is_file() and path.suffix == ".meta":
        from exporter.pipeline.inspect_graph import inspect_graph

        return inspect_graph(path)
    if bundles := _bundles(path):
        held = None if (hold := hold_in_force(path)) is None else hold.for_servers()
        is_unread = held is not None and held.position < 0
        at = None if held is None or is_unread else held.position
        newest = _newest_position(path, bundles[0])
        return ModelView(path, bundles, newest, at, _tables(path), is_hold_unread=is_unread)
    from exporter.checkpoint import open_checkpoint
    from exporter.pipeline.inspect_tables import inspect_checkpoint

    return inspect_checkpoint(open_checkpoint(path))


def _bundles(model: Path) -> tuple[BundleView, ...]:
    """Read the SavedModels among a model's versions, newest first; () if `model` is not a directory.

    Versions that retention removes meanwhile are skipped. Raises ExportError or OSError if another cannot be
    read.
    """
    versions = [child.path for child in version_dirs(model)] if model.is_dir() else []
    found = []
    for version in versions:
        try:
            found += [_bundle(version)] if is_saved_model(version) else []
        except (ExportError, OSError):
            if not is_gone(version):
                raise
    return tuple(found)


def _newest_position(model: Path, newest: BundleView) -> Position | None:
    """Return a model's newest position, deltas included; None if a manifest is damaged or missing.

    `newest` is its newest version; if that takes no deltas, the position is in its manifest.
    """
    try:
        return read_log(model).at
    except ManifestError:
        return None
    except NotUpdatable:
        return None if newest.manifest is None else Position(newest.manifest.position, newest.manifest.step)


def _tables(model: Path) -> tuple[ServedTableView, ...]:
    try:
        log = read_log(model)
        if not log.base.entry.mapping_spec.dynamic:
            return ()
        from exporter.pipeline.inspect_tables import tables_of_log  # late, as below: with numpy

        return tuple(tables_of_log(log))
    except (ManifestError, NotUpdatable):
        return ()


def _tables_of_bundle(catalog: Catalog, graphs: Iterable[Proto]) -> tuple[ServedTableView, ...]:
    if not any(name.endswith(f"/{INDEX_SEEDS}") for name in catalog.tensors):
        return ()
    from exporter.pipeline.inspect_tables import tables_of_bundle

    return tuple(tables_of_bundle(catalog, graphs))


def _oldest_server(graphs: list[Proto]) -> str | None:
    if not graphs:
        return None
    from exporter.graph.old_servers import oldest_server, text_of  # a manifest says it

    return text_of(max(oldest_server(graph.graph_def) for graph in graphs))


def _bundle(path: Path) -> BundleView:
    prefix = path / VARIABLES_DIRECTORY / VARIABLES_NAME
    graphs = [*read_saved_model(path).meta_graphs]
    graphs = [graph for graph in graphs if SERVE_TAG in graph.meta_info_def.tags] or graphs
    catalog = read_catalog(prefix) if index_path(prefix).exists() else None
    manifest = read_manifest(path) if (path / MANIFEST_FILE).exists() else None
    record = None if manifest is None or mirror.is_remote(path) else manifest.mapped
    return BundleView(
        path,
        dict(sorted({name: one for graph in graphs for name, one in signatures_of(graph).items()}.items())),
        catalog,
        manifest,
        () if catalog is None else _tables_of_bundle(catalog, graphs),
        None if record is None else tables_state(record, path),
        manifest.oldest_server if manifest is not None and manifest.oldest_server else _oldest_server(graphs),
    )

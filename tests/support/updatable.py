"""Models that take deltas: exported, loaded as TF Serving does, updated, and what they should answer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tensorflow as tf
from msgspec import Struct, field
from msgspec.structs import replace

from exporter.bundle import mapped_tables
from exporter.bundle.mapped_tables import MappedTables, choose_mapped
from exporter.bundle.saved_model_writer import write_saved_model
from exporter.bundle.variables import mapped_files, write_variables
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.chunk_digest import chunk_digest, chunks
from exporter.delta.delta_files import write_delta
from exporter.delta.format import Change, ChangeKind, DeltaHeader, Rows, Schema, log_name, span_name
from exporter.graph.inference_graph import InferenceGraph
from exporter.graph.overlaid_reads import PAGE_ROWS
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import MappingRules
from exporter.subgraph.make_updatable import (
    STATUS_SIGNATURE,
    UPDATE_SIGNATURE,
    IncrementalOptions,
    make_updatable,
    mapped_counter,
    schema_of,
)
from tests.support.budget import THOROUGH
from tests.support.trained import export, inference_graph, train

tf1 = tf.compat.v1

OPTIONS = IncrementalOptions(lineage="lineage-a", log=100, position=100, step=1000, stamp=True)
USERS, ITEMS, DIM = 40, 30, 4


def two_tables_and_dense() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """scores = (users[user] . items[item]) + bias . weights, read in several places."""
    user = tf1.placeholder(tf.int64, [None], name="user")
    item = tf1.placeholder(tf.int64, [None], name="item")
    users = tf1.get_variable("users", [USERS, DIM], use_resource=True)
    items = tf1.get_variable("items", [ITEMS, DIM], use_resource=True)
    bias = tf1.get_variable("bias", [DIM], use_resource=True)
    user_rows, item_rows = tf.gather(users, user), tf.nn.embedding_lookup(items, item)
    score = tf.reduce_sum(user_rows * item_rows + bias, axis=1)
    return {"user": user, "item": item}, {"score": score, "user_rows": user_rows, "bias": tf.identity(bias)}


class Model(Struct):
    """A published base that takes deltas, with a copy of what its variables should hold."""

    base: Path
    schema: Schema
    options: IncrementalOptions
    values: dict[str, np.ndarray]
    history: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def version(self) -> Path:
        return self.base / str(self.options.position)

    @property
    def log(self) -> Path:
        return self.base / "deltas" / log_name(self.options.log)

    def publish(
        self, start: int, end: int, changes: Mapping[str, Change], *, step: int | None = None, **header: Any
    ) -> Path:
        """Write the delta start-end; `header` overrides what it says of itself."""
        said = DeltaHeader(
            self.options.lineage, self.schema.digest, start, end, 10 * end if step is None else step
        )
        directory = self.log / span_name(said.from_position, said.to_position)
        directory.mkdir(parents=True)
        write_delta(directory / "delta", self.schema, replace(said, **header), changes)
        return directory

    def evolve(self, start: int, end: int, rows: int = 5) -> dict[str, Change]:
        """Publish a delta of random changes to everything, and remember the values at `end`."""
        changes = random_changes(self.schema, seed=end, rows=rows)
        self.publish(start, end, changes)
        before = self.history.get(start, self.values)
        self.history[end] = applied(before, changes)
        return changes

    def publish_rows(self, start: int, end: int, table: str, ids: np.ndarray, values: np.ndarray) -> None:
        """Publish new rows of one table, and remember the values at `end`."""
        changes: dict[str, Change] = {table: Rows(ids.astype(np.int64), values)}
        self.publish(start, end, changes)
        self.history[end] = applied(self.at(start), changes)

    def at(self, position: int) -> dict[str, np.ndarray]:
        return self.history.get(position, self.values)


def random_changes(schema: Schema, *, seed: int, rows: int = 5) -> dict[str, Change]:
    rng = np.random.default_rng(seed)
    changes: dict[str, Change] = {}
    for variable in schema.variables:
        dtype = variable.dtype.numpy
        if len(variable.keys) == 1:
            changes[variable.name] = rng.normal(size=variable.shape).astype(dtype)
        else:
            ids = np.sort(rng.choice(variable.shape[0], min(rows, variable.shape[0]), replace=False))
            values = rng.normal(size=(len(ids), *variable.shape[1:])).astype(dtype)
            changes[variable.name] = Rows(ids.astype(np.int64), values)
    return changes


def applied(values: Mapping[str, np.ndarray], changes: Mapping[str, Change]) -> dict[str, np.ndarray]:
    result = {name: value.copy() for name, value in values.items()}
    for name, change in changes.items():
        if isinstance(change, Rows):
            result[name][change.ids] = change.values
        else:
            result[name] = np.asarray(change)
    return result


def updatable_model(
    directory: Path, build: Any = two_tables_and_dense, feeds: Mapping[str, Any] | None = None, **options: Any
) -> Model:
    """Train `build`, export it with `OPTIONS` changed by `options`."""
    feeds = {"user": [0], "item": [0]} if feeds is None else feeds
    trained = train(build, feeds, directory / "train" / "model.ckpt")
    return updatable_base(directory, inference_graph(build), trained.prefix, **options)


MAPPED = bool(os.environ.get("MAPPED_BASES"))
"""All tables of all bases are mapped: the tests of plain bases hold for them as they are."""


def updatable_base(
    directory: Path,
    graph: InferenceGraph,
    prefix: Path,
    *,
    mapped: bool = MAPPED,
    overlay_rows: int | None = None,
    **options: Any,
) -> Model:
    chosen = replace(OPTIONS, **options)
    scratch = directory / "scratch"
    scratch.mkdir()
    schema = schema_of(graph)
    base = directory / "model"
    version = base / str(chosen.position)
    if mapped:
        _export_mapped(graph, chosen, scratch, prefix, version, overlay_rows)
    else:
        export(make_updatable(graph, chosen, scratch), prefix, version)
    shutil.rmtree(scratch)
    reader = tf.train.load_checkpoint(str(prefix))
    return Model(base, schema, chosen, {v.name: reader.get_tensor(v.name) for v in schema.variables})


def _export_mapped(
    graph: InferenceGraph,
    options: IncrementalOptions,
    scratch: Path,
    prefix: Path,
    version: Path,
    overlay_rows: int | None,
) -> None:
    """Write a base that maps each of its tables that may be, however small, with room for so many rows."""
    mapping = build_mapping(graph, read_catalog(prefix), MappingRules())
    with patch.object(mapped_tables, "LEAST_BYTES", 1):
        chosen = choose_mapped(graph, mapping, takes_deltas=True)
    version.mkdir(parents=True)
    report = write_variables(chosen.mapping, version)
    files = mapped_files(chosen.mapping, report.catalog)
    room = {
        variable.node: variable.shape[0] if overlay_rows is None else overlay_rows
        for variable in chosen.graph.variables
        if variable.node in files
    }
    updatable = make_updatable(chosen.graph, options, scratch, room)
    tables = MappedTables.of(version, files, mapped_counter(updatable))
    tables.write_id(version)
    write_saved_model(updatable, chosen.mapping, version, None, tables)


class Loaded:
    """A version loaded by TF1's loader into a session: what TF Serving does."""

    def __init__(self, session: Any, meta: Any, version: Path) -> None:
        self.session = session
        self.signatures = meta.signature_def
        self._meta = meta
        self._variables = version / "variables" / "variables"

    def reset(self, base: Path) -> None:
        """Do again what the loader did, as if the version lay under `base`: much quicker than to load it."""
        saver = self._meta.saver_def
        self.session.run(saver.restore_op_name, {saver.filename_tensor_name: str(self._variables)})
        (init,) = self._meta.collection_def["saved_model_main_op"].node_list.value
        (asset,) = self._meta.asset_file_def
        path = base / self._variables.parent.parent.name / "assets" / asset.filename
        self.session.run(init, {asset.tensor_info.name: str(path)})

    def call(self, signature: str, *, timeout_ms: int = 0, **feeds: Any) -> dict[str, Any]:
        definition = self.signatures[signature]
        fed = {definition.inputs[name].name: value for name, value in feeds.items()}
        fetched = {name: info.name for name, info in definition.outputs.items()}
        options = tf1.RunOptions(timeout_in_ms=timeout_ms) if timeout_ms else None
        return self.session.run(fetched, fed, options=options)

    def predict(self, **feeds: Any) -> dict[str, Any]:
        return self.call("serving_default", **feeds)

    def update(self, *up_to: int, timeout_ms: int = 0) -> dict[str, Any]:
        found = self.call(UPDATE_SIGNATURE, up_to=list(up_to or (-1,)), timeout_ms=timeout_ms)
        return {
            name: value[0].decode() if name == "status" else int(value[0]) for name, value in found.items()
        }

    def position(self) -> int:
        return int(self.call(STATUS_SIGNATURE, probe=[0])["position"][0])

    def values(self, schema: Schema) -> dict[str, np.ndarray]:
        """What every variable holds, read by its handle; in one call, as each new one is compiled."""
        with self.session.graph.as_default():
            return self.session.run({v.name: self._read(v.name, v.shape) for v in schema.variables})

    def _read(self, name: str, shape: tuple[int, ...]) -> Any:
        """The tensor of a variable's values, without the hot rows behind them."""
        graph = self.session.graph
        try:
            return graph.get_tensor_by_name(f"test_read/{name}:0")
        except KeyError:
            dtype = tf.as_dtype(graph.get_operation_by_name(name).get_attr("dtype"))
            handle = graph.get_tensor_by_name(f"{name}:0")
            read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)[tuple(map(slice, shape))]
            names = [operation.name for operation in graph.get_operations()]
            slots = next((n for n in names if n.endswith(f"/overlay/{name}/slots")), None)
            if slots is None:
                return tf.identity(read, name=f"test_read/{name}")

            def beside(what: str, indices: Any, of: Any = tf.int32) -> Any:
                handle = graph.get_tensor_by_name(f"{slots.removesuffix('slots')}{what}:0")
                return tf.raw_ops.ResourceGather(resource=handle, indices=indices, dtype=of)

            ids = tf.range(shape[0], dtype=tf.int64)
            paged = slots.removesuffix("slots") + "pages" in names
            begins = beside("pages", ids // PAGE_ROWS, tf.int64) if paged else 0
            flag = graph.get_tensor_by_name(f"{slots.removesuffix('slots')}changed:0")
            # Without pages slots hold anything until a row changes, as place 0 of an overlay always does.
            any_changed = tf.raw_ops.ReadVariableOp(resource=flag, dtype=tf.bool)
            places = tf.where(any_changed, beside("slots", begins + ids), 0)
            changed = tf.where(places)
            rows = beside("rows", tf.gather_nd(places, changed), dtype)
            return tf.tensor_scatter_nd_update(read, changed, rows, name=f"test_read/{name}")


def loaded_quickly(model: Model | Path) -> AbstractContextManager[Loaded]:
    """A loaded version whose graph TensorFlow does not optimise: that takes half the time of first calls.

    For tests of what is published. Those of the graph itself load it as servers do, with `loaded`; in
    `make thorough` all do.
    """
    config = tf1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = not THOROUGH
    return loaded(model, config)


@contextmanager
def loaded(model: Model | Path, config: Any = None) -> Iterator[Loaded]:
    """A version as servers load it."""
    version = model if isinstance(model, Path) else model.version
    session = tf1.Session(graph=tf.Graph(), config=config)
    with closing(session):
        with session.graph.as_default():
            meta = tf1.saved_model.load(session, ["serve"], str(version))
        yield Loaded(session, meta, version)


def assert_holds(server: Loaded, model: Model, position: int) -> None:
    found = server.values(model.schema)
    for name, value in model.at(position).items():
        np.testing.assert_array_equal(found[name], value, err_msg=f"{name} at {position}")
    assert server.position() == position


def expected_digests(model: Model, position: int) -> list[bytes]:
    """What `incremental_digest` gives for all chunks in order."""
    values = model.at(position)
    rows = [
        values[c.variable][c.start : c.stop] if values[c.variable].shape else values[c.variable]
        for c in chunks(model.schema)
    ]
    return [str(chunk_digest(array)).encode() for array in rows]


WIDE_ROWS, WIDE = 20_000, 16


def constant_everywhere() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The smallest and the largest value in what two tables and a dense variable give."""
    ids = tf1.placeholder(tf.int64, [None], name="ids")
    left = tf1.get_variable("left", [WIDE_ROWS, WIDE], use_resource=True)
    right = tf1.get_variable("right", [WIDE_ROWS, WIDE], use_resource=True)
    bias = tf1.get_variable("bias", [WIDE], use_resource=True)
    read = tf.concat([tf.gather(left, ids), tf.gather(right, ids), tf.tile(bias[None], [tf.size(ids), 1])], 1)
    return {"ids": ids}, {"low": tf.reduce_min(read, 1), "high": tf.reduce_max(read, 1)}


def filled(model: Model, value: float) -> dict[str, Change]:
    changes: dict[str, Change] = {}
    for variable in model.schema.variables:
        full = np.full(variable.shape, value, np.float32)
        changes[variable.name] = (
            Rows(np.arange(WIDE_ROWS), full) if variable.kind is ChangeKind.TABLE else full
        )
    return changes

"""What runs in processes of their own for `bench_tables`: tables beside DenseHashTable and gathers."""

from __future__ import annotations

import importlib
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporter import export
from exporter.options import ExportRequest, Updates
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from exporter.tables import DynamicTable
from tests.benchmarks.job import Timer
from tests.benchmarks.jobs_incremental import drive, serving
from tests.support.deeprec import Ev, write_increment, write_large

Array = np.ndarray[Any, Any]
Figures = dict[str, Any]

BASE = 1
_PARTS = 4
_TABLE = "table"
_BUILDER = """
import tensorflow as tf

from exporter.tables import DynamicTable


def model():
    ids = tf.compat.v1.placeholder(tf.int64, [None], name="ids")
    return {{"ids": ids}}, {{"score": tf.reduce_sum(DynamicTable("{table}", {dim}).lookup(ids), -1)}}
"""


def prepare(timer: Timer, directory: str, keys: str, dim: str, head_room: str) -> None:
    """A trainer's checkpoint with a table of random keys, and a base of it that takes deltas."""
    train, model = Path(directory) / "train", Path(directory) / "model"
    keys_of = Ev.random(int(keys), 1).keys
    write_large(train / f"model.ckpt-{BASE}", _TABLE, keys_of, int(dim), parts=_PARTS, step=BASE)
    (Path(directory) / "builder.py").write_text(_BUILDER.format(table=_TABLE, dim=dim))
    with timer:
        room = float(head_room)
        builder = f"{directory}/builder.py:model"
        export(ExportRequest(train, model, model=builder, updates=Updates(), table_head_room=room))


def load(timer: Timer, directory: str) -> None:
    """Restore a version's variables as a server does, once more in a process that has done it before."""
    version = read_log(Path(directory) / "model").base.path
    with serving(version):
        pass
    with timer:
        loaded = serving(version)
        loaded.__enter__()
    loaded.__exit__(None, None, None)


def read(timer: Timer, directory: str) -> int:
    """Read the same bytes; how many there are."""
    shards = [*(read_log(Path(directory) / "model").base.path / "variables").glob("*.data-*")]
    buffer = bytearray(1 << 22)
    with timer:
        for shard in shards:
            with shard.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return sum(shard.stat().st_size for shard in shards)


def lookup(timer: Timer, keys: str, dim: str, tables: str, *batches: str) -> dict[str, Figures]:
    """Processor seconds of a call by batch size: ours, a DenseHashTable and a gather, a gather alone."""
    import tensorflow as tf

    v1 = tf.compat.v1
    evs = [Ev.random(int(keys), int(dim), seed=number) for number in range(int(tables))]
    threads = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.Graph().as_default() as graph, v1.Session(graph=graph, config=threads) as session:
        ids = v1.placeholder(tf.int64, [None])
        filled: list[tuple[Any, dict[Any, Array]]] = []
        fetched = [_three_ways(filled, ids, ev, f"t{number}") for number, ev in enumerate(evs)]
        ways = {name: tf.add_n([ways[name] for ways in fetched]) for name in fetched[0]}
        while filled:  # once the graph is whole: each run would extend it again
            session.run(*filled.pop())
        calls = {name: session.make_callable(way, [ids]) for name, way in ways.items()}
        asked = {batch: _asked(evs[0], int(batch)) for batch in batches}
        answers = {name: calls[name](asked[batches[-1]][0]).tobytes() for name in ("ours", "dense")}
        assert len(set(answers.values())) == 1
        with timer:
            return {batch: _in_turns(calls, asked[batch]) for batch in batches}


def _three_ways(filled: list[tuple[Any, dict[Any, Array]]], ids: Any, ev: Ev, name: str) -> dict[str, Any]:
    """The first column of the rows of some ids, in three ways; `gather` takes row numbers.

    What fills the tables is added to `filled`: operations and their feeds.
    """
    import tensorflow as tf

    from exporter.graph.inference_graph import GraphDynamicTable
    from exporter.tables.geometry import TableGeometry
    from exporter.tables.lookup import set_sizes
    from exporter.tables.parts import PARTS
    from exporter.wire import protos
    from exporter.wire.dtypes import DType
    from tests.support.dynamic_values import Rows, table_values

    v1 = tf.compat.v1
    nodes = tuple(f"{name}/{part}" for part in PARTS)
    described = GraphDynamicTable(
        name, nodes, DType.INT64, DType.FLOAT, ev.dim, np.zeros((1, ev.dim), np.float32)
    )
    parts = table_values(described, Rows(ev.keys, ev.values))
    with tf.Graph().as_default() as apart:
        table = DynamicTable(name, ev.dim)
        result = table.lookup(v1.placeholder(tf.int64, [None], name="ids"))
        drawn = protos.GraphDef.FromString(apart.as_graph_def().SerializeToString())
    seeds, rows, keys, _ = (parts[node] for node in nodes)
    set_sizes(drawn, {name: TableGeometry.of_shapes(len(seeds), len(rows), len(keys))})
    for node in drawn.node:
        if node.name in nodes:
            node.attr["shape"].shape.Clear()
            node.attr["shape"].shape.unknown_rank = True
    drawn = v1.GraphDef.FromString(drawn.SerializeToString())
    found, *handles = v1.import_graph_def(
        drawn, {"ids:0": ids}, [result.name, *(f"{node}:0" for node in nodes)]
    )
    for handle, node in zip(handles, nodes, strict=True):
        fed = v1.placeholder(parts[node].dtype, parts[node].shape)
        filled.append((tf.raw_ops.AssignVariableOp(resource=handle, value=fed), {fed: parts[node]}))
    dense = tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.int64, len(keys) - 1, empty_key=-1, deleted_key=-2
    )
    fed_keys, fed_rows = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.int64, [None])
    given = {fed_keys: ev.keys, fed_rows: np.arange(len(ev.keys))}
    filled.append((dense.insert(fed_keys, fed_rows), given))
    numbers = tf.bitwise.bitwise_and(ids, (1 << (len(ev.keys).bit_length() - 1)) - 1)

    def gathered(indices: Any) -> Any:
        return tf.raw_ops.ResourceGather(resource=handles[-1], indices=indices, dtype=tf.float32)

    ways = {"ours": found, "dense": gathered(dense.lookup(ids)), "gather": gathered(numbers)}
    return {way: rows_[:, 0] for way, rows_ in ways.items()}


def _asked(ev: Ev, batch: int) -> list[Array]:
    random = np.random.default_rng(batch)
    return [random.choice(ev.keys, batch) for _ in range(16)]


def _in_turns(calls: Mapping[str, Callable[[Array], Any]], asked: list[Array]) -> Figures:
    """The mean call in each way's best round, in processor time: what else runs only ever adds to it."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    repeats = max(1, 20_000 // len(asked[0]) // len(asked))
    for number in range(9):
        for name, call in calls.items():
            started = time.process_time()
            for _ in range(repeats):
                for ids in asked:
                    call(ids)
            if number:
                taken[name].append((time.process_time() - started) / repeats / len(asked))
    return {name: min(found) for name, found in taken.items()}


def build(timer: Timer, directory: str, out: str) -> Figures:
    """Export the trainer's checkpoint again, the index among it, after imports; the bytes of the index."""
    log = read_log(Path(directory) / "model")
    (table, *_) = log.base.entry.mapping_spec.dynamic
    shapes = {variable.served_name: variable.shape for variable in log.base.entry.mapping_spec.variables}
    groups, slots, capacity = (shapes[key][0] for key in table.keys[:3])
    importlib.import_module("tensorflow")
    with timer:
        builder = f"{directory}/builder.py:model"
        export(ExportRequest(Path(directory) / "train", Path(out), model=builder, again=True))
    return {"index": 8 * groups + 4 * slots + 8 * capacity}


def upsert(timer: Timer, directory: str, changed: str, increments: str) -> Figures:
    """Publish increments of as many keys, half of them new; seconds of one, from increment to delta."""
    train, model = Path(directory) / "train", Path(directory) / "model"
    (table, *_) = read_log(model).base.entry.mapping_spec.dynamic
    known = Ev.random(int(directory.rsplit("-", 1)[-1]), table.dim).keys
    random = np.random.default_rng(5)
    all_keys, all_values, taken = [], [], []
    for number in range(int(increments)):
        half = int(changed) // 2
        new = random.integers(1, 2**62, half) * 2 + 1
        keys = np.concatenate([random.choice(known, int(changed) - half, replace=False), new])
        all_keys.append(keys)
        all_values.append(random.normal(size=(len(keys), table.dim)).astype(np.float32))
        latest = {int(key): place for place, key in enumerate(np.concatenate(all_keys))}
        rows = np.fromiter(latest.values(), np.int64)
        ev = Ev(np.concatenate(all_keys)[rows], np.concatenate(all_values)[rows])
        write_increment(train, BASE + 1 + number, {table.name: ev}, parts=_PARTS)
        with timer:
            started = time.perf_counter()
            export_incremental(ExportRequest(train, model))
            taken.append(time.perf_counter() - started)
    for delta in read_log(model).deltas:  # one by one they are applied, not as what they were merged to
        if delta.end - delta.start > 1:
            shutil.rmtree(delta.path)
    return {"first": taken[0]}


def apply(timer: Timer, directory: str) -> Figures:
    """Apply the published deltas one by one; p99 of predictions, idle and while one is applied a second."""
    log = read_log(Path(directory) / "model")
    positions = [delta.end for delta in log.deltas]
    (table, *_) = log.base.entry.mapping_spec.dynamic
    ids = Ev.random(64, table.dim).keys
    with serving(log.base.path) as server:
        server.update(BASE)
        taken = []
        for position in positions:
            started = time.perf_counter()
            server.step_to(position)
            taken.append(time.perf_counter() - started)
    with serving(log.base.path) as server, timer:
        server.update(BASE)
        idle, _ = drive(server, ids, float(len(positions)))
        busy, _ = drive(server, ids, float(len(positions)), positions)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"apply": statistics.median(taken[1:]), "idle": idle, "busy": busy, "peak": peak}

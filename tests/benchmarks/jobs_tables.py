"""What runs in processes of their own for `bench_tables`: tables beside DenseHashTable and gathers."""

from __future__ import annotations

import importlib
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exporter import export
from exporter.options import ExportRequest, Updates
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import read_log
from exporter.tables import DynamicTable
from tests.benchmarks.job import Timer
from tests.benchmarks.jobs_incremental import idle_and_busy, serving
from tests.support.deeprec import Ev, write_full, write_increment, write_large

if TYPE_CHECKING:
    from exporter.graph.inference_graph import InferenceGraph

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


_KINDS: dict[str, Figures] = {
    "plain": {},
    "base": {"updates": Updates()},
    "mapped": {"updates": Updates(), "map_tables": True},
}


def prepare_many(timer: Timer, directory: str, tables: str, keys: str) -> None:
    """A version of each kind with as many tables of as many keys."""
    import tensorflow as tf

    def model() -> Any:
        ids = tf.compat.v1.placeholder(tf.int64, [None, int(tables)], name="ids")
        rows = [DynamicTable(f"t{n}", 16).lookup(ids[:, n]) for n in range(int(tables))]
        return {"ids": ids}, {"score": tf.reduce_sum(tf.concat(rows, 1), 1)}

    evs = {f"t{n}": Ev.random(int(keys), 16, seed=n) for n in range(int(tables))}
    write_full(Path(directory) / "train" / f"model.ckpt-{BASE}", evs, step=BASE)
    for kind, options in _KINDS.items():
        out = Path(directory) / kind
        export(ExportRequest(Path(directory) / "train", out, model=model, **options))


def load_many(timer: Timer, version: str) -> Figures:
    """Processor seconds of loading a version, and of that and the first calls that a warm-up makes."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with v1.Session(graph=tf.Graph()) as other, other.graph.as_default():
        other.run(tf.constant(1) + tf.constant(2))
    with v1.Session(graph=tf.Graph()) as session, session.graph.as_default(), timer:
        began = time.process_time()
        signatures = v1.saved_model.load(session, ["serve"], version).signature_def
        loaded = time.process_time() - began
        width = signatures["serving_default"].inputs["ids"].tensor_shape.dim[1].size
        given = {"incremental_update": [-1], "incremental_status": [0], "serving_default": [[0] * width]}
        for name, value in given.items():
            if name in signatures:
                (fed,) = signatures[name].inputs.values()
                session.run([each.name for each in signatures[name].outputs.values()], {fed.name: value})
        return {"load": loaded, "calls": time.process_time() - began}


def lookup(timer: Timer, keys: str, dim: str, tables: str, *batches: str) -> dict[str, Figures]:
    """Processor seconds of a call by batch size: ours, each table by itself, a DenseHashTable and a gather.

    `gather` is what any of them needs at least: the gathers of as many rows.
    """
    import tensorflow as tf

    from exporter.graph.joined_lookups import join_lookups

    v1 = tf.compat.v1
    evs = [Ev.random(int(keys), int(dim), seed=number) for number in range(int(tables))]
    threads = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.Graph().as_default() as graph, v1.Session(graph=graph, config=threads) as session:
        asked = v1.placeholder(tf.int64, [len(evs), None])
        filled: list[tuple[Any, dict[Any, Array]]] = []
        built, values = _served(evs)
        ours, handles = _imported(join_lookups(built), values, tf.unstack(asked), filled)
        apart, _ = _imported(built, values, tf.unstack(asked), filled)
        dense, gather = _stock(evs, handles, tf.unstack(asked), filled)
        found = {"ours": ours, "apart": apart, "dense": dense, "gather": gather}
        ways = {name: tf.add_n([rows[:, 0] for rows in each]) for name, each in found.items()}
        whole = {
            name: tf.stack(each) for name, each in found.items()
        }  # a sum's last bits depend on its order
        feeds = {fed: value for _, given in filled for fed, value in given.items()}
        session.run([operation for operation, _ in filled], feeds)  # at once: each run prepares a large graph
        calls = {name: session.make_callable(way, [asked]) for name, way in ways.items()}
        requests = {batch: _asked(evs, int(batch)) for batch in batches}
        fed = {asked: requests[batches[-1]][0]}
        answers = [session.run(whole[name], fed).tobytes() for name in calls if name != "gather"]
        assert len(set(answers)) == 1
        with timer:
            return {batch: _in_turns(calls, requests[batch]) for batch in batches}


def _served(evs: list[Ev]) -> tuple[InferenceGraph, dict[str, Array]]:
    """A graph that looks up in tables of these contents, and its variables' values."""
    import tensorflow as tf

    from tests.support.dynamic_values import Rows
    from tests.support.joined_tables import Signatures, sized_graph

    def build() -> Signatures:
        ids = {f"ids_{n}": tf.compat.v1.placeholder(tf.int64, [None], f"ids_{n}") for n in range(len(evs))}
        rows = (DynamicTable(f"t{n}", evs[n].dim).lookup(each) for n, each in enumerate(ids.values()))
        found = {f"found_{n}": tf.identity(each, f"found_{n}") for n, each in enumerate(rows)}
        return {"serving_default": (ids, found)}

    return sized_graph(build, {f"t{n}": Rows(ev.keys, ev.values) for n, ev in enumerate(evs)})


def _imported(
    graph: InferenceGraph, values: Mapping[str, Array], ids: list[Any], filled: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The tables' rows of ids, and the handles of these rows.

    What fills the variables is added to `filled`: operations and their feeds.
    """
    import tensorflow as tf

    from tests.support.joined_tables import held

    v1, contents = tf.compat.v1, held(graph, values)
    drawn = v1.GraphDef.FromString(graph.meta_graph.graph_def.SerializeToString())
    given = {f"ids_{number}:0": each for number, each in enumerate(ids)}
    names = [*(f"found_{number}:0" for number in range(len(ids))), *(f"{node}:0" for node in contents)]
    results = v1.import_graph_def(drawn, given, names)
    handles = dict(zip(contents, results[len(ids) :], strict=True))
    for node, value in contents.items():
        fed = v1.placeholder(value.dtype, value.shape)
        filled.append((tf.raw_ops.AssignVariableOp(resource=handles[node], value=fed), {fed: value}))
    return results[: len(ids)], [handles[table.nodes[-1]] for table in graph.dynamic_tables]


def _stock(
    evs: list[Ev], handles: list[Any], ids: list[Any], filled: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The tables' rows by DenseHashTables, and rows by their numbers; adds to `filled` as `_imported`."""
    import tensorflow as tf

    v1, dense, gather = tf.compat.v1, [], []

    def gathered(handle: Any, indices: Any) -> Any:
        return tf.raw_ops.ResourceGather(resource=handle, indices=indices, dtype=tf.float32)

    for ev, handle, keys in zip(evs, handles, ids, strict=True):
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 0, empty_key=-1, deleted_key=-2)
        fed = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.int64, [None])
        given = dict(zip(fed, (ev.keys, np.arange(len(ev.keys))), strict=True))
        filled.append((table.insert(*fed), given))
        dense.append(gathered(handle, table.lookup(keys)))
        few = (1 << (len(ev.keys).bit_length() - 1)) - 1
        gather.append(gathered(handle, tf.bitwise.bitwise_and(keys, few)))
    return dense, gather


def _asked(evs: list[Ev], batch: int) -> list[Array]:
    random = np.random.default_rng(batch)
    return [np.stack([random.choice(ev.keys, batch) for ev in evs]) for _ in range(16)]


def _in_turns(calls: Mapping[str, Callable[[Array], Any]], asked: list[Array]) -> Figures:
    """The mean call in each way's best round, in processor time: what else runs only ever adds to it."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    repeats = max(1, 20_000 // asked[0].size // len(asked))
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
    """Apply the published deltas one by one; what predictions wait, idle and with one applied each second."""
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
        found = idle_and_busy(server, ids, len(positions), [partial(server.update, at) for at in positions])
        del found["answers"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {**found, "apply": statistics.median(taken[1:]), "peak": peak}

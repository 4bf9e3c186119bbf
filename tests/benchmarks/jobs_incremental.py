"""What runs in processes of their own for `bench_incremental`; arguments are text, results are JSON.

Several figures of one process, in seconds, are its result: loading TensorFlow and the model costs far more
than what is measured.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.diff import Comparison, diff
from exporter.delta.format import ChangeKind
from exporter.delta.layered_state import LayeredState
from exporter.delta.row_hashes import BlockHasher, HashIndex
from exporter.delta.row_reader import row_readers
from exporter.options import ExportRequest
from exporter.pipeline.incremental import export_incremental
from exporter.publish.delta_log import DeltaLog, read_log
from exporter.storage.layout import DELTA_NAME
from serving.run_command import keep_freed_memory
from tests.benchmarks.followed import BASE, publish, published_deltas
from tests.benchmarks.job import Timer
from tests.benchmarks.jobs_full_export import requests, restore_and_save

Figures = dict[str, Any]
Update = Callable[[], object]

_WARM_UP = 20
_REQUESTS_A_SECOND, _CLIENTS = 200, 4


def compare(timer: Timer, model: str, newer: str, known: str = "") -> list[int]:
    """The diff of the base and a newer full checkpoint; "hashes" of the base's rows may be known before.

    How many rows differ, and how many bytes were compared.
    """
    log, catalog = read_log(Path(model)), read_catalog(Path(newer))
    sources = log.base.entry.mapping_spec.mapping(catalog).sources
    new = LayeredState({v.name: v for source in sources for v in row_readers(catalog, source)})
    with tempfile.TemporaryDirectory() as scratch:
        old, index, hasher = log.state(), None, BlockHasher.fresh()
        if known:
            hashes = diff(old, old, log.schema, Comparison(Path(scratch), hasher=hasher)).hashes
            index = HashIndex(log.lineage, BASE, hasher, hashes, log.newest.manifest.state_id)
        with timer:
            found = diff(old, new, log.schema, Comparison(Path(scratch), index, hasher))
        return [sum(len(rows.ids) for rows in found.changes.values()), found.bytes_]


# --- in a session ------------------------------------------------------------------------------------------


class Served:
    """A version in a session, as a server holds it."""

    def __init__(self, session: Any, version: Path) -> None:
        import tensorflow as tf

        self.session = session
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(version))
        predict = meta.signature_def["serving_default"]
        self.predict = session.make_callable(
            predict.outputs["score"].name, [predict.inputs["ids"].name], accept_options=False
        )
        if "incremental_update" in meta.signature_def:
            update = meta.signature_def["incremental_update"]
            outputs = [update.outputs[name].name for name in ("position", "deltas")]
            self._update = session.make_callable(outputs, [update.inputs["up_to"].name])

    def update(self, up_to: int = -1) -> tuple[int, int]:
        """The position now, and how many deltas led there."""
        (position,), (deltas,) = self._update([up_to])
        return int(position), int(deltas)

    def step_to(self, position: int) -> None:
        """Apply the one delta that leads there."""
        assert self.update(position) == (position, 1)

    def digest(self, log: DeltaLog) -> str:
        """A digest of all variables' values."""
        import tensorflow as tf

        found = hashlib.sha256()
        for variable in log.base.entry.mapping_spec.variables:
            handle = self.session.graph.get_tensor_by_name(f"{variable.node}:0")
            found.update(
                self.session.run(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)).tobytes()
            )
        return found.hexdigest()


@contextmanager
def serving(version: Path) -> Iterator[Served]:
    """A version loaded into a session by TF1's loader, as TensorFlow Serving does; memory as in `deploy/`."""
    import tensorflow as tf

    keep_freed_memory()
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        yield Served(session, version)


def update(timer: Timer, model: str, rows: str, calls: str, small: str, large: str, many: str) -> Figures:
    """All deltas one by one: the last are `large` large ones, before them are `small` small ones.

    Then calls that find nothing to do; `many` is how many deltas are listed in the end.
    """
    log, deltas = read_log(Path(model)), published_deltas(Path(model))
    with serving(log.base.path) as server, timer:
        figures = _predictions(server, rows, calls)
        server.update(BASE)  # the first call of each operation is slow
        log_end = BASE + len(deltas)
        taken = [_seconds(lambda to=to: server.step_to(to)) for to in range(BASE + 1, log_end + 1)]
        figures |= _small_and_large(taken, int(small), int(large))
        figures["digest"] = server.digest(log)
        figures["nothing"] = _nothing_to_do(server, log_end, calls)
        more = [publish(log, position, 4) for position in range(log_end, BASE + int(many))]
        server.update()
        figures["nothing of many"] = _nothing_to_do(server, BASE + int(many), calls)
        after = _predictions(server, rows, calls)
        figures |= {f"{name}, updated": figure for name, figure in after.items()}
    for directory in more:
        shutil.rmtree(directory)
    return figures


def restore_and_scatter(
    timer: Timer, plain: str, model: str, rows: str, calls: str, small: str, large: str
) -> Figures:
    """The same deltas by bare RestoreV2 and ResourceScatterUpdate in a session of the plain version."""
    log = read_log(Path(model))
    with serving(Path(plain)) as server, timer:
        figures = _predictions(server, rows, calls)
        apply = _apply_rows(server, log)
        taken = [_seconds(lambda path=path: apply(path)) for path in published_deltas(Path(model))]
        figures |= _small_and_large(taken, int(small), int(large))
        return {**figures, "digest": server.digest(log)}


def _apply_rows(server: Served, log: DeltaLog) -> Callable[[Path], Any]:
    import tensorflow as tf

    nodes = {variable.served_name: variable.node for variable in log.base.entry.mapping_spec.variables}
    tables = [variable for variable in log.schema.variables if variable.kind is ChangeKind.TABLE]
    keys = [key for table in tables for key in table.keys]
    prefix = tf.compat.v1.placeholder(tf.string, [])
    restored = tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=keys,
        shape_and_slices=[""] * len(keys),
        dtypes=[tf.int64, tf.float32] * len(tables),
    )
    scattered = [
        tf.raw_ops.ResourceScatterUpdate(
            resource=server.session.graph.get_tensor_by_name(f"{nodes[table.name]}:0"),
            indices=ids,
            updates=values,
        )
        for table, ids, values in zip(tables, restored[::2], restored[1::2], strict=True)
    ]
    run = server.session.make_callable(tf.group(scattered), [prefix])
    return lambda path: run(str(path / DELTA_NAME))


def _small_and_large(taken: list[float], small: int, large: int) -> Figures:
    """Medians, the first small one by itself; `first` is the very first delta of the process."""
    last = taken[-large:]
    usual = taken[-large - small + 1 : -large]
    return {"first": taken[0], "small": statistics.median(usual), "large": statistics.median(last)}


def _predictions(server: Served, rows: str, calls: str) -> Figures:
    return {
        f"predict {batch}": _median(calls, lambda ids: server.predict(ids), requests(int(rows), batch))
        for batch in (1, 64)
    }


def _nothing_to_do(server: Served, position: int, calls: str) -> float:
    assert server.update() == (position, 0)
    return _median(calls, server.update)


def _median(calls: str, run: Callable[..., Any], *arguments: Any) -> float:
    for _ in range(int(calls)):  # the first hundreds are slower: caches, and the loading that has just ended
        run(*arguments)
    return statistics.median(_seconds(lambda: run(*arguments)) for _ in range(int(calls)))


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# --- the same change, two ways -----------------------------------------------------------------------------


def follow(timer: Timer, model: str, train: str, rows: str) -> str:
    """Delta and update in a running server; a digest of what it answers then."""
    ids = requests(int(rows))
    with serving(Path(model) / str(BASE)) as server:
        server.predict(ids)
        server.update()
        with timer:
            export_incremental(ExportRequest(Path(train), Path(model)))
            server.update()
        return _digest(server.predict(ids))


def export_and_reload(timer: Timer, tiny: str, prefix: str, out: str, rows: str) -> str:
    """The stock way: restore, save what is served, load it into a new session."""
    ids = requests(int(rows))
    with tempfile.TemporaryDirectory() as scratch:
        restore_and_save(tiny, f"{scratch}/1", "served")
        with serving(Path(scratch) / "1"):
            pass
    with timer:
        restore_and_save(prefix, out, "served")
        loaded = serving(Path(out))
        server = loaded.__enter__()
    answer = server.predict(ids)
    loaded.__exit__(None, None, None)
    return _digest(answer)


def _digest(answer: Any) -> str:
    assert answer.std() > 0
    return hashlib.sha256(answer.tobytes()).hexdigest()


# --- open loop ---------------------------------------------------------------------------------------------


def open_loop(timer: Timer, model: str, rows: str, seconds: str) -> Figures:
    """Requests at fixed times, whoever is late; idle, and while a delta is applied every second.

    Every answer must be that of one position, as found before, one by one. What a request waited counts from
    the time at which it was to begin.
    """
    log = read_log(Path(model))
    ids = requests(int(rows))
    last = BASE + len(published_deltas(Path(model)))
    with serving(log.base.path) as server:
        known = [server.predict(ids).tobytes()]
        with _waits(server) as waits:
            for position in range(BASE + 1, last + 1):
                server.step_to(position)
                known.append(server.predict(ids).tobytes())
    assert len(set(known)) == len(known)
    with serving(log.base.path) as server, timer:
        server.update(BASE)  # a server plays the warm-up record, which does the same
        updates = [partial(server.update, position) for position in range(BASE + 1, last + 1)]
        found = idle_and_busy(server, ids, float(seconds), updates)
    answers = found.pop("answers")
    mixed = sum(answer not in known for answer in answers)
    return {**found, "wait": statistics.median(waits), "mixed": mixed, "seen": len(set(answers))}


def open_loop_of_bare_writes(timer: Timer, plain: str, model: str, rows: str, seconds: str) -> Figures:
    """The same of the plain version, whose rows bare RestoreV2 and ResourceScatterUpdate write."""
    log = read_log(Path(model))
    with serving(Path(plain)) as server, timer:
        apply = _apply_rows(server, log)
        writes = [partial(apply, path) for path in published_deltas(Path(model))]
        found = idle_and_busy(server, requests(int(rows)), float(seconds), writes)
    answers = found.pop("answers")
    return {**found, "seen": len(set(answers))}


def idle_and_busy(server: Served, ids: Any, seconds: float, updates: Sequence[Update]) -> Figures:
    """What requests waited, `idle` and `busy`, and all `answers`; half of the idle time is after the busy
    one, as a machine's speed drifts.
    """
    turns = [drive(server, ids, *turn) for turn in ((seconds / 2, ()), (seconds, updates), (seconds / 2, ()))]
    (before, busy, after), answers = zip(*turns, strict=True)
    return {"idle": [*before, *after], "busy": busy, "answers": [*chain(*answers)]}


@contextmanager
def _waits(server: Served) -> Iterator[list[float]]:
    """How long each update kept readers waiting: from its own note of the time until its end was seen."""
    import tensorflow as tf

    def handle(name: str) -> Any:
        return server.session.graph.get_tensor_by_name(f"incremental/{name}:0")

    reads = [
        tf.raw_ops.ReadVariableOp(resource=handle("sequence"), dtype=tf.int64),
        tf.raw_ops.ReadVariableOp(resource=handle("since"), dtype=tf.float64),
    ]
    look, waits, done = server.session.make_callable(reads), [], threading.Event()

    def watch() -> None:
        begun = asked = time.time()
        last, _ = look()
        while not done.is_set():
            before, asked = asked, time.time()
            sequence, since = look()
            now = time.time()
            if sequence & 1:
                begun = float(since)
            elif sequence != last:
                # One that was never seen writing did so since the last look was asked for, which may have
                # seen the sequence long before it came back.
                waits.append(now - (begun if last & 1 else before))
            last = sequence

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield waits
        finally:
            done.set()
            watching.result()


def drive(
    server: Served, ids: Any, seconds: float, updates: Iterable[Update] = ()
) -> tuple[list[float], list[bytes]]:
    """Ask at fixed times while the next of these updates is applied each second.

    What requests waited from when they were due, and all answers.
    """
    requests_ = count()
    total = int(seconds * _REQUESTS_A_SECOND)
    late: list[float] = []
    answers: list[bytes] = []
    for _ in range(_WARM_UP):
        server.predict(ids)
    started = time.perf_counter() + 0.1

    def ask() -> None:
        """Until the time is over, and on a slow machine until one request has begun after an update."""
        is_updated = False
        while (number := next(requests_)) < total or not is_updated:
            is_updated = updated.is_set()
            due = started + number / _REQUESTS_A_SECOND
            time.sleep(max(0.0, due - time.perf_counter()))
            answer = server.predict(ids)
            late.append(time.perf_counter() - due)
            answers.append(answer.tobytes())

    done, updated = threading.Event(), threading.Event()

    def update_each_second() -> None:
        for number, update_once in enumerate(updates):
            if done.wait(max(0.0, started + number + 0.5 - time.perf_counter())):
                return
            update_once()
            updated.set()
        updated.set()

    with ThreadPoolExecutor() as pool:
        updating = pool.submit(update_each_second)
        clients = [pool.submit(ask) for _ in range(_CLIENTS)]
        for client in clients:
            client.result()
        done.set()
        updating.result()
    return late, answers

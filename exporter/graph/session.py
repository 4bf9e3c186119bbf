"""Run other people's graphs in TensorFlow, in a process with a deadline and a memory limit: `graph_session`.

A graph that was found may never end, sleep, crash TensorFlow or take all memory. That ends only its process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from exporter.limited.worker import LimitedWork, Worker, worker
from exporter.limited.worker_process import Deadline
from exporter.wire import protos
from exporter.wire.dtypes import Array
from exporter.wire.protos import Proto
from exporter.wire.tensor_proto import fill, to_array

SETTINGS = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
_LONGEST = 500


class RunFailed(Exception):
    """TensorFlow refused a graph, or to run it; `kind` is the name of its exception.

    `node` is the node named in the error, "" if none is. The message has at most 500 characters.
    """

    def __init__(self, kind: str, message: str, node: str) -> None:
        super().__init__(message[:_LONGEST])
        self.kind, self.node = kind, node


class GraphSession(Struct, frozen=True):
    """A process in which TensorFlow runs one graph at a time.

    Its methods raise RunFailed if TensorFlow refuses, and Ended if the process ends or exceeds its limits.
    """

    process: Worker | _Here

    def open(self, graph_def: Proto, *, plain: bool = False) -> None:
        """Import a graph, replacing the previous one and its variables.

        With `plain` it runs in one thread and is not optimized. Importing has no time limit. RunFailed if
        TensorFlow refuses it, Ended if the process ends, also because it needs too much memory.
        """
        self._ask(
            {"graph": "plain" if plain else "optimized", "limited": False}, graph_def.SerializeToString()
        )

    def load(self, saved_model: Path) -> Proto:
        """Load a SavedModel's graph tagged `serve`, and return its MetaGraphDef without the graph.

        Its variables are restored. It replaces the previous graph. Loading has no time limit. RunFailed if
        TensorFlow refuses it, Ended if the process ends, also because it needs too much memory.
        """
        (content,) = self._ask({"load": str(saved_model), "limited": False})
        return protos.message_class("MetaGraphDef").FromString(content)

    def stateful(self, ops: Iterable[str]) -> frozenset[str]:
        """Return the operations with state among `ops` (names): TensorFlow never runs these by itself.

        An operation that TensorFlow does not know has none. Ended if the process ends or exceeds its limits.
        """
        (content,) = self._ask({"stateful": sorted({*ops})})
        return frozenset(json.loads(content))

    def run(
        self,
        fetches: Sequence[str],
        feeds: Mapping[str, Any],
        targets: Sequence[str] = (),
        *,
        limited: bool = True,
    ) -> list[Array]:
        """Run the operations `targets` and return the values of the tensors `fetches`, in their order.

        `feeds` has a value for each fed tensor's name. Without `limited` the run may take any time; with it
        the session's limits hold. RunFailed if TensorFlow fails, Ended if the process ends or exceeds its
        limits; ValueError if TensorFlow has no type for a fed value, or a fetched value cannot be sent.
        """
        encoded = {name: _encoded(value) for name, value in feeds.items()}
        sizes = [[name, len(data)] for name, data in encoded.items()]
        request = {"run": [*fetches], "feeds": sizes, "targets": [*targets], "limited": limited}
        found = self._ask(request, b"".join(encoded.values()))
        return [to_array(protos.TensorProto.FromString(data)) for data in found]

    def _ask(self, request: Mapping[str, Any], body: bytes = b"") -> list[bytes]:
        answer = json.loads(self.process.ask(request, body))
        if "error" in answer:
            raise RunFailed(answer["error"], answer["message"], answer["node"])
        return [b"".join(self.process.blocks(size)) for size in answer["sizes"]]


class _Here:
    """Runs graphs in this process, with Python functions and operations that no other process may have."""

    def __init__(self) -> None:
        import tensorflow  # noqa: F401 - all of it, before a part is imported

        from exporter.graph.session_process import Graphs

        self._graphs = Graphs()
        self._answer: Iterator[bytes] = iter(())

    def ask(self, request: Mapping[str, Any], body: bytes = b"") -> bytes:
        """Run a request, and return the first line of the answer, in JSON: sizes of its values, or an error.

        `blocks` then yields the values, one at each call. `body` has the values that the request feeds.
        """
        self._answer = self._graphs.answer({**request, "limited": True, "body": body}, Deadline(0, 0.0))
        return next(self._answer)

    def blocks(self, size: int) -> Iterator[bytes]:
        """Yield the next value of the answer as one block; `size` is not used."""
        yield next(self._answer)

    def end(self) -> None:
        """Close the last graph's session, which frees its memory."""
        self._graphs.close()


@contextmanager
def session_here() -> Iterator[GraphSession]:
    """Yield a session in this process, without limits, for graphs that are trusted.

    It is closed after the block. ImportError if TensorFlow is not installed.
    """
    here = _Here()
    try:
        yield GraphSession(here)
    finally:
        here.end()


@contextmanager
def graph_session(*, memory_bytes: int, cpu_seconds: int, step_seconds: float) -> Iterator[GraphSession]:
    """Yield a session in a process of its own, a new one or an idle one.

    After the block the process is kept for five seconds, or killed if the block fails. `cpu_seconds` and
    `step_seconds` (of wall time) limit each request, `memory_bytes` the process's memory. NotStarted, on
    entry, if no process can be started; in the block the session's methods raise Ended if it ends.
    """
    work = LimitedWork(
        program="exporter.graph.session_process",
        key="",
        memory_bytes=memory_bytes,
        cpu_seconds=cpu_seconds,
        step_seconds=step_seconds,
        details={"kind": "TensorFlow graph"},
        settings=SETTINGS,
    )
    with worker(work) as process:
        yield GraphSession(process)


def _encoded(value: Any) -> bytes:
    proto = protos.TensorProto()
    fill(proto, np.asarray(value))
    data: bytes = proto.SerializeToString()
    return data

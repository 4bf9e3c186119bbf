"""Run other people's graphs in TensorFlow, in a process that `exporter.limited.worker_process` limits.

`session.py` sends it requests. Only the part of TensorFlow that runs a graph is imported, which takes a third
of the time: no other process may import this module.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from exporter.limited.worker_process import Deadline

LIBRARY = "tensorflow.python.client.session"

_NODE = re.compile(r"\{\{(?:function_)?node ([^}]+)\}\}")
_WHERE = re.compile(r"Detected at node|Node: |\[\[\{\{|<stack traces unavailable>")
_LOWEST = -1  # OptimizerOptions.L0


def _without_its_front() -> None:
    """Make `tensorflow` a package whose own `__init__`, which imports everything, does not run.

    Nothing changes if it is imported, or not installed.
    """
    if (spec := find_spec("tensorflow")) is not None and "tensorflow" not in sys.modules:
        module: ModuleType = module_from_spec(spec)
        sys.modules["tensorflow"] = module


_without_its_front()


class Graphs:
    """One graph at a time, and the session in which it runs."""

    def __init__(self) -> None:
        self._session: Any = None

    def answer(self, request: Mapping[str, Any], deadline: Deadline) -> Iterator[bytes]:
        """Do a request, and yield one line of JSON, then the results, if it has no error.

        The results are serialised TensorProtos; of "load" a MetaGraphDef, of "stateful" a JSON list of names.
        The line has the results' sizes in bytes, or the error: a TensorFlow error, or a Python error that a
        bad request causes (ValueError, TypeError, KeyError, RuntimeError); other errors are raised. A request
        that is not `limited` lifts the deadline.
        """
        from tensorflow.python.framework import errors

        if not request.get("limited", True):
            deadline.lift()
        try:
            found = [*self._done(request)]
        except (errors.OpError, ValueError, TypeError, KeyError, RuntimeError) as error:
            yield json.dumps(_described(error)).encode() + b"\n"
            return
        yield json.dumps({"sizes": [len(each) for each in found]}).encode() + b"\n"
        yield from found

    def _done(self, request: Mapping[str, Any]) -> Iterator[bytes]:
        from tensorflow.core.framework import tensor_pb2
        from tensorflow.python.framework import tensor_util

        if "load" in request:
            yield self._load(request["load"])
        elif "stateful" in request:
            yield json.dumps([op for op in request["stateful"] if _is_stateful(op)]).encode()
        elif "graph" in request:
            self._open(request)
        else:
            feeds, body, at = {}, request.get("body", b""), 0
            for name, size in request["feeds"]:
                proto = tensor_pb2.TensorProto.FromString(body[at : at + size])
                feeds[name], at = tensor_util.MakeNdarray(proto), at + size
            graph = self._session.graph
            targets = [graph.as_graph_element(name, allow_tensor=False) for name in request["targets"]]
            values, _ = self._session.run([request["run"], targets], feeds)
            for value in values:
                yield tensor_util.make_tensor_proto(value).SerializeToString()

    def _open(self, request: Mapping[str, Any]) -> None:
        """Import the request's graph into a new session, and close the previous one.

        A "plain" graph runs in one thread, and is not optimized.
        """
        from tensorflow.core.framework import graph_pb2
        from tensorflow.core.protobuf import config_pb2
        from tensorflow.python.framework import importer

        config = config_pb2.ConfigProto(allow_soft_placement=True)
        if request["graph"] == "plain":
            config.inter_op_parallelism_threads = config.intra_op_parallelism_threads = 1
            config.graph_options.optimizer_options.opt_level = _LOWEST
            config.graph_options.rewrite_options.disable_meta_optimizer = True
        graph_def = graph_pb2.GraphDef.FromString(request["body"])
        with self._renewed(config).graph.as_default():
            importer.import_graph_def(graph_def, name="")

    def _load(self, path: str) -> bytes:
        """Load a SavedModel's graph tagged `serve` into a new session, with its variables.

        The previous session is closed. Returns its MetaGraphDef, serialised, without the graph. A TensorFlow
        error if it cannot be loaded.
        """
        from tensorflow.core.protobuf import config_pb2
        from tensorflow.python.saved_model import loader_impl

        session = self._renewed(config_pb2.ConfigProto(allow_soft_placement=True))
        meta_graph = loader_impl.SavedModelLoader(path).load(session, ["serve"])
        meta_graph.ClearField("graph_def")
        data: bytes = meta_graph.SerializeToString()
        return data

    def close(self) -> None:
        """End the session, if there is one, and free its variables."""
        if self._session is not None:
            self._session.close()

    def _renewed(self, config: Any) -> Any:
        from tensorflow.python.client import session
        from tensorflow.python.framework import ops

        self.close()
        self._session = session.Session(graph=ops.Graph(), config=config)
        return self._session


def _is_stateful(op: str) -> bool:
    from tensorflow.python.framework import op_def_registry

    known = op_def_registry.get(op)
    return known is not None and bool(known.is_stateful)


def _described(error: Exception) -> dict[str, str]:
    message = str(getattr(error, "message", error))
    node = getattr(error, "node_def", None)
    named = _NODE.findall(message)
    lines = [line.strip() for line in message.removeprefix("Graph execution error:").splitlines()]
    shown = " ".join(line for line in lines if line and not _WHERE.match(line))
    return {
        "error": type(error).__name__,
        "message": shown,
        "node": str(node.name) if node is not None else named[-1] if named else "",
    }


@contextmanager
def opened(_config: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any], Deadline], Iterator[Any]]]:
    """Yield the function that answers requests, with no graph open yet; the configuration is not used."""
    yield Graphs().answer

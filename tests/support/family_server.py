"""One `serve-model run` process that is given a published version after another, and asked over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from serving.client import ModelClient
from tests.support.forks import started_warm

DEADLINE_SECONDS = 120.0

Arrays = dict[str, np.ndarray[Any, Any]]


class FamilyServer:
    """A server process; it starts with the first model and takes each other one by a new configuration."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._address = ""
        self._names = (f"model-{number}" for number in count())

    def answers(self, version: Path, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
        """What the default signature answers; a signature's only input may have another name."""
        if not self._address:
            self._start(version.parent)
        name = next(self._names)
        self._configure(name, version)
        with ModelClient(self._address, name, deadline_s=DEADLINE_SECONDS) as client:
            wanted = client.metadata().signatures["serving_default"].inputs
            if len(wanted) == len(inputs) == 1:
                inputs = dict(zip(wanted, inputs.values(), strict=True))
            prediction = client.predict({key: inputs[key] for key in wanted})
        assert prediction.version == int(version.name)
        return dict(prediction.outputs)

    def stop(self) -> None:
        """End the process, if it was started."""
        self._stack.close()

    def _start(self, base: Path) -> None:
        process = self._stack.enter_context(started_warm("serving.cli", "run", base, "--port", 0))
        ready = process.stdout.readline()
        assert " on " in ready, f"the server ended: {process.stderr.read()}"
        self._address = ready.rpartition(" on ")[2].strip()

    def _configure(self, name: str, version: Path) -> None:
        """Serve this version and nothing else; returns when it is available."""
        from tensorflow_serving.apis import model_management_pb2, model_service_pb2_grpc

        request = model_management_pb2.ReloadConfigRequest()
        model = request.config.model_config_list.config.add(name=name, model_platform="tensorflow")
        model.base_path = str(version.parent.absolute())
        model.model_version_policy.specific.versions.append(int(version.name))
        with grpc.insecure_channel(self._address) as channel:
            stub = model_service_pb2_grpc.ModelServiceStub(channel)
            stub.HandleReloadConfigRequest(request, timeout=DEADLINE_SECONDS)


@contextmanager
def family_server() -> Iterator[FamilyServer]:
    """A server that does not outlive the context."""
    server = FamilyServer()
    try:
        yield server
    finally:
        server.stop()

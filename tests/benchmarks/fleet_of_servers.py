"""`python -m tests.benchmarks.fleet_of_servers MODEL COUNT DELAY`: one process as many model servers.

Each has a port of its own, serves the newest base of a model, and moves to the position that an update asks
for. It reads nothing of what is published, so that hundreds cost little beside the agent that is measured. A
call takes `DELAY` seconds to arrive, and its answer as long. The process prints its ports; then each line of
its input is a request, and each line that it prints the answer: see `Fleet`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from exporter.publish.delta_log import read_log
from exporter.wire.protos import Proto, message_class
from exporter.wire.tensor_proto import fill, to_arrays
from tests.benchmarks.harness import ROOT
from tests.support.lying_server import MODELS, PREDICTION, TYPES, true_answer

_CALLS = [f"{PREDICTION}/Predict", f"{PREDICTION}/GetModelMetadata", f"{MODELS}/GetModelStatus"]
_NEVER_S = 1e6


class _Served:
    """One server: where it stands, when it came to each position, and how late its calls are."""

    def __init__(self, base: _Base, delay_s: float) -> None:
        self.base, self.delay_s = base, delay_s
        self.position = base.position
        self.arrivals: list[tuple[int, float]] = []
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen, on the port of before if there was one."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        methods: dict[str, dict[str, Any]] = {}
        for path in _CALLS:
            _, service, method = path.split("/")
            methods.setdefault(service, {})[method] = grpc.unary_unary_rpc_method_handler(self._handler(path))
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, handlers) for name, handlers in methods.items()]
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Let nothing listen."""
        if self._server is not None:
            await self._server.stop(0)
        self._server = None

    def _handler(self, path: str) -> Any:
        async def answer(content: bytes, _: Any) -> bytes:
            await asyncio.sleep(self.delay_s)
            found = self._answer(path, content)
            await asyncio.sleep(self.delay_s)
            return found

        return answer

    def _answer(self, path: str, content: bytes) -> bytes:
        if not path.endswith("Predict"):
            return self.base.answer(path, "", 0, 0)
        request = message_class(TYPES[path][0]).FromString(content)
        signature, before = request.model_spec.signature_name, self.position
        if signature == "incremental_update":
            asked = int(to_arrays(request.inputs)["up_to"][0])
            if asked > before:
                self.position = asked
                self.arrivals.append((asked, time.time()))
        return self.base.answer(path, signature, self.position, int(self.position > before))


@dataclass(frozen=True)
class _Base:
    """What all of them serve."""

    name: str
    version: int
    lineage: str
    position: int

    @classmethod
    def read(cls, model: Path) -> _Base:
        log = read_log(model)
        return cls(model.name, int(log.base.path.name), log.lineage, log.base.at.position)

    @cache  # noqa: B019  there is one
    def answer(self, path: str, signature: str, position: int, deltas: int) -> bytes:
        """The bytes of a true answer."""
        request = message_class(TYPES[path][0])()
        if signature:
            request.model_spec.signature_name = signature
        found = true_answer(path, request)
        if path.endswith("GetModelStatus"):
            found.model_version_status[0].version = self.version
            return bytes(found.SerializeToString())
        found.model_spec.name, found.model_spec.version.value = self.name, self.version
        if signature:
            self._fill(found, {"position": position, "step": position, "deltas": deltas, "rows": deltas})
        return bytes(found.SerializeToString())

    def _fill(self, answer: Proto, numbers: dict[str, int]) -> None:
        import numpy as np

        values = {name: np.array([value]) for name, value in numbers.items()}
        values |= {
            "lineage": np.array([self.lineage.encode()], object),
            "status": np.array([b"reached"], object),
        }
        for name, value in values.items():
            if name in answer.outputs:
                answer.outputs[name].Clear()
                fill(answer.outputs[name], value)


async def _serve(model: Path, count: int, delay_s: float) -> None:
    base = _Base.read(model)
    served = [_Served(base, delay_s) for _ in range(count)]
    for each in served:
        await each.start()
    print(json.dumps([each.port for each in served]), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await _do(served, delay_s, *json.loads(line))), flush=True)


async def _do(
    served: Sequence[_Served], delay_s: float, what: str, first: int, last: int, late: float
) -> Any:
    chosen = served[first:last]
    for each in chosen:
        match what:
            case "stop":
                await each.stop()
            case "start":
                await each.start()
            case "late":
                each.delay_s = late
            case "hang":
                each.delay_s = _NEVER_S
            case "on time":
                each.delay_s = delay_s
    if what == "report":
        return [each.arrivals for each in chosen]
    return min(each.position for each in chosen)


class Fleet:
    """The process as its user sees it: some of the servers may be made to fail, and told to be well again."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ports: list[int] = self._read()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def tell(self, what: str, first: int = 0, last: int | None = None, late_s: float = 0.0) -> Any:
        """Let the servers from `first` to `last` `stop`, `start`, `hang`, be `late`, or be `on time`."""
        assert self._process.stdin is not None
        request = (what, first, len(self.ports) if last is None else last, late_s)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def least(self, first: int = 0) -> int:
        """The position of the last of the servers from `first` on."""
        return int(self.tell("look", first))

    def report(self) -> list[list[tuple[int, float]]]:
        """The positions that each server came to, and when."""
        return [[(end, when) for end, when in arrivals] for arrivals in self.tell("report")]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextmanager
def fleet_of_servers(model: Path, count: int, delay_s: float) -> Iterator[Fleet]:
    """So many servers of a model."""
    command = [sys.executable, "-m", "tests.benchmarks.fleet_of_servers", model, count, delay_s]
    with subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield Fleet(process)
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))

"""An embedded model server: TF Serving's gRPC services over TensorFlow's own session.

    with ModelServer("models/ranker") as server:
        server.wait_available(timeout_seconds=60)
        print(server.address)

The stock client stubs, requests, statuses and errors are those of `tensorflow_model_server`.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from exporter.errors import ModelPathNotFound, ServerError, UsageError
from exporter.local_paths import local_path
from serving.status import VersionStatus
from serving.version_policy import Latest, Policy

if TYPE_CHECKING:
    from os import PathLike

    from serving.http_port import HttpPort
    from serving.manager import Listener, VersionManager
    from serving.rest import RestOptions

MAX_MESSAGE_BYTES = (1 << 31) - 1
GRACE_SECONDS = 5.0


class ModelServer:
    """A model server in this process, from construction until `stop` or the end of a `with` block.

    It answers at once; predictions are possible when `wait_available` returns. New versions are picked up as
    TF Serving picks them up: the newest integer-named directory is loaded first, then the old version is
    unloaded.
    """

    def __init__(
        self,
        base_path: str | PathLike[str],
        *,
        name: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        poll_seconds: float = 1.0,
        threads: int = 8,
        max_filled_bytes: int | None = None,
        listener: Listener | None = None,
        rest: RestOptions | None = None,
    ) -> None:
        """Listen, and begin to load the newest version.

        Args:
            base_path: the directory that holds the versions.
            name: the model's name in requests; the last part of `base_path` by default.
            host: the address to listen on.
            port: the TCP port; 0 takes a free one, `self.port` says which.
            poll_seconds: how often `base_path` is listed.
            threads: how many calls are worked on at a time.
            max_filled_bytes: a request is refused if more would be filled in where it sends fewer values than
                its shapes have; 64 MiB by default.
            rest: how to listen for HTTP, too.
            listener: called with each change of a version's status, from the threads that make it.

        Raises:
            ModelPathNotFound: `base_path` is not a directory.
            UsageError: a number is out of range.
            ServerError: the address cannot be listened on.
        """
        path = local_path("base_path", base_path).absolute()
        if not path.is_dir():
            raise ModelPathNotFound(f"{base_path} is not a directory")
        if poll_seconds <= 0 or threads < 1 or not 0 <= port <= 65535:
            raise UsageError("poll_seconds and threads must be positive, and port lie within 0..65535")
        from serving.manager import VersionManager
        from serving.models import ServedModels

        def create(name: str, base_path: Path, policy: Policy) -> VersionManager:
            return VersionManager(
                name, base_path, policy=policy, poll_seconds=poll_seconds, listener=listener
            )

        self.name = name or path.name
        self.host = host
        self._stopped = False
        self._models = ServedModels(create)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="call")
        from serving.calls import Calls
        from serving.inference import MAX_FILLED_BYTES
        from serving.server_metrics import ServerMetrics

        self._calls = Calls(self._models, MAX_FILLED_BYTES if max_filled_bytes is None else max_filled_bytes)
        self._metrics = ServerMetrics(self._models)
        self._server, self.port = self._listen(port)
        self._http = None if rest is None else self._listen_http(rest)
        self.rest_port = None if self._http is None else self._http.port
        self._manager = self._models.add(self.name, path, Latest())

    @property
    def address(self) -> str:
        """`host:port`, as gRPC clients take it."""
        return f"{self.host}:{self.port}"

    def wait_available(self, timeout_seconds: float) -> int:
        """The version that is served, as soon as there is one.

        Raises:
            ServerError: no version is available in time, or the newest one cannot be loaded.
        """
        return self._manager.wait_available(timeout_seconds)

    def statuses(self) -> list[VersionStatus]:
        """Every version that was seen, the newest first."""
        return self._manager.statuses()

    def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Refuse new calls, give those under way `grace_seconds`, unload everything; harmless if repeated."""
        if self._stopped:
            return
        self._stopped = True
        deadline = time.monotonic() + grace_seconds
        ended = self._server.stop(grace_seconds)
        if self._http is not None:
            self._http.stop(grace_seconds)
        ended.wait()
        self._models.stop(max(0.0, deadline - time.monotonic()))
        self._executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _listen(self, port: int) -> tuple[Any, int]:
        import grpc

        from serving.services import add_services

        server = grpc.server(
            self._executor,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss
            ],
        )
        add_services(server, self._calls, self._metrics)
        try:
            bound = server.add_insecure_port(f"{self.host}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise ServerError(
                f"cannot listen on {self.host}:{port}",
                cause="the port is taken, or the address is not this machine's",
                hint="choose another --port, or --port 0 for a free one",
            )
        server.start()
        return server, bound

    def _listen_http(self, options: RestOptions) -> HttpPort:
        from serving.http_port import HttpPort, require_libraries
        from serving.rest import MAX_BODY_BYTES, Rest

        require_libraries("server", "the REST interface", "cheroot", "prometheus_client")
        try:
            return HttpPort(
                Rest(self._calls, self._metrics, options),
                self.host,
                options.port,
                option="--rest_api_port",
                threads=options.threads,
                max_body_bytes=MAX_BODY_BYTES,
            )
        except BaseException:
            self._server.stop(None)
            raise

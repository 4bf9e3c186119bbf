"""Ports that speak gRPC: a call takes a worker thread once its request is here, and not before.

The blocking server of grpc waits for each request in a worker thread: as many open calls as there are threads
would stop it for everybody.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from msgspec import Struct

T = TypeVar("T")
Metadata = tuple[tuple[str, str | bytes], ...]


class Call:
    """A call, as the handler of its request sees it from a worker thread."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds
        self._is_active = True

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline, negative after it; None without a deadline.

        Without one, it may also be the time to gRPC's last timestamp, in the far future.
        """
        return None if self._ends is None else self._ends - time.monotonic()

    def is_active(self) -> bool:
        """Return False once nobody waits for the answer."""
        return self._is_active

    def end(self) -> None:
        """Record that nobody waits for the answer any more."""
        self._is_active = False

    def abort(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> NoReturn:
        """End the call with the status `code`, by an exception that the port turns into it; never returns.

        `details` is the status's message, `metadata` the trailing metadata.
        """
        raise _Aborted(code, details, metadata)


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata) -> None:
        super().__init__(details)
        self.status = code, details, metadata


class Method(Struct, frozen=True):
    """The handler of a service's method: `answer` gets a request's bytes and returns the response's.

    With `is_quick` it runs in the event loop instead of a worker thread, so it must not block.
    """

    answer: Callable[[bytes, Call], bytes]
    is_quick: bool = False


class GrpcPort:
    """A server of some services, on ports that are added before it starts."""

    def __init__(
        self,
        services: Mapping[str, Mapping[str, Method]],
        workers: Executor,
        options: Sequence[tuple[str, int | str]],
    ) -> None:
        handlers = [
            grpc.method_handlers_generic_handler(
                name, {each: _handler(method, workers) for each, method in methods.items()}
            )
            for name, methods in services.items()
        ]

        async def make() -> grpc.aio.Server:
            # In the loop: such a server belongs to the loop in which it is made.
            return grpc.aio.server(handlers=handlers, options=options)

        self._server = _begun(make()).result()

    def listen(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Add a port, without TLS if `credentials` is None, and return its number.

        `address` is HOST:PORT (port 0 takes a free one) or unix:PATH. RuntimeError, or 0 from some versions
        of gRPC, if the server cannot listen there.
        """
        if credentials is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, credentials)

    def start(self) -> None:
        """Start to answer calls on the added ports; returns once calls are accepted."""
        _begun(self._server.start()).result()

    def stop(self, grace_seconds: float) -> Future[None]:
        """Refuse new calls, and give those in progress `grace_seconds` to end; does not wait.

        The future is done when all have ended or were cancelled.
        """
        return _begun(self._server.stop(grace_seconds))


def _handler(method: Method, workers: Executor) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def answered(content: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        call = Call(context.time_remaining())
        try:
            if method.is_quick:
                return method.answer(content, call)
            # A client that leaves cancels this coroutine: a request that no worker has begun is then dropped.
            return await asyncio.get_running_loop().run_in_executor(workers, method.answer, content, call)
        except _Aborted as aborted:
            await context.abort(*aborted.status)
            raise  # it never comes here
        finally:
            call.end()

    return grpc.unary_unary_rpc_method_handler(answered)


def _begun(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _loop())


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all ports, which runs in a thread; memoised for the process.

    With several loops, grpc's pollers wake each other in vain, and print that.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpc", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a fork has no thread that runs it

"""A TCP proxy on loopback that passes bytes on as well, or as badly, as it is told."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


_CHUNK = 1 << 16
_LOOK_S = 0.02
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no time: closing sends RST."""


class Network(Enum):
    """How the way is. What is held back arrives later, as TCP sends again what was lost."""

    GOOD = "good"
    SLOW = "slow"
    """Each piece is late by `delay_s`."""
    CUT = "cut"
    """Nothing arrives, in no direction, and nobody is told."""
    ANSWERS_LOST = "answers lost"
    """Requests arrive, answers do not."""
    RESET = "reset"
    """Connections are reset, those that are there and new ones."""


class Proxy:
    """Passes connections on to `port` of this machine; `network` may change at any time."""

    def __init__(self, port: int, *, delay_s: float = 0.3) -> None:
        self._target = ("127.0.0.1", port)
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.network = Network.GOOD
        self._closed = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def be(self, network: Network) -> None:
        """From now on the way is like this."""
        self.network = network
        if network is Network.RESET:
            self._reset_all()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self._reset_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _reset_all(self) -> None:
        for pair in list(self._pairs):
            for end in pair:
                _reset(end)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.network is Network.RESET:
                _reset(near)
                continue
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:  # nobody listens there: the caller is told as by the target itself
            _reset(near)
            return
        far.settimeout(None)
        pair = (near, far)
        self._pairs.add(pair)
        pumps = [
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True),
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True),
        ]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        self._pairs.discard(pair)
        for end in pair:
            end.close()

    def _pump(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(_CHUNK):
                if self.network is Network.SLOW:
                    time.sleep(self._delay_s)
                while self._holds(is_request):
                    time.sleep(_LOOK_S)
                sink.sendall(piece)
        for end in (source, sink):  # the other direction ends, too
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _holds(self, is_request: bool) -> bool:
        if self._closed:
            return False
        return self.network is Network.CUT or (self.network is Network.ANSWERS_LOST and not is_request)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        end.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        end.close()

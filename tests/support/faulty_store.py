"""A proxy before an object store, which answers as stores do on bad days."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.http_proxy import Answer, Forwarding, serving

SLOW_SECONDS = 3.0


class Fault(Enum):
    """What happens to a request."""

    STATUS_500 = "500"
    STATUS_501 = "501"
    STATUS_503 = "503"
    STATUS_429 = "429"
    STATUS_403 = "403"
    DONE_AND_500 = "it is done, and the answer is 500"
    DONE_AND_CLOSED = "it is done, and the connection closed"
    CLOSED = "the connection is closed"
    SLOW = "the answer comes too late"
    HALF = "half of the body comes, then the connection is closed"
    SHORTER = "half of the body comes, as if it were all"
    LONGER = "more comes than was asked for"
    WHOLE = "the whole object comes where a range was asked for"
    REDIRECT = "another place is named"


class Weather:
    """Which requests have a fault: all, or the first `times` of each method and path."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.slow_seconds = SLOW_SECONDS
        self.times = 0
        self.said = b"<Error><Code>Bad</Code></Error>"
        """The body of a refusal."""
        self.only = ""
        """If not empty, requests of other methods are as they should be."""
        self.seen: Counter[tuple[str, str]] = Counter()
        self.followed: list[Mapping[str, str]] = []
        """The headers of who went where a redirect led."""

    def be(self, fault: Fault | None, times: int = 1 << 30) -> None:
        """From now on it is like this."""
        self.fault, self.times = fault, times
        self.seen.clear()

    def fault_of(self, method: str, path: str) -> Fault | None:
        if self.only not in ("", method):
            return None
        self.seen[method, path] += 1
        return self.fault if self.seen[method, path] <= self.times else None


@contextmanager
def faulty(address: str, weather: Weather | None = None) -> Iterator[tuple[str, Weather]]:
    """The address of a proxy before a store, and its weather, which is good at first."""
    weather = weather or Weather()

    class Elsewhere(BaseHTTPRequestHandler):
        def take(self) -> None:
            weather.followed.append(dict(self.headers))
            self.send_error(404)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = take

        def log_message(self, *rest: Any) -> None:
            pass

    with serving(Elsewhere) as elsewhere, serving(_proxy(address, weather, elsewhere)) as here:
        yield here, weather


def _proxy(address: str, weather: Weather, elsewhere: str) -> type[BaseHTTPRequestHandler]:
    class Faulty(Forwarding):
        target = address

        def forward(self) -> None:
            fault = weather.fault_of(self.command, self.path)
            match fault:
                case (
                    Fault.STATUS_500
                    | Fault.STATUS_501
                    | Fault.STATUS_503
                    | Fault.STATUS_429
                    | Fault.STATUS_403
                ):
                    return self.answer(Answer(int(fault.value), weather.said))
                case Fault.CLOSED:
                    return self.hang_up()
                case Fault.REDIRECT:
                    place = elsewhere.replace("127.0.0.1", "localhost") + self.path
                    return self.answer(Answer(307, b"", {"Location": place}))
                case Fault.SLOW:
                    time.sleep(weather.slow_seconds)
            found = self.ask(leaving_out="range" if fault is Fault.WHOLE else "")
            if fault is Fault.DONE_AND_500:
                return self.answer(Answer(500))
            if fault is Fault.DONE_AND_CLOSED:
                return self.hang_up()
            content = found.content
            if self.command == "GET" and fault is Fault.SHORTER:
                found = replace(found, content=content[: len(content) // 2])
            if self.command == "GET" and fault is Fault.LONGER:
                found = replace(found, content=content + b"more")
            half = fault is Fault.HALF and self.command == "GET"
            return self.answer(found, len(content) // 2 if half else None)

        def hang_up(self) -> None:
            self.close_connection = True

    return Faulty

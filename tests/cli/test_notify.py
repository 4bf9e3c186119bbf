"""`--notify`: what becomes of servers that do not answer."""

from __future__ import annotations

import socket

import pytest

from exporter.cli import notify
from exporter.cli.notify import Servers


def test_a_server_that_hangs_is_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch publishes every second; it must not wait for the same server each time."""
    monkeypatch.setattr(notify, "_FIRST_SIGN_OF_LIFE_S", 1.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        servers = Servers((address,))
        (waited,) = servers.notify("ranker", 7)
        assert "DEADLINE_EXCEEDED" in (waited.problem or "")
        (left_out,) = servers.notify("ranker", 7)
        assert (left_out.seconds, left_out.problem) == (0.0, "not asked: it did not answer a moment ago")
        servers._hanging[address] = 0.0
        (asked,) = servers.notify("ranker", 7)
        assert "DEADLINE_EXCEEDED" in (asked.problem or "")
        assert address in servers._hanging


def test_a_server_that_is_gone_is_asked_each_time() -> None:
    servers = Servers(("127.0.0.1:9",))
    for _ in range(2):
        (found,) = servers.notify("ranker", 7)
        assert "UNAVAILABLE" in (found.problem or "")

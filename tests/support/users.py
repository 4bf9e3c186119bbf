"""Other users, whom permission bits bind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")


def as_user(uid: int, function: Callable[[], object]) -> object:
    """What a function returns in a process of another user; what it needs is imported already."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return json.loads(told)

"""Refuse impossible requests before an engine starts: the engine would report them late, or wait for ever.

`why` turns an error of an engine's library into the cause and the hint of an `EngineFailed`.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Collection, Mapping
from typing import Any

from exporter.errors import EngineFailed, UsageError
from exporter.options.given import require_seconds
from exporter.storage.local_paths import local_name
from exporter.storage.url import Url
from exporter.terminal.progress import human_bytes

_LACKS = ("ModuleNotFoundError:", "ImportError:", "AttributeError: Can't get attribute")


def why(error: BaseException) -> tuple[str, str]:
    """Return the cause of an error of an engine's library, in one line, and a hint.

    The hint is "" if the usual one is good enough.
    """
    # Libraries report a worker's error as a traceback, whose last line is the cause.
    said = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    is_traceback = any(line.startswith('File "') for line in said)
    cause = said[-1] if is_traceback else " ".join(said)
    lacks = any(name in cause for name in _LACKS)
    hint = "install the same version of export-model, with the same extras, on every worker" if lacks else ""
    return cause, hint


_CONNECT_S = 30.0
_WORKER_BYTES = 100 << 20  # Dask's take 66 MB, Ray's 115, Beam's 139
_MOST_PORTS = 65535
_ADDRESSES = {
    "ray": (("", "ray"), "ray-head:6379"),
    "dask": (("", "tcp", "tls", "ucx", "ws", "wss"), "tcp://scheduler:8786"),
    "beam": (("",), "job-server:8099"),
}
_NO_CLUSTER = "name a cluster that runs, as it is reached from here: --engine address=ADDRESS"
_LONGEST_OF_SOCKETS = 107  # Linux' sun_path has 108 bytes, one of them the end
_OF_RAY = len("/session_2000-01-01_00-00-00_000000_1234567/sockets/plasma_store")


def require_known(engine: str, options: Collection[str], known: Collection[str]) -> None:
    """Raise UsageError if one of `options` is not in `known`; `engine` is the name for the error."""
    if unknown := set(options) - set(known):
        raise UsageError(
            f"{engine} does not take --engine {', '.join(sorted(unknown))}",
            hint=f"its options are {', '.join(sorted(known))}",
        )


def require_room(options: Mapping[str, Any], there: Mapping[str, float]) -> None:
    """Raise UsageError if `options` ask for more of a resource for each task than Ray has on this machine.

    `there` has the amount of each of Ray's resources by name: CPU, GPU, memory (bytes) and others.
    """
    wanted = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    for name, amount in {**wanted, **(options.get("resources") or {})}.items():
        if amount and amount > there.get(name, 0):
            raise UsageError(
                f"a task asks for {amount:g} of Ray's {name}, and this machine has {there.get(name, 0):g}",
                hint="ask for less, or name a cluster that has it: --engine address=ADDRESS",
            )


def workers_with_room(workers: int, there: int) -> int:
    """Return the number of worker processes, at least 1, that fit into `there` bytes of memory.

    UsageError if `workers` of them do not fit.
    """
    if workers * _WORKER_BYTES > there:
        raise UsageError(
            f"{workers} workers of an engine take about {human_bytes(workers * _WORKER_BYTES)} of memory, "
            f"and this machine has {human_bytes(there)}",
            hint="name a cluster for them (--engine address=ADDRESS), or leave --workers out; threads take "
            "little: --engine local",
        )
    return max(1, there // _WORKER_BYTES)


def require_reachable(engine: str, address: str) -> None:
    """Try to connect to the address of a cluster, and disconnect.

    UsageError if it is not an address of this engine, EngineFailed if nothing answers within 30 seconds.
    """
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if (engine, address) == ("ray", "auto"):  # it finds the cluster of this machine
        return
    schemes, example = _ADDRESSES[engine]
    if scheme not in schemes or not host or not port.isdecimal() or int(port) > _MOST_PORTS:
        raise UsageError(f"{address} is not an address of {engine}", hint=f"as in --engine address={example}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise EngineFailed(f"nothing answers at {address}", cause=str(error), hint=_NO_CLUSTER) from error


def require_short(path: str) -> None:
    """Raise UsageError if the directory `path` is too long for the names of Ray's sockets below it."""
    if len(os.fsencode(path)) > _LONGEST_OF_SOCKETS - _OF_RAY:
        raise UsageError(
            f"{path} is too long a path for the files of Ray, which have sockets among them",
            hint="name a shorter directory for temporary files: TMPDIR=/tmp export-model ...",
        )


def seconds(name: str, text: str) -> float:
    """Return the value of the option `name` as seconds; UsageError if they are not positive, or too many."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise UsageError(f"--engine {name}={text} is not a number of seconds", hint="as in 900")
    return require_seconds(f"--engine {name}", found)


def place(name: str, text: str) -> str:
    """Return the value of the option `name`: a directory, or the URL of an object store.

    The URL of a local file becomes its path; UsageError for other URLs.
    """
    return text if Url.parse(text) is not None else local_name(f"--engine {name}", text)

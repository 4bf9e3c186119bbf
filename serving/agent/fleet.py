"""All models on all servers: a thread follows each directory, and a `Replica` each model of each server.

The servers are fixed addresses, and names that resolve to many addresses.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from exporter.errors import UsageError
from serving.address import GRPC_PORT, with_port
from serving.agent.journal import AgentEvent, EventKind, Journal
from serving.agent.publications import FollowedModel, Publications
from serving.agent.rebuild import Rebuilder
from serving.agent.replica import Allowed, Replica, Settings
from serving.agent.rollout import (
    Observed,
)

MANY = "dns:///"
"""The prefix of a target that means every address of a name, in gRPC's notation."""


class Resolved(Struct, frozen=True):
    """The servers' addresses, each once; `problems` lists the names that did not resolve."""

    addresses: tuple[str, ...]
    problems: tuple[str, ...] = ()


class Targets:
    """The values of --target. A name that does not resolve keeps its last addresses."""

    def __init__(self, targets: Sequence[str]) -> None:
        """Raise UsageError if there are no targets, or one is not an address."""
        if not targets:
            raise UsageError("there is no server to keep fresh", hint="name each: --target HOST:PORT")
        for target in targets:
            if target.startswith(MANY):
                _host_and_port(target)
            else:
                with_port(target)
        self._targets = tuple(targets)
        self._known: dict[str, tuple[str, ...]] = {}

    def resolve(self) -> Resolved:
        """Resolve all names now and return the servers' addresses, in the order of the targets.

        A name that does not resolve is a problem in the result, and its last known addresses are used.
        """
        addresses: dict[str, None] = {}
        problems = []
        for target in self._targets:
            if not target.startswith(MANY):
                addresses[with_port(target)] = None
                continue
            try:
                self._known[target] = _all_addresses(target)
            except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 letters
                problems.append(f"{target}: {getattr(error, 'strerror', None) or error}")
            addresses.update(dict.fromkeys(self._known.get(target, ())))
        return Resolved(tuple(addresses), tuple(problems))


def _all_addresses(target: str) -> tuple[str, ...]:
    """Return the addresses of a name with ports, sorted: all IPv4 ones, or else all IPv6 ones.

    A replica with both must not count twice. Empty if the name has neither. OSError or UnicodeError if the
    name does not resolve; UsageError if `target` is not `dns:///NAME[:PORT]`.
    """
    host, port = _host_and_port(target)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, form in ((socket.AF_INET, "{}:{}"), (socket.AF_INET6, "[{}]:{}")):
        addresses = sorted({form.format(*where[:2]) for kind, _, _, _, where in found if kind == family})
        if addresses:
            return tuple(addresses)
    return ()


def _host_and_port(target: str) -> tuple[str, int]:
    try:
        host, _, port = with_port(target.removeprefix(MANY)).rpartition(":")
    except UsageError:
        host = port = ""
    if not host or not port.isdecimal():
        raise UsageError(
            f"--target {target} is not an address",
            cause=f"expected {MANY}NAME, with a port unless it is {GRPC_PORT}",
            hint=f"write {MANY}model-servers:8500",
        )
    return host.strip("[]"), int(port)


class Fleet:
    """All replicas of all models, and the threads that keep them fresh."""

    def __init__(
        self,
        models: Sequence[FollowedModel],
        targets: Targets,
        journal: Journal,
        settings: Settings,
        *,
        allowed: Allowed = lambda model, address, published: published,
    ) -> None:
        self.journal = journal
        self._allowed = allowed
        self.settings = settings
        self.publications = [
            Publications(model, journal, settings.poll_s, reads_ahead=settings.reads_ahead)
            for model in models
        ]
        self._targets = targets
        self._replicas: dict[tuple[str, str], Replica] = {}
        self._lock = threading.Lock()
        self._resolved = Resolved(())
        self._rebuilder: Rebuilder | None = None
        if (read := settings.rebuild) is not None:
            self._rebuilder = Rebuilder(read, settings.access, settings.deadline_s, self._is_served_elsewhere)

    @property
    def replicas(self) -> list[Replica]:
        """Return the current replicas, sorted by address and model."""
        with self._lock:
            return [self._replicas[key] for key in sorted(self._replicas)]

    def replicas_of(self, model: str) -> list[Replica]:
        """Return the current replicas of one model, sorted by address."""
        return [replica for replica in self.replicas if replica.model == model]

    def _is_served_elsewhere(self, address: str, model: str) -> bool:
        return any(other.serves_rightly for other in self.replicas_of(model) if other.address != address)

    def observed(self, model: str) -> dict[str, Observed]:
        """Return the last observation of each current replica of a model, by address."""
        return {replica.address: replica.observed for replica in self.replicas_of(model)}

    @contextmanager
    def running(self, grace_s: float) -> Iterator[None]:
        """Run all threads inside the block; at its end, calls in progress have `grace_s` seconds to end.

        Names are resolved before the block begins. A call that is not over by then is left behind.
        """
        stop = threading.Event()
        threads = [
            threading.Thread(target=publications.follow, args=(stop,), daemon=True)
            for publications in self.publications
        ]
        threads.append(threading.Thread(target=self._follow_names, args=(stop,), daemon=True))
        self.resolve()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            self._end(self.replicas, grace_s)
            for thread in threads:
                thread.join(1.0)

    def resolve(self) -> None:
        """Resolve the targets again: start replicas for new servers, end those whose servers are gone.

        If the names that do not resolve, or the reasons, have changed, each is reported as an event.
        """
        found = self._targets.resolve()
        if found.problems != self._resolved.problems:
            for problem in found.problems:
                self.journal.write(AgentEvent(EventKind.TARGETS, problem))
        self._resolved = found
        wanted = {
            (address, publications.model.name): publications
            for address in found.addresses
            for publications in self.publications
        }
        with self._lock:
            gone = [self._replicas.pop(key) for key in self._replicas.keys() - wanted.keys()]
            new = {
                key: Replica(
                    key[0], publications, self.journal, self.settings, self._allowed, self._rebuilder
                )
                for key, publications in wanted.items()
                if key not in self._replicas
            }
            self._replicas |= new
        for replica in new.values():
            replica.start()
        for replica in gone:
            replica.end()

    def _follow_names(self, stop: threading.Event) -> None:
        while not stop.wait(self.settings.resolve_s):
            self.resolve()

    @staticmethod
    def _end(replicas: Sequence[Replica], grace_s: float) -> None:
        until = time.monotonic() + grace_s
        # All before the first `join`: they share the grace.
        for replica in replicas:
            replica.end()
        for replica in replicas:
            replica.join(max(0.0, until - time.monotonic()))

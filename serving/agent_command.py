"""`serve-model agent`: options in, a fleet that is looked after until a signal comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import asdict

from exporter.errors import Exit, ExportError, UsageError
from exporter.local_paths import local_path
from exporter.terminal.edge import AS_TEXT, OutputFlags, command
from exporter.terminal.output import Output, OutputMode
from exporter.terminal.server_access import ServerAccess
from serving.agent_flags import AuditFlags, CanaryFlags, PaceFlags, PortFlags, TimeFlags
from serving.documents import AgentEvent, AgentStarted
from serving.optional_libraries import require_libraries
from serving.signals import sleep_until_a_signal, stop_on_sigterm

if TYPE_CHECKING:
    from serving.agent.fleet import Settings
    from serving.agent.journal import Event, Journal
    from serving.agent.view import FleetView

_LIBRARIES = ("h11", "jinja2", "prometheus_client", "watchfiles")


def agent(
    model_base_path: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]DIR",
            help="A model base path, and the model's name on the servers if it is not the path's last part. "
            "Repeat it for several models.",
        ),
    ],
    target: Annotated[
        list[str],
        typer.Option(
            metavar="HOST[:PORT]",
            help="gRPC address of a replica; dns:///NAME[:PORT] stands for every address of the name. "
            "Repeat it for several.",
        ),
    ],
    own: PortFlags,
    pacing: PaceFlags,
    audits: AuditFlags,
    canary: CanaryFlags,
    times: TimeFlags,
    access: ServerAccess,
    pull: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Fetch what is published there (s3://, gs://, az://) into the model base path. "
            "Repeat it for several models.",
        ),
    ] = None,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Keep the replicas of models as fresh as what is published.

    For each replica and each version that it has loaded: ask where it stands, apply the deltas that it
    lacks, confirm. A new delta is noticed at once on local disks, elsewhere within --poll-seconds. A
    replica that hangs, refuses, restarts or vanishes holds back no other. Nothing is kept but in the
    replicas and the directory: the agent may be killed at any time, and two of them do no harm.

    With --canary one replica goes first; golden requests decide whether the others follow.

    Its own port answers /metrics (Prometheus), /healthz, /readyz, /livez,
    /status.json, and a status page at /.

    \b
    Examples:
      serve-model agent --model-base-path models/ranker --target 127.0.0.1:8500
      serve-model agent --model-base-path prod=/models/ranker --target dns:///model-servers:8500 --json
      serve-model agent --model-base-path models/ranker --target dns:///model-servers --canary golden.json
      serve-model agent --model-base-path models/ranker --target 127.0.0.1:8500 --pull s3://models/ranker
    """
    with command(printing) as sink:
        require_libraries("agent", "the agent", *_LIBRARIES)
        stop_on_sigterm()
        from serving.agent import view
        from serving.agent.canary_keeper import Canaries
        from serving.agent.canary_options import canary_rules
        from serving.agent.fleet import Fleet
        from serving.agent.journal import Journal
        from serving.agent.publications import Model
        from serving.agent.puller import pullers_of, pulling
        from serving.agent.targets import Targets
        from serving.credentials import channel_credentials

        channel_credentials(access)  # what is wrong with its files is said now, not for each replica
        sink.json_lines = True
        paths = _models(tuple(model_base_path))
        models = [Model(name, path) for name, path in paths.items()]
        journal = Journal()
        pullers = pullers_of(pull or (), models, journal, times.poll_seconds)
        settings = _settings(times, pacing, audits, access, paths)
        tell = _Teller(sink)
        journal.read_by(tell)
        rules = canary_rules(
            canary.canary,
            paths,
            drift=canary.canary_drift,
            patience_s=canary.canary_seconds,
            deadline_s=times.deadline,
            access=access,
        )
        canaries = Canaries(rules, journal)
        fleet = Fleet(models, Targets(target), journal, settings, allowed=canaries.allowed)
        try:
            with (
                _own_port(own, journal, partial(view.view, fleet, canaries, pullers)) as bound,
                canaries.running(fleet.publications, fleet.members),
                fleet.running(grace_s=times.deadline),
                pulling(list(pullers.values())),
            ):
                tell.started(own.host, bound, "http" if own.tls_cert is None else "https")
                sleep_until_a_signal()
        except KeyboardInterrupt:
            raise SystemExit(int(Exit.INTERRUPTED)) from None


def _settings(
    times: TimeFlags, pacing: PaceFlags, audits: AuditFlags, access: ServerAccess, models: Iterable[str]
) -> Settings:
    """How the fleet is looked after."""
    from serving.agent.fleet import Settings
    from serving.agent.rollout import Policy

    pace = pacing.policy()
    policy = Policy(
        refresh_s=times.refresh_seconds,
        step_s=pacing.step_seconds,
        audit_s=audits.audit_seconds,
        longest_delay_s=None if pace is None else pace.longest_delay_s,
    )
    return Settings(
        policy,
        poll_s=times.poll_seconds,
        resolve_s=times.resolve_seconds,
        deadline_s=times.deadline,
        access=access,
        pace=pace,
        rebuild=audits.rebuild([*models]),
    )


@contextmanager
def _own_port(own: PortFlags, journal: Journal, look: Callable[[], FleetView]) -> Iterator[int]:
    """Serve metrics, probes and the status page of what `look` sees; the number of the port."""
    from serving.agent import http, page
    from serving.agent.metrics import Metrics
    from serving.agent.recorder import Recorder

    metrics = Metrics(look)
    journal.read_by(metrics)
    recorder = Recorder(look)
    show = partial(page.page, look, recorder, journal, own.fresh_within)
    site = http.Site(look, metrics, show, own.fresh_within, own.token(), own.client_ca is not None)
    stop = threading.Event()
    with http.serving(site, own.host, own.port, own.tls()) as bound:
        threading.Thread(target=recorder.follow, args=(stop,), daemon=True).start()
        try:
            yield bound
        finally:
            stop.set()


class _Teller:
    """Prints each event: one line; with --json one document; with -q what an operator wants to know of."""

    def __init__(self, sink: Output) -> None:
        self._sink = sink
        self._is_lost = False

    def started(self, host: str, port: int, scheme: str) -> None:
        """Say where the own port is."""
        self._told(partial(self._print_start, host, port, scheme))

    def __call__(self, event: Event) -> None:
        """Print it."""
        self._told(partial(self._print, event))

    def _told(self, say: Callable[[], None]) -> None:
        """What cannot be written (a full disk, a closed pipe) is lost, which is said once."""
        try:
            say()
        except (ExportError, OSError) as error:
            if not self._is_lost:
                why = error.cause if isinstance(error, ExportError) else error.strerror
                self._sink.warn(f"events are lost, they cannot be written to standard output: {why}")
            self._is_lost = True
        else:
            self._is_lost = False

    def _print_start(self, host: str, port: int, scheme: str) -> None:
        shown = f"[{host}]" if ":" in host else host
        self._sink.note(f"status page and metrics on {scheme}://{shown}:{port}/")
        if self._sink.mode is OutputMode.JSON:
            self._sink.result(AgentStarted("started", host, port))

    def _print(self, event: Event) -> None:
        where = " ".join(part for part in (event.model, event.replica) if part)
        seconds = event.behind_seconds
        served = "" if seconds is None else f", served {seconds:.3f} s after its publication"
        line = f"{where}: {event.message}{served}" if where else event.message
        if self._sink.mode is OutputMode.JSON:
            self._sink.result(AgentEvent(**asdict(event)))
        elif self._sink.mode is OutputMode.QUIET and event.is_trouble:
            self._sink.trouble(line)
        else:
            self._sink.note(line)


def _models(options: tuple[str, ...]) -> dict[str, Path]:
    models: dict[str, Path] = {}
    for text in options:
        name, separator, place = text.partition("=")
        path = local_path("--model-base-path", place if separator else text).absolute()
        name = name if separator else path.name
        if not name or name in models:
            raise UsageError(
                f"--model-base-path {text}: there is {'a model' if name else 'no name'} {name!r} twice"
                if name
                else f"--model-base-path {text} has no name",
                hint="give each model a name of its own: --model-base-path NAME=DIR",
            )
        models[name] = path
    return models

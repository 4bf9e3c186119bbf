"""`serve-model agent`: options in, a fleet that is looked after until a signal comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import asdict

from exporter.errors import Exit, ExportError, UsageError
from exporter.files import read_regular
from exporter.local_paths import local_path
from exporter.terminal.edge import DebugFlag, JsonFlag, QuietFlag, command
from exporter.terminal.output import Output, OutputMode
from exporter.terminal.parameters import App, Option, Options
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from serving.documents import AgentEvent, AgentStarted
from serving.optional_libraries import require_libraries
from serving.signals import sleep_until_a_signal, stop_on_sigterm

if TYPE_CHECKING:
    from serving.agent.journal import Event

_LIBRARIES = ("cheroot", "jinja2", "prometheus_client", "watchfiles")
_LONGEST_TOKEN = 4096

HELP = """Keep the replicas of models as fresh as what is published.

For each replica and each version that it has loaded: ask where it stands, apply the deltas that it lacks,
confirm. A new delta is noticed at once on local disks, elsewhere within --poll-seconds. A replica that hangs,
refuses, restarts or vanishes holds back no other. Nothing is kept but in the replicas and the directory: the
agent may be killed at any time, and two of them do no harm.

With --canary one replica goes first; golden requests decide whether the others follow.

Its own port answers /metrics (Prometheus), /healthz, /readyz, /livez,
/status.json, and a status page at /.

\b
Examples:
  serve-model agent --model-base-path models/ranker --target 127.0.0.1:8500
  serve-model agent --model-base-path prod=/models/ranker --target dns:///model-servers:8500 --json
  serve-model agent --model-base-path models/ranker --target dns:///model-servers --canary golden.json
  serve-model agent --model-base-path models/ranker --target 127.0.0.1:8500 --pull s3://models/ranker"""


def register(app: App) -> None:
    """Add the command to `serve-model`."""
    app.subcommand("agent", help=HELP, short_help="Keep replicas as fresh as what is published.")(agent)


def agent(
    model_base_path: Annotated[
        tuple[str, ...],
        Option(
            metavar="[NAME=]DIR",
            help="A model base path, and the model's name on the servers if it is not the path's last part. "
            "Repeat it for several models.",
        ),
    ],
    target: Annotated[
        tuple[str, ...],
        Option(
            metavar="HOST[:PORT]",
            help="gRPC address of a replica; dns:///NAME[:PORT] stands for every address of the name. "
            "Repeat it for several.",
        ),
    ],
    host: Annotated[str, Option(metavar="ADDRESS", help="Address of the agent's own port.")] = ("127.0.0.1"),
    port: Annotated[
        int, Option(metavar="PORT", min=0, max=65535, help="The agent's own port; 0 takes a free one.")
    ] = 8600,
    token_file: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Ask for `Authorization: Bearer` and this file's content on the own port; not for probes.",
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, Option(metavar="FILE", help="Certificate (PEM) of the own port, which speaks HTTPS then.")
    ] = None,
    tls_key: Annotated[str | None, Option(metavar="FILE", help="Its private key (PEM).")] = None,
    client_ca: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Ask for certificates that this authority (PEM) has signed on the own port; not for probes.",
        ),
    ] = None,
    fresh_within: Annotated[
        float,
        Option(
            metavar="SECONDS", min=0, help="/readyz fails when a replica lacks a delta for longer than this."
        ),
    ] = 30.0,
    step_seconds: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            min=0,
            help="Apply one delta at a time, and wait this long between two. [default: all at once]",
        ),
    ] = None,
    pace_factor: Annotated[
        float | None,
        Option(
            metavar="N",
            min=1,
            help="Spare predictions: apply deltas one by one, with pauses while the p99 of probes is more "
            "than N times that of an idle replica. Probes are the first request of the version's warm-up. "
            "[default: no probes, no pauses]",
        ),
    ] = None,
    pace_max_delay: Annotated[
        float,
        Option(metavar="SECONDS", min=0, help="With --pace-factor a delta waits no longer than this."),
    ] = 5.0,
    probe_seconds: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0.001,
            help="Time between two probes while deltas are applied; ten times that otherwise.",
        ),
    ] = 0.02,
    audit_seconds: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            min=0.05,
            help="Compare a sample of what each replica holds with what is published this often; "
            "for bases exported with --with-digest. [default: never]",
        ),
    ] = None,
    canary: Annotated[
        tuple[str, ...],
        Option(
            metavar="[NAME=]FILE",
            help="Let one replica go first, ask it the golden requests of this file, and let the others "
            "follow, or roll back.",
        ),
    ] = (),
    canary_drift: Annotated[
        float | None,
        Option(
            metavar="FACTOR",
            min=0,
            help="How far a canary's scores may move from those before, as a part of their mean size; "
            "`drift` in the file goes before it. [default: any distance]",
        ),
    ] = None,
    canary_seconds: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0.1,
            help="How long a canary may take, beside the time of its bytes, before another goes first.",
        ),
    ] = 30.0,
    rebuild_config: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="The ModelServerConfig that every target runs with. A replica that --audit-seconds finds to "
            "differ has its model taken out and put back, one at a time, while another serves it. "
            "[default: told, and left to /livez]",
        ),
    ] = None,
    pull: Annotated[
        tuple[str, ...],
        Option(
            metavar="[NAME=]URL",
            help="Fetch what is published there (s3://, gs://, az://) into the model base path. "
            "Repeat it for several models.",
        ),
    ] = (),
    poll_seconds: Annotated[
        float, Option(metavar="SECONDS", min=0.01, help="List directories and stores at least this often.")
    ] = 1.0,
    refresh_seconds: Annotated[
        float, Option(metavar="SECONDS", min=0.05, help="Ask each replica at least this often.")
    ] = 5.0,
    resolve_seconds: Annotated[
        float, Option(metavar="SECONDS", min=0.1, help="Look names up this often.")
    ] = 10.0,
    deadline: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=0.001,
            help="Give a call this long, and a catch-up the time that its bytes take beside it.",
        ),
    ] = 10.0,
    access: Annotated[ServerAccess, Options()] = WITHOUT_TLS,
    json_: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Look after the fleet until a signal comes."""
    with command(json_, quiet, debug) as sink:
        require_libraries("agent", "the agent", *_LIBRARIES)
        stop_on_sigterm()
        from serving.agent import http, page, view
        from serving.agent.canary_keeper import Canaries
        from serving.agent.canary_options import canary_rules
        from serving.agent.fleet import Fleet, Settings
        from serving.agent.journal import Journal
        from serving.agent.metrics import Metrics
        from serving.agent.pacing import PacePolicy
        from serving.agent.publications import Model
        from serving.agent.puller import pullers_of, pulling
        from serving.agent.rebuild import read_rebuild_config
        from serving.agent.recorder import Recorder
        from serving.agent.rollout import Policy
        from serving.agent.targets import Targets
        from serving.credentials import channel_credentials
        from serving.http_tls import HttpTls

        channel_credentials(access)  # what is wrong with its files is said now, not for each replica
        sink.json_lines = True
        models = [Model(name, path) for name, path in _models(model_base_path).items()]
        names = [model.name for model in models]
        journal = Journal()
        pullers = pullers_of(pull, models, journal, poll_seconds)
        if rebuild_config is not None and audit_seconds is None:
            raise UsageError(
                "--rebuild-config without --audit-seconds",
                cause="nobody would find out that a replica differs",
                hint="say how often to compare: --audit-seconds 60",
            )
        token = None if token_file is None else _token(token_file)
        tls = HttpTls.of(tls_cert, tls_key, client_ca)
        pace = None if pace_factor is None else PacePolicy(pace_factor, pace_max_delay, probe_seconds)
        policy = Policy(
            refresh_s=refresh_seconds,
            step_s=step_seconds,
            audit_s=audit_seconds,
            longest_delay_s=None if pace is None else pace.longest_delay_s,
        )
        settings = Settings(
            policy,
            poll_s=poll_seconds,
            resolve_s=resolve_seconds,
            deadline_s=deadline,
            access=access,
            pace=pace,
            rebuild=None if rebuild_config is None else read_rebuild_config(rebuild_config, names),
        )
        tell = _Teller(sink)
        journal.read_by(tell)
        rules = canary_rules(
            canary,
            {model.name: model.path for model in models},
            drift=canary_drift,
            patience_s=canary_seconds,
            deadline_s=deadline,
            access=access,
        )
        canaries = Canaries(rules, journal)
        fleet = Fleet(models, Targets(target), journal, settings, allowed=canaries.allowed)
        look = partial(view.view, fleet, canaries, pullers)
        metrics = Metrics(look)
        journal.read_by(metrics)
        recorder = Recorder(look)
        show = partial(page.page, look, recorder, journal, fresh_within)
        site = http.Site(look, metrics, show, fresh_within, token, client_ca is not None)
        stop = threading.Event()
        try:
            with (
                http.serving(site, host, port, tls) as bound,
                canaries.running(fleet.publications, fleet.members),
                fleet.running(grace_s=deadline),
                pulling(list(pullers.values())),
            ):
                threading.Thread(target=recorder.follow, args=(stop,), daemon=True).start()
                tell.started(host, bound, "http" if tls is None else "https")
                sleep_until_a_signal()
        except KeyboardInterrupt:
            raise SystemExit(int(Exit.INTERRUPTED)) from None
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


def _token(file: str) -> str:
    try:
        text = read_regular(local_path("--token-file", file), _LONGEST_TOKEN).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--token-file {file} cannot be read", cause=str(error), hint="name a file that holds the token"
        ) from error
    if not text:
        raise UsageError(f"--token-file {file} is empty", hint="write the token into it")
    if not text.isprintable() or " " in text:  # no client could ever send it
        raise UsageError(
            f"--token-file {file} holds more than one word", hint="write the token alone into it"
        )
    return text

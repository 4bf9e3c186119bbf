"""`serve-model agent`: read options, in one struct per subject, and keep a fleet fresh until a signal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import Exit, ExportError, UsageError
from exporter.options import ANYBODY, Option, Trusting, in_parts
from exporter.options.given import parse_duration
from exporter.options.words import Part, number
from exporter.storage.files import read_regular
from exporter.storage.local_paths import local_path, path_parser, quoted
from exporter.terminal import Leave, sleep_until_a_signal, stop_on_sigterm
from exporter.terminal.edge import AS_TEXT, OutputFlags, command
from exporter.terminal.output import Output, OutputMode, quote_logs
from exporter.terminal.parameters import pairs
from exporter.terminal.server_access import ServerAccess
from serving.documents import AgentStarted
from serving.optional_libraries import require_libraries

if TYPE_CHECKING:
    from exporter.wire.protos import Proto
    from serving.agent.journal import AgentEvent, Journal
    from serving.agent.labels import LabelRules
    from serving.agent.pacing import PacePolicy
    from serving.agent.publications import FollowedModel
    from serving.agent.replica import Settings
    from serving.agent.view import FleetView
    from serving.http_port import HttpTls


_LONGEST_TOKEN = 4096
_MOST_SHOWN = 5


class PortFlags(Struct, frozen=True):
    """The agent's own port."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address of the agent's own port.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="The agent's own port; 0 takes a free one.")
    ] = 8600
    allow_host: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Further names of the agent's port, which refuses requests for other names unless it speaks "
            "HTTPS. Its own are addresses, localhost and --host, and names without a dot unless it listens "
            "on a loopback address. `*.NAME` is every name below it, `*` every name.",
        ),
    ] = None
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Require `Authorization: Bearer` with this file's content on the agent's port; not for "
            "probes.",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Certificate (PEM) of the agent's port, which then speaks HTTPS."),
    ] = None
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key (PEM).")] = None
    client_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Require client certificates of this authority (PEM) on the agent's port; not for probes.",
        ),
    ] = None
    fresh_within: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="A replica that has lacked a delta for longer than this is late, and /freshz fails.",
        ),
    ] = 30.0

    def tls(self) -> HttpTls | None:
        """Return the files of the port's certificate, its key and its clients' authority; None without any.

        UsageError if only one of certificate and key is given, or a file cannot be used.
        """
        from serving.http_port import HttpTls

        return HttpTls.of(self.tls_cert, self.tls_key, self.client_ca)

    def token(self) -> str | None:
        """Return the token that requests need, one word; None without --token-file.

        UsageError if the file cannot be read or does not hold exactly one word; LfsPointer if it is a pointer
        of Git LFS.
        """
        if self.token_file is None:
            return None
        file = self.token_file
        try:
            text = read_regular(local_path("--token-file", file), _LONGEST_TOKEN).decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--token-file {file} cannot be read",
                cause=str(error),
                hint="name a file that holds the token",
            ) from error
        if not text:
            raise UsageError(f"--token-file {file} is empty", hint="write the token into it")
        if not text.isprintable() or " " in text:  # clients could not send it in a header
            raise UsageError(
                f"--token-file {file} holds more than one word", hint="write only the token into it"
            )
        return text


_of_canary = partial(Option, goes_with="--canary")


class PaceFlags(Struct, frozen=True):
    """Options for the pace at which deltas are applied."""

    step_seconds: Annotated[
        float | None,
        in_parts(
            {
                "step=TIME": Part(
                    "step_seconds", "one at a time, with this pause between two", parse_duration
                ),
                "factor=N": Part(
                    "pace_factor",
                    "one by one, with pauses while the p99 of probes is more than N times that of an idle "
                    "replica; a probe is the first request of the version's warm-up",
                    number,
                    least=1,
                ),
                "max-delay=TIME": Part(
                    "pace_max_delay",
                    "with factor, a delta waits at most this long, by default 5",
                    parse_duration,
                    needs=("pace_factor",),
                ),
                "probe=TIME": Part(
                    "probe_seconds",
                    "with factor, the time between two probes while deltas are applied, by default 0.02; ten "
                    "times as long otherwise",
                    parse_duration,
                    least=0.001,
                    needs=("pace_factor",),
                ),
            },
            "How to apply deltas, if not all at once",
            name="--pace",
            metavar="WORD=VALUE",
        ),
    ] = None
    pace_factor: float | None = None
    pace_max_delay: float = 5.0
    probe_seconds: float = 0.02

    def policy(self) -> PacePolicy | None:
        """Return the limits of pacing by latency; None without --pace factor."""
        from serving.agent.pacing import PacePolicy

        if self.pace_factor is None:
            return None
        return PacePolicy(self.pace_factor, self.pace_max_delay, self.probe_seconds)


class AuditFlags(Struct, frozen=True):
    """The option for rebuilding replicas in which an audit finds a difference."""

    rebuild_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_parser("--rebuild-config"),
            help="The ModelServerConfig that every target runs with. If an audit finds a replica that "
            "differs, the agent removes its model from the server and adds it again, one replica at a time, "
            "while another serves the model.",
            show_default="an event, and /livez fails",
        ),
    ] = None

    def rebuild(self, models: Sequence[str], audit_seconds: float | None) -> Callable[[], Proto] | None:
        """Return a function that reads the servers' configuration anew; None without --rebuild-config.

        The file is read once now. `models` are the names of the agent's models, which it must list;
        `audit_seconds` is the time between audits, None without audits. UsageError if nothing is audited, or
        the file cannot be used; LfsPointer if it is a pointer of Git LFS. The function raises both, too.
        """
        if self.rebuild_config is None:
            return None
        if audit_seconds is None:
            raise UsageError(
                "--rebuild-config without --every audit",
                cause="only an audit finds that a replica differs",
                hint="set how often to audit: --every audit=1m",
            )
        from serving.model_config import read_servers_config

        read = partial(read_servers_config, "--rebuild-config", self.rebuild_config, models)
        read()
        return read


class CanaryFlags(Struct, frozen=True):
    """Options for canaries: the golden requests, and the limits within which a canary passes them."""

    canary: Annotated[
        tuple[str, ...],
        Option(
            "Let one replica go first, send it the golden requests of this file, and let the others "
            "follow, or roll back.",
            metavar="[NAME=]FILE",
        ),
    ] = ()
    canary_drift: Annotated[
        float | None,
        _of_canary(
            "How far a canary's scores may move from the scores before, as a fraction of their mean "
            "absolute value; `drift` in the file overrides it.",
            metavar="FACTOR",
            least=0,
            default="no limit",
        ),
    ] = None
    canary_seconds: Annotated[
        float,
        _of_canary(
            "How long a canary may take, plus the time for its bytes, before another goes first.",
            metavar="SECONDS",
            least=0.1,
        ),
    ] = 30.0


class EventFlags(Struct, frozen=True):
    """Options for the command that is run for events."""

    on_event: Annotated[
        str | None,
        Option(
            "Run this command for events: rolled_back, held, base_wanted, silent, damaged. It gets each "
            "as variables (EVENT_WHAT, EVENT_MODEL, EVENT_MESSAGE, ...) and JSON on stdin, without a shell.",
            metavar="COMMAND",
            default="none",
        ),
    ] = None
    on_event_seconds: Annotated[
        float,
        Option(
            "How long such a command may take before it is ended.",
            metavar="SECONDS",
            least=0.1,
            goes_with="--on-event",
        ),
    ] = 30.0

    def run(self, journal: Journal) -> AbstractContextManager[None]:
        """Return a context manager for a block in which the command runs for the journal's events.

        Without --on-event it does nothing. Events are queued from this call on; a failure of the command is
        written to the journal as an event. UsageError if the command is malformed, or its program does not
        exist.
        """
        if self.on_event is None:
            return nullcontext()
        from serving.agent.event_command import EventCommand, parse_command
        from serving.agent.journal import AgentEvent, EventKind

        runner = EventCommand(
            parse_command(self.on_event),
            self.on_event_seconds,
            lambda why: journal.write(AgentEvent(EventKind.FAILED, why)),
        )
        journal.read_by(runner)
        return runner.running()


class LabelFlags(Struct, frozen=True):
    """Options for labels of servers that follow tags."""

    label: Annotated[
        tuple[str, ...],
        Option(
            "Keep this label of the servers at the version that this tag names, or whose deltas lead to the "
            "tag. Repeatable; needs --model-config-file.",
            metavar="LABEL=TAG",
        ),
    ] = ()
    model_config_file: Annotated[
        Path | None,
        Option(
            "The ModelServerConfig that every target runs with: a server unloads each model that it does "
            "not list.",
            metavar="FILE",
            parse=local_path,
            goes_with="--label",
        ),
    ] = None

    def rules(self, models: Mapping[str, Path], *, is_trusting: bool) -> LabelRules | None:
        """Return the tag for each label, with the servers' configuration file; None without --label.

        `models` has the agent's directories by name; `is_trusting` is True with --trust. UsageError if keys
        are trusted, a value is not LABEL=TAG, or the file is not given, cannot be used or lacks one of the
        models; LfsPointer if it is a pointer of Git LFS.
        """
        if not self.label:
            return None
        if is_trusting:
            raise UsageError(
                "--label and --trust exclude each other",
                cause="tags are not signed, so that anybody who can write to the model would move the label",
                hint="leave out --label, and name the version: serve-model reload --label LABEL=VERSION",
            )
        tags = pairs("--label", self.label)
        if self.model_config_file is None:
            raise UsageError(
                "--label needs --model-config-file",
                cause="labels are set by a new configuration, a server unloads every model that it does not "
                "list, and servers do not say what else they serve",
                hint="name the file that the servers run with: --model-config-file models.config",
            )
        from exporter.publish.tags import is_position, require_tag_name
        from serving.agent.labels import LabelRules
        from serving.model_config import read_servers_config

        for label, tag in tags.items():
            try:
                require_tag_name(tag)
            except UsageError as error:
                error.message = f"--label {label}={tag}: {error.message}"
                if is_position(tag):
                    model = next(iter(models.values()))
                    command = f"export-model tag {quoted(model)} {quoted(label)} {quoted(tag)}"
                    error.hint = f"name that position by a tag: {command}"
                raise
        read_servers_config("--model-config-file", self.model_config_file, models)
        return LabelRules(tags, self.model_config_file, models)


class TimeFlags(Struct, frozen=True):
    """Options for polling directories, stores, replicas and names, and for the deadline of calls."""

    poll_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.01, help="List directories and stores at least this often."),
    ] = 1.0
    refresh_seconds: Annotated[
        float,
        in_parts(
            {
                "refresh=TIME": Part(
                    "refresh_seconds",
                    "ask each replica for its position at least this often, by default 5",
                    parse_duration,
                    least=0.05,
                ),
                "audit=TIME": Part(
                    "audit_seconds",
                    "compare a sample of each replica's values with the published ones; for bases exported "
                    "with --add digest",
                    parse_duration,
                    least=0.05,
                ),
                "publication=TIME": Part(
                    "expect_every",
                    "expect one at least this often, by default three times the longest of the usual "
                    "intervals; a publisher that is silent for longer is a finding",
                    parse_duration,
                ),
                "resolve=TIME": Part(
                    "resolve_seconds", "resolve names, by default every 10", parse_duration, least=0.1
                ),
            },
            "How often, as in 90 (seconds), 15m, 2h, 1d",
            name="--every",
            metavar="WHAT=TIME",
        ),
    ] = 5.0
    audit_seconds: float | None = None
    expect_every: float | None = None
    resolve_seconds: float = 10.0
    no_read_ahead: Annotated[
        bool,
        typer.Option(
            "--no-read-ahead",
            help="Do not let the kernel read the mapped tables of a new version before servers are asked for "
            "them.",
        ),
    ] = False
    deadline: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="Give a call this long, and a catch-up also the time for its bytes.",
        ),
    ] = 10.0


_LIBRARIES = ("h11", "jinja2", "prometheus_client")


def agent(
    model_base_path: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]DIR",
            help="A model base path, and the model's name on the servers if it differs from the path's last "
            "part. Repeat it for several models.",
        ),
    ],
    target: Annotated[
        list[str],
        typer.Option(
            metavar="HOST[:PORT]",
            help="gRPC address of a replica; dns:///NAME[:PORT] means every address of the name. "
            "Repeat it for several.",
        ),
    ],
    own: PortFlags,
    pacing: PaceFlags,
    audits: AuditFlags,
    canary: CanaryFlags,
    events: EventFlags,
    labels: LabelFlags,
    times: TimeFlags,
    access: ServerAccess,
    pull: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Fetch the model published at this URL (s3://, gs://, az://) into the model base path. "
            "Repeat it for several models.",
        ),
    ] = None,
    trusting: Trusting = ANYBODY,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Keep model servers at the newest publication of their models.

    For each replica and each loaded version, the agent asks for the position, applies the missing deltas and
    confirms the new position. It notices a new delta at once on local disks, elsewhere within --poll-seconds.
    A replica that hangs, refuses, restarts or vanishes delays no other. All state is in the replicas and
    the directory: the agent may be killed at any time, and two agents do no harm.

    With --canary, one replica goes first; golden requests decide whether the others follow. With --label,
    labels of the servers follow tags.

    The agent's own port serves /metrics (Prometheus), /healthz, /readyz, /freshz, /livez, /status.json, and
    a status page at /.

    \b
    Examples:
      serve-model agent --model-base-path models/ranker --target 127.0.0.1:8500
      serve-model agent --model-base-path prod=/models/ranker --target dns:///model-servers:8500 --json
      serve-model agent --model-base-path models/ranker --target dns:///model-servers --canary golden.json
      serve-model agent --model-base-path models/ranker --target 127.0.0.1:8500 --pull s3://models/ranker
      serve-model agent --model-base-path models/r --target 127.0.0.1:8500 --pull s3://models/r --trust k.pem
    """
    with command(printing) as sink:
        quote_logs()
        require_libraries("agent", "the agent", *_LIBRARIES)
        # After `command`, whose handler of SIGTERM this replaces: here SIGTERM is the usual end, exit code 0.
        stop_on_sigterm()
        from serving.agent import view
        from serving.agent.by_model import by_model
        from serving.agent.canary_keeper import Canaries, canary_rules
        from serving.agent.fleet import Fleet, Targets
        from serving.agent.journal import Journal
        from serving.agent.puller import pullers_of, pulling
        from serving.credentials import channel_credentials

        channel_credentials(access)  # report bad files once now, not for each replica
        sink.json_lines = True
        paths = _models(tuple(model_base_path))
        journal = Journal()
        if trusting.signed_as and len(paths) > 1:
            raise UsageError(
                f"--signed-as names one model, and there are {len(paths)}",
                hint="leave it out, and sign each under the last part of its path or URL",
            )
        has_canary = by_model("--canary", canary.canary, paths)
        pullers = pullers_of(pull or (), paths, journal, times.poll_seconds, trusting, has_canary)
        models = _followed(paths, pullers)
        rules_of_labels = labels.rules(paths, is_trusting=bool(trusting.trust))
        settings = replace(_settings(times, pacing, audits, access, paths), labels=rules_of_labels)
        printer = _EventPrinter(sink)
        journal.read_by(printer)
        rules = canary_rules(
            canary.canary,
            paths,
            drift=canary.canary_drift,
            patience_s=canary.canary_seconds,
            deadline_s=times.deadline,
            access=access,
        )
        canaries = Canaries(rules, journal)
        on_event = events.run(journal)
        try:
            with ExitStack() as stack:
                # They end in reverse: first what writes events, last what handles them.
                stack.enter_context(on_event)
                if trusting.trust:
                    not_pulled = [model for model in models if model.name not in pullers]
                    _trust(not_pulled, trusting, rules, stack)
                fleet = Fleet(models, Targets(target), journal, settings, allowed=canaries.allowed)
                look = partial(view.view, fleet, canaries, pullers, times.expect_every)
                bound = stack.enter_context(_own_port(own, journal, look))
                stack.enter_context(canaries.running(fleet.publications, fleet.observed))
                stack.enter_context(fleet.running(grace_s=times.deadline))
                stack.enter_context(pulling(list(pullers.values())))
                printer.started(own.host, bound, "http" if own.tls_cert is None else "https")
                sleep_until_a_signal()
        except KeyboardInterrupt:
            raise Leave(int(Exit.INTERRUPTED)) from None


def _followed(paths: Mapping[str, Path], fetched: Collection[str]) -> list[FollowedModel]:
    """Return the models that the agent follows, in the order of `paths`, which has their paths by name.

    Those named in `fetched` are marked as copies of a store.
    """
    from serving.agent.publications import FollowedModel

    return [FollowedModel(name, path, is_copy=name in fetched) for name, path in paths.items()]


def _trust(
    models: Iterable[FollowedModel], trusting: Trusting, canaries: Collection[str], stack: ExitStack
) -> None:
    """Let this process ignore publications of `models` that no trusted key has signed, until `stack` closes.

    Others may write to these models; of the models of `--pull`, publications are checked before they are
    stored. `canaries` has the names of models with a canary.

    Raises:
        UsageError: a key cannot be used, or one of `models` has a canary.
        NotTrusted: the identity that is pinned in a directory cannot be read.
    """
    from exporter.publish.versions import in_force
    from exporter.transfer.opened import trust_in

    for model in models:
        if model.name in canaries:
            raise UsageError(
                f"--trust and --canary need a copy of {model.name}",
                cause="a canary's rollback is a publication, and the agent has no key to sign it",
                hint="fetch the model into a directory of the agent's own: --pull URL",
            )
        stack.enter_context(in_force(model.path, trust=trust_in(trusting, model.path)))


def _settings(
    times: TimeFlags, pacing: PaceFlags, audits: AuditFlags, access: ServerAccess, models: Iterable[str]
) -> Settings:
    """Return the settings of the fleet, without rules of labels.

    `models` are the models' names. UsageError if --rebuild-config is given and nothing is audited, or its
    file cannot be used; LfsPointer if the file is a pointer of Git LFS.
    """
    from serving.agent.replica import Settings
    from serving.agent.rollout import RolloutPolicy

    pace = pacing.policy()
    policy = RolloutPolicy(
        refresh_s=times.refresh_seconds,
        step_s=pacing.step_seconds,
        audit_s=times.audit_seconds,
        longest_delay_s=None if pace is None else pace.longest_delay_s,
    )
    return Settings(
        policy,
        poll_s=times.poll_seconds,
        reads_ahead=not times.no_read_ahead,
        resolve_s=times.resolve_seconds,
        deadline_s=times.deadline,
        access=access,
        pace=pace,
        rebuild=audits.rebuild([*models], times.audit_seconds),
    )


@contextmanager
def _own_port(own: PortFlags, journal: Journal, look: Callable[[], FleetView]) -> Iterator[int]:
    """Serve metrics, probes and the status page of the fleet during the block; yield the port's number.

    `look` returns the fleet's present state. A thread, told to stop at the end of the block, records samples
    and writes events of changes to the journal. At entry ServerError if the port cannot listen, UsageError
    for a bad option (certificate, token file, host names), LfsPointer if the token file is a pointer of Git
    LFS.
    """
    from serving.agent import http
    from serving.agent.changes import Changes
    from serving.agent.metrics import Metrics
    from serving.agent.view import Recorder

    metrics = Metrics(look)
    journal.read_by(metrics)
    recorder = Recorder(look, Changes(journal, own.fresh_within).look)
    show = partial(http.page, look, recorder, journal, own.fresh_within)
    site = http.Site(look, metrics, show, own.fresh_within, own.token(), own.client_ca is not None)
    stop = threading.Event()
    with http.serving(site, own.host, own.port, own.tls(), own.allow_host) as bound:
        threading.Thread(target=recorder.follow, args=(stop,), daemon=True).start()
        try:
            yield bound
        finally:
            stop.set()


class _EventPrinter:
    """A printer of events: lines, or documents with --json; with -q only events that need an operator."""

    def __init__(self, sink: Output) -> None:
        self._sink = sink
        self._is_lost = False

    def started(self, host: str, port: int, scheme: str) -> None:
        """Print the address of the agent's port; `scheme` is `http` or `https`.

        If printing fails, a warning says so.
        """
        self._print_or_warn(partial(self._print_start, host, port, scheme))

    def __call__(self, event: AgentEvent) -> None:
        """Print an event; with -q only one for which an operator may have to act.

        If printing fails, a warning says so, once until printing succeeds again.
        """
        self._print_or_warn(partial(self._print, event))

    def _print_or_warn(self, write: Callable[[], None]) -> None:
        """Call `write`, which prints; if it fails (a full disk, a closed pipe), warn that events are lost.

        The warning is not repeated until `write` succeeds again.
        """
        try:
            write()
        except (ExportError, OSError) as error:
            if not self._is_lost:
                why = error.cause if isinstance(error, ExportError) else error.strerror
                self._sink.warn(f"events are lost, because they cannot be written to standard output: {why}")
            self._is_lost = True
        else:
            self._is_lost = False

    def _print_start(self, host: str, port: int, scheme: str) -> None:
        shown = f"[{host}]" if ":" in host else host
        self._sink.note(f"status page and metrics on {scheme}://{shown}:{port}/")
        if self._sink.mode is OutputMode.JSON:
            self._sink.result(AgentStarted("started", host, port))

    def _print(self, event: AgentEvent) -> None:
        where = " ".join(part for part in (event.model, event.replica) if part)
        seconds = event.behind_seconds
        served = "" if seconds is None else f", served {seconds:.3f} s after its publication"
        line = f"{where}: {event.message}{served}" if where else event.message
        if self._sink.mode is OutputMode.JSON:
            self._sink.result(event)
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
                f"--model-base-path {text}: the name {name!r} is given twice"
                if name
                else f"--model-base-path {text} does not name the model",
                hint="give each model a name of its own: --model-base-path NAME=DIR",
            )
        _require_no_parent(path, name if separator else "")
        models[name] = path
    return models


def _require_no_parent(path: Path, name: str) -> None:
    """Raise UsageError for a directory of several models, in which nothing will ever be published.

    `name` is the name given with the path, or "", for the hint. A directory that does not exist, or holds
    neither versions nor models, passes. ManifestError if it cannot be listed.
    """
    from exporter.publish.versions import models_in, newest_version

    if path.is_dir() and newest_version(path) is None and (found := models_in(path)):
        meant = f"{name}={path / found[0]}" if name else str(path / found[0])
        raise UsageError(
            f"{path} is no model: it holds {', '.join(found[:_MOST_SHOWN])}",
            hint=f"name each model: --model-base-path {quoted(meant)}",
        )

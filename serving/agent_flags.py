"""The options of `serve-model agent`, a struct for each thing that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from exporter.errors import UsageError
from exporter.files import read_regular
from exporter.local_paths import local_path, path_parser

if TYPE_CHECKING:
    from exporter.wire.protos import Proto
    from serving.agent.pacing import PacePolicy
    from serving.http_tls import HttpTls

_LONGEST_TOKEN = 4096


class PortFlags(Struct, frozen=True):
    """The agent's own port."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address of the agent's own port.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="The agent's own port; 0 takes a free one.")
    ] = 8600
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Ask for `Authorization: Bearer` and this file's content on the own port; not for probes.",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Certificate (PEM) of the own port, which speaks HTTPS then."),
    ] = None
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key (PEM).")] = None
    client_ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Ask for certificates that this authority (PEM) has signed on the own port; not for probes.",
        ),
    ] = None
    fresh_within: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="/readyz fails when a replica lacks a delta for longer than this."
        ),
    ] = 30.0

    def tls(self) -> HttpTls | None:
        """The files of its certificate.

        Raises:
            UsageError: they cannot be used.
        """
        from serving.http_tls import HttpTls

        return HttpTls.of(self.tls_cert, self.tls_key, self.client_ca)

    def token(self) -> str | None:
        """What is asked for, one word.

        Raises:
            UsageError: the file cannot be read, or holds something else.
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
        if not text.isprintable() or " " in text:  # no client could ever send it
            raise UsageError(
                f"--token-file {file} holds more than one word", hint="write the token alone into it"
            )
        return text


class PaceFlags(Struct, frozen=True):
    """How fast deltas are applied."""

    step_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Apply one delta at a time, and wait this long between two.",
            show_default="all at once",
        ),
    ] = None
    pace_factor: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Spare predictions: apply deltas one by one, with pauses while the p99 of probes is more "
            "than N times that of an idle replica. Probes are the first request of the version's warm-up. "
            "",
            show_default="no probes, no pauses",
        ),
    ] = None
    pace_max_delay: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="With --pace-factor a delta waits no longer than this."),
    ] = 5.0
    probe_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="Time between two probes while deltas are applied; ten times that otherwise.",
        ),
    ] = 0.02

    def policy(self) -> PacePolicy | None:
        """How far predictions are spared; None: not at all."""
        from serving.agent.pacing import PacePolicy

        if self.pace_factor is None:
            return None
        return PacePolicy(self.pace_factor, self.pace_max_delay, self.probe_seconds)


class AuditFlags(Struct, frozen=True):
    """Whether replicas hold what was published."""

    audit_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.05,
            help="Compare a sample of what each replica holds with what is published this often; "
            "for bases exported with --with-digest.",
            show_default="never",
        ),
    ] = None
    rebuild_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_parser("--rebuild-config"),
            help="The ModelServerConfig that every target runs with. A replica that --audit-seconds finds to "
            "differ has its model taken out and put back, one at a time, while another serves it. "
            "",
            show_default="told, and left to /livez",
        ),
    ] = None

    def rebuild(self, models: Sequence[str]) -> Proto | None:
        """What servers run with, to be sent to one that differs.

        Raises:
            UsageError: it cannot be used, or nobody would find out that a replica differs.
        """
        if self.rebuild_config is None:
            return None
        if self.audit_seconds is None:
            raise UsageError(
                "--rebuild-config without --audit-seconds",
                cause="nobody would find out that a replica differs",
                hint="say how often to compare: --audit-seconds 60",
            )
        from serving.agent.rebuild import read_rebuild_config

        return read_rebuild_config(self.rebuild_config, models)


class CanaryFlags(Struct, frozen=True):
    """Which replica goes first, and what it is asked."""

    canary: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]FILE",
            help="Let one replica go first, ask it the golden requests of this file, and let the others "
            "follow, or roll back.",
        ),
    ] = []
    canary_drift: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            min=0,
            help="How far a canary's scores may move from those before, as a part of their mean size; "
            "`drift` in the file goes before it.",
            show_default="any distance",
        ),
    ] = None
    canary_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            help="How long a canary may take, beside the time of its bytes, before another goes first.",
        ),
    ] = 30.0


class TimeFlags(Struct, frozen=True):
    """How often everything is looked at, and how long a call may take."""

    poll_seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.01, help="List directories and stores at least this often."),
    ] = 1.0
    refresh_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.05, help="Ask each replica at least this often.")
    ] = 5.0
    resolve_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Look names up this often.")
    ] = 10.0
    deadline: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.001,
            help="Give a call this long, and a catch-up the time that its bytes take beside it.",
        ),
    ] = 10.0

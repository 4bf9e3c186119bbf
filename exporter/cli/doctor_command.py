"""`export-model doctor`: list what is wrong with a model, or soon will be, each with the command that helps.

The one place of the exporter where model servers are asked: what is published and what is served meet here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from exporter.cli.log_commands import ModelArgument
from exporter.options import Option
from exporter.storage.local_paths import checkpoint_parser
from exporter.storage.url import Url
from exporter.terminal.edge import AS_TEXT, OutputFlags, command
from exporter.terminal.output import Output, escape, labelled
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from exporter.transfer.opened import opened

if TYPE_CHECKING:
    from exporter.cli.examination import AskedServer, Examination, Finding


_of_target = partial(Option, goes_with="--target")


class ServerFlags(Struct, frozen=True):
    """The model servers that are asked."""

    target: Annotated[
        tuple[str, ...], Option("Also check this model server. Repeatable.", metavar="HOST[:PORT]")
    ] = ()
    model_name: Annotated[
        str | None,
        _of_target("The model's name there.", metavar="NAME", default="MODEL's last part"),
    ] = None
    patience: Annotated[
        float,
        _of_target("How long a server may take to serve what is published.", metavar="SECONDS", least=0),
    ] = 60.0
    deadline: Annotated[
        float, _of_target("How long to wait for a server's answer.", metavar="SECONDS", least=0.001)
    ] = 5.0


NO_SERVER = ServerFlags()


def doctor(
    model: ModelArgument,
    ckpt_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|PREFIX",
            parser=checkpoint_parser("--ckpt-dir"),
            help="Also check the checkpoints that the next export would read.",
        ),
    ] = None,
    servers: ServerFlags = NO_SERVER,
    access: ServerAccess = WITHOUT_TLS,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """List what is wrong with a published model, or soon will be, with the command that helps.

    Looks at files and checksums, ways from each base to the newest position, holds, permissions, clocks and
    left-overs; with --ckpt-dir at what the next export reads, with --target at what servers serve. Nothing is
    changed. Warnings do not fail; what is wrong does, with exit code 6 if it is on disk, 3 if it is the
    checkpoint alone, 7 if it is servers alone.

    \b
    Examples:
      export-model doctor models/ranker
      export-model doctor models/ranker --ckpt-dir train/ --target localhost:8500 --target 10.0.0.7
    """
    with command(printing) as sink, opened(model, read_only=True) as opened_model:
        from exporter.cli.examination import diagnosis, examine, judge

        model, now = opened_model.path, time.time()
        name = servers.model_name or model.resolve().name
        replicas = [_ask(address, name, servers.deadline, access) for address in servers.target]

        def look() -> tuple[Examination, list[Finding]]:
            seen = examine(model, ckpt_dir, now=now, is_remote=opened_model.is_remote)
            judged = (
                judge(model, seen.found, replica, now=now, patience=servers.patience) for replica in replicas
            )
            return seen, [*seen.findings, *chain.from_iterable(judged)]

        seen, findings = opened_model.carry(look)
        _report(seen, findings, replicas, ckpt_dir, sink)
        error = diagnosis(model, findings)
        if error is not None:
            raise error


def _ask(address: str, name: str, deadline: float, access: ServerAccess) -> AskedServer:
    from exporter.cli.examination import AVAILABLE, AskedServer, ServedState
    from exporter.errors import CallFailed
    from serving.client import ModelClient
    from serving.updates import read_incremental_status

    with ModelClient(address, name, deadline_s=deadline, access=access) as client:
        versions: dict[int, ServedState] = {}
        try:
            for status in client.status():
                at = (
                    read_incremental_status(client, status.version)
                    if status.state.name == AVAILABLE
                    else None
                )
                versions[status.version] = ServedState(
                    status.state.name,
                    f"{status.code.name}: {status.message}" if status.code else "",
                    None if at is None else at.position,
                    None if at is None else at.lineage,
                )
        except CallFailed as error:
            return AskedServer(client.address, name, failure=error)
        return AskedServer(client.address, name, versions)


def _report(
    seen: Examination,
    findings: list[Finding],
    replicas: list[AskedServer],
    ckpt_dir: Path | None,
    sink: Output,
) -> None:
    from exporter.cli.documents.diagnosis import Diagnosis, Target

    found = seen.found
    wrong = sum(finding.level.value == "wrong" for finding in findings)
    document = Diagnosis(
        model=str(seen.model),
        status="wrong" if wrong else "warnings" if findings else "well",
        versions=found.versions,
        deltas=len(found.log.deltas) if found.log else 0,
        position=found.at.position if found.at else None,
        step=found.at.step if found.at else None,
        hold=found.hold,
        ckpt_dir=None if ckpt_dir is None else str(ckpt_dir),
        targets=[
            Target(
                address=replica.address,
                model=replica.name,
                versions={str(number): answer.state for number, answer in replica.versions.items()},
                positions={str(number): answer.position for number, answer in replica.versions.items()},
            )
            for replica in replicas
        ],
        findings=findings,
    )
    sink.result(document, _lines(seen, findings, replicas, ckpt_dir))


def _lines(
    seen: Examination, findings: list[Finding], replicas: list[AskedServer], ckpt_dir: Path | None
) -> Iterator[str]:
    from exporter.terminal.progress import count

    found = seen.found
    deltas = f", {count(len(found.log.deltas), 'delta')}" if found.log else ", which takes no deltas"
    at = f", position {found.at}" if found.at else ""
    yield labelled("model", f"{seen.model}: {count(found.versions, 'version')}{deltas}{at}")
    asked = [
        *([f"checkpoints in {Url.parse(str(ckpt_dir)) or ckpt_dir}"] if ckpt_dir else []),
        *(replica.address for replica in replicas),
    ]
    if asked:
        yield labelled("asked", ", ".join(asked))
    wrong = sum(finding.level.value == "wrong" for finding in findings)
    told = f"{wrong} wrong, {count(len(findings) - wrong, 'warning')}" if findings else "nothing wrong"
    yield labelled("found", told)
    for finding in sorted(findings, key=lambda finding: finding.level.value, reverse=True):
        colour = "red" if finding.level.value == "wrong" else "yellow"
        yield ""
        level = f"[bold {colour}]{finding.level.value:<8}[/]"
        yield f"{level} [bold]{finding.check.value}[/]: {escape(finding.message)}"
        if finding.cause:
            yield f"{'':<9}cause: {escape(finding.cause)}"
        is_command = finding.command.startswith(("export-model ", "serve-model "))
        yield f"{'':<9}{'$' if is_command else 'hint:'} {escape(finding.command)}"

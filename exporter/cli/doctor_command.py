"""`export-model doctor`: list present and coming problems of a model, each with the command that helps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct
from msgspec.structs import replace

from exporter.cli.log_commands import ModelArgument
from exporter.options import ANYBODY, Option, Trusting
from exporter.storage.local_paths import checkpoint_parser
from exporter.storage.url import Url
from exporter.terminal.edge import AS_TEXT, OutputFlags, command
from exporter.terminal.output import Output, escape, labelled
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess

if TYPE_CHECKING:
    from exporter.cli.documents.logs import Diagnosis
    from exporter.pipeline.doctor import Examination
    from exporter.publish.judge import Finding


_of_target = partial(Option, goes_with="--target")


class ServerFlags(Struct, frozen=True):
    """The model servers and the agent to ask."""

    target: Annotated[
        tuple[str, ...], Option("Also check this model server. Repeatable.", metavar="HOST[:PORT]")
    ] = ()
    model_name: Annotated[
        str | None,
        _of_target("The model's name there.", metavar="NAME", default="MODEL's last part"),
    ] = None
    patience: Annotated[
        float,
        _of_target("How long a server may take to serve the newest publication.", metavar="SECONDS", least=0),
    ] = 60.0
    deadline: Annotated[
        float, _of_target("How long to wait for a server's answer.", metavar="SECONDS", least=0.001)
    ] = 5.0

    agent: Annotated[
        str | None,
        Option(
            "Also ask this agent what it finds: the address of its own port.", metavar="URL", default="none"
        ),
    ] = None


NO_SERVER = ServerFlags()
_LONGEST_ANSWER = 64 << 20
_LONGEST_WAIT = 1e6  # a socket counts milliseconds in 32 bits
_COMMANDS = ("export-model ", "serve-model ", "cd ", "curl ", "df ", "du ")


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
    trusting: Trusting = ANYBODY,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """List present and coming problems of a published model, each with the command that helps.

    Looks at files and checksums, ways from each base to the newest position, holds, permissions, clocks, room
    and left-overs; with --ckpt-dir at what the next export reads, with --target at what servers serve, with
    --agent at what an agent finds. Nothing is changed. Warnings do not fail; what is wrong does, with exit
    code 6 if any of it is on disk, else 3 if any is in the checkpoint, else 7 (servers or the agent).

    \b
    Examples:
      export-model doctor models/ranker
      export-model doctor models/ranker --ckpt-dir train/ --target localhost:8500 --target 10.0.0.7
    """
    with command(printing) as sink:
        from exporter import api
        from exporter.errors import NotUpdatable
        from exporter.pipeline.doctor import diagnosis
        from exporter.publish.kept_export import export_kept_of

        try:
            seen = api.doctor(
                model,
                ckpt_dir=ckpt_dir,
                targets=servers.target,
                model_name=servers.model_name,
                patience=servers.patience,
                deadline=servers.deadline,
                access=access,
                trusting=trusting,
            )
        except NotUpdatable as nothing:
            if again := export_kept_of(model):  # the model existed, and its directory was emptied
                nothing.hint = f"put it back, or publish a base as before: {again}"
            raise
        if servers.agent is not None:
            name = servers.model_name or seen.model.resolve().name
            told = _ask_agent(servers.agent, name, servers.deadline)
            seen = replace(seen, findings=(*seen.findings, *told))
        _report(seen, Url.parse(str(model)), sink, has_agent=servers.agent is not None)
        error = diagnosis(model, seen.findings)
        if error is not None:
            raise error


def _ask_agent(address: str, model: str, deadline: float) -> Iterator[Finding]:
    """Ask an agent over HTTP for its findings, and yield the problems and warnings of one model.

    `address` is the URL or HOST:PORT of its own port, `model` the model's name. A failure to answer within
    `deadline` seconds is a finding, too, and so are an answer of unknown form and a model that the agent does
    not keep; nothing is raised.
    """
    import json
    import urllib.request

    from exporter.publish.judge import Code, Finding, Level, command

    address = (address if "://" in address else f"http://{address}").rstrip("/")
    again = command("curl", "-sS", f"{address}/healthz")
    try:
        if not address.startswith(("http://", "https://")):
            raise ValueError("expected http:// or https://")
        with urllib.request.urlopen(f"{address}/status.json", timeout=min(deadline, _LONGEST_WAIT)) as answer:
            document = json.loads(answer.read(_LONGEST_ANSWER))
        codes = {code.value: code for code in Code}
        found = [(codes[each["code"]], each) for each in document["findings"] if each["model"] == model]
        known = {each["name"] for each in document["models"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = str(getattr(error, "reason", None) or error)
        yield Finding(Code.AGENT_DOWN, f"the agent at {address} does not answer", why, again)
        return
    if model not in known:
        why = f"it keeps {', '.join(sorted(map(str, known)))}"
        yield Finding(Code.AGENT_DOWN, f"the agent at {address} does not keep {model}", why, again)
    levels = {level.on_page: level for level in Level}
    for code, each in found:
        if (level := levels.get(each["level"], Level.WARNING)) in (Level.WRONG, Level.WARNING):
            text, why, then = (str(each.get(name, "")) for name in ("text", "details", "command"))
            yield Finding(code, text, why, then, known_level=level, check="agent")


def _report(seen: Examination, url: Url | None, sink: Output, *, has_agent: bool) -> None:
    from exporter.cli.documents import logs as documents
    from exporter.pipeline.doctor import check_of
    from exporter.publish.hold import this_user
    from exporter.publish.judge import Level

    found, findings = seen.found, seen.findings
    document = documents.Diagnosis(
        model=str(seen.model),
        status="wrong" if not seen.is_well else "warnings" if findings else "well",
        versions=found.versions,
        deltas=len(found.log.deltas) if found.log else 0,
        position=found.at.position if found.at else None,
        step=found.at.step if found.at else None,
        hold=found.hold,
        tags={tag.name: tag.position for tag in seen.tags},
        ckpt_dir=None if seen.ckpt_dir is None else str(seen.ckpt_dir),
        targets=[
            documents.Target(
                address=replica.address,
                model=replica.name,
                versions={str(answer.number): answer.state.name for answer in replica.versions},
                positions={str(answer.number): answer.position for answer in replica.versions},
            )
            for replica in seen.servers
        ],
        findings=[
            documents.Finding(
                check_of(each).value,
                "wrong" if each.level is Level.WRONG else "warning",
                each.text,
                each.command,
                each.why or None,
                each.code.value,
            )
            for each in findings
        ],
    )
    if url is not None:
        from exporter.storage.objects import variables

        document = replace(document, read_by=this_user(), variables=variables(url.scheme))
    sink.result(document, _lines(seen, document, has_agent=has_agent))


def _lines(seen: Examination, document: Diagnosis, *, has_agent: bool) -> Iterator[str]:
    from exporter.pipeline.doctor import check_of
    from exporter.terminal.progress import count

    found, findings, ckpt_dir = seen.found, seen.findings, seen.ckpt_dir
    kind = "" if found.unread else ", which takes no deltas"
    deltas = f", {count(len(found.log.deltas), 'delta')}" if found.log else kind
    at = f", position {found.at}" if found.at else ""
    yield labelled("model", f"{seen.model}: {count(found.versions, 'version')}{deltas}{at}")
    if seen.tags:
        yield labelled("tags", ", ".join(f"{tag.name} {tag.position}" for tag in seen.tags))
    asked = [
        *([f"checkpoints in {Url.parse(str(ckpt_dir)) or ckpt_dir}"] if ckpt_dir else []),
        *(replica.address for replica in seen.servers),
    ]
    if asked:
        yield labelled("asked", ", ".join(asked))
    if document.read_by is not None:
        yield labelled(
            "read by", f"{document.read_by}, with {', '.join(document.variables) or 'no variables'}"
        )
        if not has_agent:
            where = "type this on its machine, as its user, or add --agent URL"
            yield labelled("not asked", f"an agent elsewhere, which may be refused: {where}")
    wrong = sum(finding.level.value == "wrong" for finding in findings)
    told = f"{wrong} wrong, {count(len(findings) - wrong, 'warning')}" if findings else "nothing wrong"
    yield labelled("found", told)
    for finding in sorted(findings, key=lambda finding: finding.level.value, reverse=True):
        colour = "red" if finding.level.value == "wrong" else "yellow"
        yield ""
        level = f"[bold {colour}]{finding.level.value:<8}[/]"
        yield f"{level} [bold]{check_of(finding).value}[/]: {escape(finding.text)}"
        if finding.why:
            yield f"{'':<9}cause: {escape(finding.why)}"
        is_command = finding.command.startswith(_COMMANDS)
        yield f"{'':<9}{'$' if is_command else 'hint:'} {escape(finding.command)}"

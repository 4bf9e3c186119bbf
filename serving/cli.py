"""The command `serve-model` and its short subcommands; each imports its modules when it runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from exporter.errors import ServerError, UsageError
from exporter.options import ANYBODY, Trusting
from exporter.publish.served import MOST_VERSION
from exporter.storage.local_paths import checkpoint_parser, local_path, path_parser, quoted
from exporter.terminal.commands import LateCommand, application
from exporter.terminal.edge import (
    AS_TEXT,
    EXIT_CODES,
    OutputFlags,
    VersionOption,
    command,
    run,
)
from exporter.terminal.output import Output, as_json, escape
from exporter.terminal.progress import count
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from serving.address import Address, Deadline, OneModel
from serving.documents import ColumnPrediction, ExampleResults, Form, RequestExample, RowPrediction, Update

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msgspec import Struct
    from numpy.typing import NDArray

    from exporter.publish.model import Model as PublishedModel
    from exporter.wire.protos import Proto
    from serving.client import Metadata, ModelClient

_HELP = f"""Serve models that export-model published, and ask model servers.

\b
Examples:
  serve-model run models/ranker --port 8500
  serve-model status 127.0.0.1:8500 --model-name ranker
  serve-model update 127.0.0.1:8500 --model-name ranker
  serve-model predict 127.0.0.1:8500 --model-name ranker --json-input request.json

{EXIT_CODES}"""


def status(
    address: Address,
    model_name: OneModel = None,
    model_base_path: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            parser=checkpoint_parser("--model-base-path"),
            help="Also show how far each version is behind this model: a path, s3://, gs:// or az://.",
        ),
    ] = None,
    deadline: Deadline = 10.0,
    access: ServerAccess = WITHOUT_TLS,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Show a model's versions on a server: their states and positions.

    With --model-base-path (where the model is published), also show the hold, how many deltas and training
    steps each version is behind, and how long ago the values that it serves were published.

    Without --model-name it is the one model of the server. `serve-model run` tells which that is; of TF
    Serving's own servers, which list no models, `default` is asked for, and the last part of
    --model-base-path.

    The exit code is 7 unless a version is AVAILABLE.

    \b
    Examples:
      serve-model status 127.0.0.1:8500 --model-name ranker
      serve-model status 127.0.0.1:8500 --model-name ranker --model-base-path models/ranker --json
    """
    with command(printing) as sink:
        from serving import status_command
        from serving.client import ModelClient

        connect = partial(ModelClient, address, deadline_s=deadline, access=access)
        with status_command.client_of(connect, model_name, model_base_path) as client:
            status_command.run(client, model_base_path, sink)


def predict(
    address: Address,
    json_input: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="The request as JSON; - reads standard input.")
    ] = None,
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            help="Send nothing: print a request that the signature takes, of zeros and empty texts unless "
            "--model-base-path is given.",
        ),
    ] = False,
    form: Annotated[
        Form,
        typer.Option("--as", help="With --example: json, curl (a command) or python (a program)."),
    ] = Form.JSON,
    model_base_path: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            parser=path_parser("--model-base-path"),
            help="With --example: the directory that holds the versions of the model. The example is the "
            "first request of the version's --requests file; without one it has entries of vocabularies, and "
            "keys of tables by keys.",
        ),
    ] = None,
    model_name: OneModel = None,
    signature: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="", show_default="the request's signature_name, or serving_default"
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(
            metavar="VERSION",
            min=0,
            max=MOST_VERSION,
            help="The version to ask.",
            show_default="the newest that is available",
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Ask the version that this label names.")
    ] = None,
    deadline: Deadline = 10.0,
    access: ServerAccess = WITHOUT_TLS,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Send one request in the JSON of TF Serving's REST interface, and print the response in the same form.

    {"instances": [...]} holds rows, {"inputs": ...} columns, {"examples": [...]} examples for classify and
    regress signatures; {"b64": "..."} is a binary string.

    \b
    Examples:
      serve-model predict 127.0.0.1:8500 --model-name ranker --json-input request.json
      echo '{"inputs": {"x": [[1, 2]]}}' | serve-model predict 127.0.0.1:8500 --json-input -
      serve-model predict 127.0.0.1:8500 --model-name ranker --example --as curl
      serve-model predict 127.0.0.1:8500 --model-name ranker --example --model-base-path models/ranker
    """
    with command(printing) as sink:
        import json

        from serving.client import ModelClient
        from serving.status_command import client_of

        if version is not None and label is not None:
            raise UsageError("--version and --label both name a version", hint="leave one of them out")
        if (json_input is None) is not example:
            raise UsageError(
                "predict sends a request, or prints an example of one",
                hint="add --json-input FILE, or --example" if json_input is None else "leave out --example",
            )
        if form is not Form.JSON and not example:
            raise UsageError("--as goes with --example", hint="add --example, or leave out --as")
        if model_base_path is not None and not example:
            raise UsageError(
                "--model-base-path goes with --example", hint="add --example, or leave out --model-base-path"
            )
        request = {} if json_input is None else _request(json_input)
        stated = request.get("signature_name")
        if signature is not None and stated not in (None, signature):  # both may take the same shapes
            raise UsageError(
                f"--signature is {signature!r}, and the request's signature_name {stated!r}",
                hint="leave out --signature, or correct the request",
            )
        name = signature or stated or "serving_default"
        most = _MOST_PREDICTED_BYTES  # a person who asks once may ask for a large answer
        connect = partial(ModelClient, address, deadline_s=deadline, access=access, most_answer_bytes=most)
        with client_of(connect, model_name, model_base_path) as client:
            model = client.model
            metadata = client.metadata(version, label=label)
            # The label may move: the request goes to the version whose signatures were read.
            asked = version if label is None else metadata.version
            if example:
                _print_example(client, metadata, name, form, asked, access, model_base_path, sink)
                return
            answer, served = _ask(client, metadata, name, asked, request)
        document = _ANSWERS[next(iter(answer))](model, served, name, *answer.values())
        is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        line = json.dumps(answer, ensure_ascii=False)
        # Otherwise with escapes: control characters in a model's texts would reach the terminal.
        _print(sink, document, line if is_unicode and line.isprintable() else as_json(answer))


def _print_example(
    client: ModelClient,
    metadata: Metadata,
    name: str,
    form: Form,
    asked: int | None,
    access: ServerAccess,
    base_path: Path | None,
    sink: Output,
) -> None:
    from serving.example import example, known_example, written

    signature = _signature(client, metadata, name)
    if base_path is None:
        request = example(signature, name)
    else:
        request = known_example(client, base_path, metadata.version, signature, name)
    place = {"address": client.address, "model": client.model}
    text = written(request, signature, form, **place, version=asked, access=access)
    document = RequestExample(client.model, metadata.version, name, request, text)
    sink.result(document, map(escape, text.splitlines()))


def update(
    address: Address,
    model_name: OneModel = None,
    up_to: Annotated[
        str,
        typer.Option(
            metavar="POSITION",
            help="The position to reach; -1 is the newest published. With --model-base-path also by name: a "
            "tag, @previous, @2h (two hours ago) or @2026-11-26T08:00 (UTC).",
        ),
    ] = "-1",
    version: Annotated[
        int | None,
        typer.Option(
            metavar="VERSION",
            min=0,
            max=MOST_VERSION,
            help="The version to update.",
            show_default="the newest that is available",
        ),
    ] = None,
    model_base_path: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            parser=checkpoint_parser("--model-base-path"),
            help="With --trust, or --up-to NAME: where the model lists its deltas; a path, s3://, gs:// or "
            "az://.",
        ),
    ] = None,
    deadline: Deadline = 60.0,
    access: ServerAccess = WITHOUT_TLS,
    trusting: Trusting = ANYBODY,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Apply published deltas to the variables of a running model.

    The model lists and applies them itself, without a reload; without new deltas nothing happens. The
    command also works with TF Serving's own servers. Every replica needs its own call: do not send it to a
    load balancer.

    The exit code is 7 if the model stopped before the end of the published deltas.

    \b
    Examples:
      serve-model update 127.0.0.1:8500 --model-name ranker
      serve-model update 127.0.0.1:8500 --model-name ranker --up-to 4200 --json
      serve-model update 127.0.0.1:8500 --model-base-path /models/ranker --trust publisher.pem
    """
    with command(printing) as sink:
        from msgspec.structs import asdict

        from serving import updates
        from serving.client import ModelClient
        from serving.status_command import client_of

        connect = partial(ModelClient, address, deadline_s=deadline, access=access)
        with client_of(connect, model_name, model_base_path) as client:
            model = client.model
            target = _position(up_to, model_base_path, trusting)
            if trusting.trust:
                with _trusted(model_base_path, trusting) as model_:
                    version, target = updates.trusted_target(client, model_, up_to=target, version=version)
            done = updates.update(client, up_to=target, version=version)
        line = (
            f"{model} version {done.version} is at position {done.position} (step {done.step}): "
            f"{count(done.deltas, 'delta')}, {count(done.rows, 'row')}; {done.status}"
        )
        document = Update(
            address=address, model=model, message=done.status, **asdict(done) | {"status": done.word}
        )
        _print(sink, document, line, is_done=True)
        if done.loading is not None:
            sink.warn(
                f"version {done.loading} is still being loaded: run the command again to update it, too"
            )
        if done.is_stuck:
            raise ServerError(
                f"{model} stays at position {done.position}: it does not apply the deltas after that",
                cause=done.status,
                hint=f"see what is wrong with it: export-model doctor MODEL --target {address}",
            )


def _position(named: str, published: Path | None, trusting: Trusting) -> int:
    """Return the position in the value `named` of `--up-to`: a number, or a name in the model at `published`.

    A number is returned unchecked, also -1, the newest position. With trusted keys only signed publications
    count.

    Raises:
        UsageError: `named` is a name and `published` None, the name is malformed or a tag, which keys do not
            sign, or a key cannot be used.
        PositionUnknown: the model has no such position.
        NotUpdatable: nothing is published there.
        NotTrusted, ManifestError, CheckpointError, PublishError, PositionMoved, OSError: the model cannot be
            read.
    """
    if re.fullmatch("-1|[0-9]{1,18}", named, re.ASCII):
        return int(named)
    if published is None:
        raise UsageError(
            f"--up-to {named} is looked up where the model is published",
            hint="add --model-base-path MODEL, or name the position by its number",
        )
    from exporter.publish.tags import resolve_position
    from exporter.transfer.opened import opened

    with opened(published, read_only=True, trusting=trusting) as model:
        return model.carry(lambda: resolve_position(named, model.path))


@contextmanager
def _trusted(published: Path | None, trusting: Trusting) -> Iterator[PublishedModel]:
    """Yield the model at `published`, with the publications signed by trusted keys only.

    The keys are in force in the whole process until the block ends.

    Raises:
        UsageError: `published` is None, or a key cannot be used.
        NotUpdatable: nothing is published there.
        NotTrusted, ManifestError, CheckpointError, PublishError, PositionMoved, OSError: the model cannot be
            read.
    """
    from exporter.publish.model import Model
    from exporter.transfer.opened import opened

    if published is None:
        raise UsageError("--trust goes with --model-base-path", hint="add --model-base-path MODEL")
    with opened(published, read_only=True, trusting=trusting) as model:
        yield model.carry(lambda: Model.read(model.path))


_RUN = (
    "--model-name",
    "--model-config-file",
    "--port",
    "--rest-api-port",
    "--host",
    "--poll-seconds",
    "--wait",
    "--monitoring-config-file",
    "--json",
    "--quiet",
)
_AGENT = (
    "--model-base-path",
    "--target",
    "--pull",
    "--port",
    "--host",
    "--canary",
    "--label",
    "--on-event",
    "--trust",
    "--poll-seconds",
    "--json",
    "--quiet",
)
"""The options that most runs need."""
COMMANDS = {
    "run": LateCommand("serving.run_command", "run_server", short=_RUN),
    "status": LateCommand(__name__, "status"),
    "reload": LateCommand("serving.reload_command", "reload"),
    "agent": LateCommand("serving.agent_command", "agent", short=_AGENT),
    "predict": LateCommand(__name__, "predict"),
    "update": LateCommand(__name__, "update"),
}
app = application(_HELP, COMMANDS)


@app.callback()
def serve_model(own_version: VersionOption = False) -> None:
    """Do nothing: this is the root command, whose only option, `--version`, prints the release and exits."""


def _from_stock(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments with TensorFlow Serving's flags for `run` replaced, and notes on ignored flags.

    `help [COMMAND]` becomes `[COMMAND] --help`. Arguments of other commands are unchanged, without notes.
    UsageError for a flag that is not supported, or whose value is missing or wrong.
    """
    if arguments[:1] == ["help"]:
        return [*arguments[1:], "--help"], []
    if arguments[:1] != ["run"]:
        return arguments, []
    from serving.stock_flags import translate

    translated, notes = translate(arguments[1:])
    return ["run", *translated], notes


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line (None: the process's own), and end the process with its exit code."""
    run(app, "serve-model", arguments, _from_stock, takes=("run",))


def _print(sink: Output, document: Struct, line: str, *, is_done: bool = False) -> None:
    sink.result(document, [escape(line)], is_done=is_done)


_FROM_STDIN = "the request itself goes to standard input: echo '...' | serve-model predict ... --json-input -"
_EACH_LINE = (
    "send each line: while read -r line; do printf '%s\\n' \"$line\" | "
    "serve-model predict ... --json-input -; done < {}"
)


def _content(path: Path) -> str:
    """Return the text of a file, or of a pipe such as a shell's <(command), which is read to its end.

    OSError if it cannot be read or has more than 1 GiB, LfsPointer if it is a pointer of Git LFS, ValueError
    if it is not UTF-8.
    """
    from exporter.storage.files import read_given

    return read_given(path, _LARGEST_REQUEST).decode()


def _request(source: str) -> dict[str, Any]:
    """Return the JSON object in the file `source`, or on standard input if that is "-".

    UsageError if it cannot be read, or is not a JSON object; LfsPointer if it is a pointer of Git LFS.
    """
    import json

    try:
        text = sys.stdin.read() if source == "-" else _content(local_path("--json-input", source))
        document = json.loads(text)
    except OSError as error:
        raise UsageError(
            f"{source} cannot be read",
            cause=error.strerror or str(error),
            hint=_FROM_STDIN if source.lstrip().startswith("{") else "name a file: --json-input FILE",
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data" and error.lineno > 1:
            each = _EACH_LINE.format("FILE" if source == "-" else quoted(source))
            raise _bad_request(
                source, "it has several lines of JSON: predict sends one request", each
            ) from error
        raise _bad_request(source, error) from error
    if not isinstance(document, dict):
        raise _bad_request(source, f"expected an object, found a {type(document).__name__}")
    return document


def _ask(
    client: ModelClient, metadata: Metadata, name: str, version: int | None, request: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """Send a request; return the response in REST's form, and the version that computed it.

    `name` is the signature's, looked up in `metadata`; `request` is in REST's form. `version` is the one to
    ask; None: the newest. UsageError if the signature does not exist, or the request does not fit it;
    CallFailed if the server does not respond or refuses; ServerError if JSON has no form for the response.
    """
    from exporter.wire.rest_json import examples_input, predict_inputs
    from serving import rest_response

    definition = _signature(client, metadata, name)
    method = definition.method_name.rpartition("/")[2]
    try:
        if "examples" in request and method in ("classify", "regress"):
            examples = examples_input(request)
        else:
            examples, inputs = None, predict_inputs(request, definition)
    except ValueError as error:
        wanted = f"serve-model predict {client.address} --model-name {quoted(client.model)}"
        wanted += "" if name == "serving_default" else f" --signature {quoted(name)}"
        raise _bad_request("the input", error, f"{wanted} --example") from error
    if examples is None:
        predicted = client.predict(inputs, signature=name, version=version)
        return _answer(predicted.outputs, by_row="instances" in request), predicted.version
    if method == "classify":
        classified = client.classify(examples, signature=name, version=version)
        return rest_response.classifications(classified.examples), classified.version
    regressed = client.regress(examples, signature=name, version=version)
    return rest_response.regressions(regressed.values), regressed.version


def _signature(client: ModelClient, metadata: Metadata, name: str) -> Proto:
    """Return the signature `name` of the version in `metadata`; UsageError if it has none of that name."""
    if name not in metadata.signatures:
        raise UsageError(
            f"version {metadata.version} of {client.model} has no signature {name!r}",
            cause=f"it has {', '.join(sorted(metadata.signatures))}",
            hint="name one of them with --signature",
        )
    return metadata.signatures[name]


_MOST_PREDICTED_BYTES = 1 << 30
_LARGEST_REQUEST = 1 << 30
_ANSWERS = {"predictions": RowPrediction, "outputs": ColumnPrediction, "results": ExampleResults}
"""The document of a response, by the response's only field."""


def _answer(outputs: Mapping[str, NDArray[Any]], *, by_row: bool) -> dict[str, Any]:
    from serving import rest_response

    try:
        return rest_response.rows(outputs) if by_row else rest_response.columns(outputs)
    except ValueError as error:
        raise ServerError(
            "the response cannot be written in REST's JSON",
            cause=str(error),
            hint="use a gRPC client for this signature",
        ) from error


def _bad_request(
    source: str,
    cause: object,
    hint: str = 'write {"instances": [...]} with one item a row, or {"inputs": {...}}',
) -> UsageError:
    return UsageError(
        f"{'standard input' if source == '-' else source} is not a request of the REST interface",
        cause=str(cause),
        hint=hint,
    )


if __name__ == "__main__":
    main()

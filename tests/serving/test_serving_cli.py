"""The command `serve-model`: what it prints, and how it ends. Servers as processes: tests/integration."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from exporter.errors import UsageError
from exporter.publish.model import Model
from exporter.wire import protos
from exporter.wire.protos import message_class
from serving.cli import app
from serving.client import ModelClient
from serving.documents import Form
from serving.example import example, written
from serving.model_config import ModelConfig
from serving.served_names import as_metadata, names_in
from serving.server import ModelServer, require_free
from serving.server_options import NetworkOptions, ServerOptions
from serving.status import VersionState, VersionStatus
from serving.updates import trusted_target
from tests.support.certificates import Certified
from tests.support.printed_documents import checked
from tests.support.serving_models import write_saved_model

ROOT = Path(__file__).parents[2]


UNKNOWN = (
    *("position", "step", "lineage", "behind_deltas", "behind_steps"),
    *("newer_version", "published", "age_seconds", "event_time", "event_age_seconds", "unsettled", "tables"),
    "overlay_percent",
    "problem",
)
"""What a version without deltas does not tell."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    base = tmp_path_factory.mktemp("models") / "ranker"
    write_saved_model(base / "7", scale=0.1)
    with ModelServer(base) as server:
        server.wait_available(60)
        yield server


def call(*arguments: str, stdin: str = "") -> Any:
    return CliRunner().invoke(app, arguments, input=stdin)


def predict(server: ModelServer, request: Any, *options: str) -> Any:
    arguments = ("predict", server.address, "--model-name", "ranker", "--json-input", "-", *options)
    return call(*arguments, stdin=request if isinstance(request, str) else json.dumps(request))


def test_status(server: ModelServer) -> None:
    done = call("status", server.address, "--model-name", "ranker")
    assert done.exit_code == 0
    assert done.stdout.split()[:3] == ["ranker", "on", server.address]
    assert done.stdout.split()[-2:] == ["7", "AVAILABLE"]


def test_status_as_json(server: ModelServer) -> None:
    done = call("status", server.address, "--model-name", "ranker", "--json")
    assert checked(json.loads(done.stdout)) == {
        "format_version": 1,
        "address": server.address,
        "model": "ranker",
        "published": None,
        "versions": [
            {"version": 7, "state": "AVAILABLE", "code": "OK", "message": "", **dict.fromkeys(UNKNOWN)}
        ],
    }


def test_status_is_quiet(server: ModelServer) -> None:
    done = call("status", server.address, "--model-name", "ranker", "-q")
    assert (done.exit_code, done.output) == (0, "")


def test_status_of_the_one_model_of_a_server(server: ModelServer) -> None:
    """`serve-model run` tells its name with the answer that there is no other."""
    assert json.loads(call("status", server.address, "--json").stdout)["model"] == "ranker"


def test_status_where_there_are_several(server: ModelServer, tmp_path: Path) -> None:
    ranker = server.models.served()["ranker"].base_path
    config = tmp_path / "models.config"
    place = f"base_path: '{ranker}' model_platform: 'tensorflow'"
    entries = " ".join(f"config {{ name: '{name}' {place} }}" for name in ("b", "a c"))
    config.write_text(f"model_config_list {{ {entries} }}")
    with ModelServer(options=ServerOptions(model_config_file=config)) as several:
        several.wait_available(60)
        done = call("status", several.address)
        assert done.exit_code == 7
        assert f"{several.address} serves 2 models: a c, b" in done.stderr
        assert f"hint:  serve-model status {several.address} --model-name 'a c'" in done.stderr
        assert call("status", several.address, "--model-name", "a c").exit_code == 0


def test_status_where_a_server_does_not_tell_its_models(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorFlow Serving's own: the name is asked for, or is that of what is published."""
    monkeypatch.setattr("serving.server.as_metadata", lambda names: ())
    done = call("status", server.address)
    assert done.exit_code == 7
    assert "does not list its models" in done.stderr
    assert f"hint:  serve-model status {server.address} --model-name NAME" in done.stderr
    published = server.models.served()["ranker"].base_path
    done = call("status", server.address, "--model-base-path", str(published))
    assert "ranker on" in done.stdout or "nothing is published" in done.stderr, done.output


def test_a_version_that_is_unloaded_while_it_is_asked_for_is_not_available(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unloading(ModelClient):
        def status(self, version: int | None = None) -> Any:
            listed = super().status(version)
            nothing = message_class("serving.ModelServerConfig")()
            nothing.model_config_list.SetInParent()
            self.configure(nothing, 60)
            return listed

    monkeypatch.setattr("serving.client.ModelClient", Unloading)
    with ModelServer(server.models.served()["ranker"].base_path) as other:
        other.wait_available(60)
        done = call("status", other.address, "--model-name", "ranker", "--json")
    (version,) = json.loads(done.stdout)["versions"]
    assert version["state"] == "END" and "not found" in version["problem"]
    error = json.loads(done.stderr.splitlines()[-1])
    assert (done.exit_code, error["cause"]) == (7, version["problem"])
    assert "serve-model reload" in error["hint"]


def test_names_that_are_no_names_are_passed_over() -> None:
    for content in (b"", b"{", b"[1]", b'["' + b"a" * 5000 + b'"]', b"\xff"):
        assert names_in([("export-model-served-bin", content)]) == ()
    assert names_in([("export-model-served-bin", b'["a\\u001b", "b"]')]) == ("b",)
    assert names_in(as_metadata([f"model-{number}" for number in range(1000)])) == ()
    assert names_in(None) == ()


def test_status_of_an_unknown_model(server: ModelServer) -> None:
    done = call("status", server.address, "--model-name", "rankr")
    assert done.exit_code == 7
    assert "Could not find any versions of model rankr" in done.stderr
    assert "hint:  name a model of this server with --model-name" in done.stderr


@pytest.mark.parametrize("command", [("update",), ("predict", "--json-input", "-")])
def test_a_model_has_the_name_that_servers_give_it(server: ModelServer, command: tuple[str, ...]) -> None:
    """One that is not named is the one that the server has, as for `status`."""
    done = call(command[0], server.address, *command[1:], stdin="{}")
    assert done.exit_code == 2, "it is asked, and takes no such thing"
    assert "ranker" in done.stderr or "request" in done.stderr
    assert "default" not in done.stderr


def test_an_update_of_an_unknown_model_does_not_send_to_and_fro(server: ModelServer) -> None:
    done = call("update", server.address, "--model-name", "rankr")
    assert done.exit_code == 7
    assert f"error: {server.address} serves no rankr: it serves ranker\n" in done.stderr
    assert "hint:  name a model of this server with --model-name" in done.stderr
    assert "serve-model status" not in done.stderr


ASKS = [("predict", "--json-input", "-"), ("predict", "--example"), ("update",), ("status",)]


@pytest.mark.parametrize("asks", ASKS, ids=" ".join)
@pytest.mark.parametrize("name", [(), ("--model-name", "ranker")], ids=["unnamed", "named"])
def test_before_a_version_is_loaded_that_is_what_is_said_first(
    tmp_path: Path, asks: tuple[str, ...], name: tuple[str, ...]
) -> None:
    """Here the load waits until it was asked, as a large one does."""
    write_saved_model(tmp_path / "ranker" / "7")
    asked, loading = threading.Event(), threading.Event()

    def listener(model: str, status: VersionStatus) -> None:
        del model
        if status.state is VersionState.LOADING:
            loading.set()
            asked.wait(60)

    with ModelServer(tmp_path / "ranker", listener=listener) as server:
        try:
            assert loading.wait(60)
            done = call(asks[0], server.address, *asks[1:], *name, stdin='{"instances": [[1, 2]]}')
        finally:
            asked.set()
        server.wait_available(60)
        assert done.exit_code == 7
        if asks == ("status",):
            assert "error: no version of ranker is available" in done.stderr
            return
        assert f"error: {server.address} has not loaded ranker yet: version 7 is LOADING\n" in done.stderr
        assert "--model-name with" not in done.stderr
        shown = re.search(r"serve-model (status \S+ --model-name \S+)", done.stderr)
        assert shown is not None
        assert call(*shlex.split(shown[1])).exit_code == 0


@pytest.mark.parametrize("asks", ASKS, ids=" ".join)
def test_a_server_that_has_found_no_version_yet_says_so(tmp_path: Path, asks: tuple[str, ...]) -> None:
    with ModelServer(tmp_path / "ranker") as server:
        done = call(asks[0], server.address, *asks[1:], "--model-name", "ranker", stdin="{}")
        assert done.exit_code == 7
        assert f"error: {server.address} has not loaded ranker yet: it has found no version\n" in done.stderr
        assert "name a model" not in done.stderr


def test_a_server_that_lists_no_models_may_not_have_loaded_one(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorFlow Serving: before it has loaded a model it does not know it."""
    monkeypatch.setattr("serving.server.as_metadata", lambda _: ())
    done = call("update", server.address, "--model-name", "rankr")
    assert done.exit_code == 7
    assert f"error: {server.address} has not loaded rankr, or has no model of this name\n" in done.stderr
    assert "if it has just started, ask again" in done.stderr


def test_an_update_of_a_version_that_takes_no_deltas_tells_how_to_publish_one(server: ModelServer) -> None:
    done = call("update", server.address, "--model-name", "ranker")
    assert done.exit_code == 2
    assert "version 7 of ranker takes no deltas" in done.stderr
    assert "--new-base always" in done.stderr, "--incr would be refused as long as this version is the newest"


def test_a_version_that_takes_no_deltas_is_not_said_to_be_unsigned(
    server: ModelServer, tmp_path: Path
) -> None:
    """With trusted keys, too: the version has no lineage that a key could have signed."""
    with ModelClient(server.address, "ranker") as client, pytest.raises(UsageError) as caught:
        trusted_target(client, Model(path=tmp_path))
    assert caught.value.message == "version 7 of ranker takes no deltas"


@pytest.mark.parametrize("command", [("predict", "--example"), ("update",)])
def test_a_version_that_no_server_can_have_is_wrong_use(command: tuple[str, ...]) -> None:
    done = call(*command, "127.0.0.1:1", "--model-name", "ranker", "--version", 1 << 63)
    assert (done.exit_code, "0<=x<=9223372036854775807" in done.stderr) == (2, True), done.stderr


def test_a_taken_port_is_one_message(server: ModelServer, tmp_path: Path) -> None:
    port = server.address.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "serving", "run", tmp_path, "--port", port],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 7
    assert f"\nerror: cannot listen on 127.0.0.1:{port}\n" in done.stderr
    assert not re.search("^[EWI][0-9]{4}", done.stderr, re.MULTILINE), "a line of gRPC's own"


def test_a_request_comes_from_a_pipe(server: ModelServer) -> None:
    line = (
        f"predict {server.address} --model-name ranker --json-input <(echo '{{\"inputs\": [[1, 2]]}}') --json"
    )
    asked = f"{sys.executable} -m serving {line}"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"] == [[0.1, 0.2]]


def test_status_of_a_model_that_is_not_available(tmp_path: Path) -> None:
    (tmp_path / "ranker" / "1").mkdir(parents=True)
    with ModelServer(tmp_path / "ranker", options=ServerOptions(poll_seconds=0.01)) as server:
        while not server.statuses() or not server.statuses()[0].code:
            pass
        done = call("status", server.address, "--model-name", "ranker")
    assert done.exit_code == 7
    assert "LOADING" in done.stdout
    assert "cause: NOT_FOUND: Could not find saved_model.pb" in done.stderr


@pytest.mark.parametrize(
    ("request_", "options", "answer"),
    [
        ({"instances": [[1, 2], [3, 4]]}, (), {"predictions": [[0.1, 0.2], [0.3, 0.4]]}),
        ({"inputs": [[1, 2]]}, (), {"outputs": [[0.1, 0.2]]}),
        ({"inputs": {"x": [[1, 2]]}}, ("--version", "7"), {"outputs": [[0.1, 0.2]]}),
        (
            {"instances": [{"x": [1, 2], "text": {"b64": "aGk="}}], "signature_name": "two"},
            (),
            {"predictions": [{"loud": "hi!", "y": [0.1, 0.2]}]},
        ),
        ({"instances": ["a"]}, ("--signature", "text"), {"predictions": ["a!"]}),
        (
            {"examples": [{"x": [1.0, 2.0], "label": "a"}]},
            ("--signature", "classify"),
            {"results": [[["a", 0.1], ["a", 0.2]]]},
        ),
        ({"examples": [{"x": [1.0, 2.0]}]}, ("--signature", "regress"), {"results": [0.3]}),
    ],
)
def test_predict(server: ModelServer, request_: Any, options: tuple[str, ...], answer: Any) -> None:
    done = predict(server, request_, *options)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == answer


def test_a_request_of_another_signature_than_asked_for_is_refused(server: ModelServer) -> None:
    """Two towers take ids of the same shape: the answer would look right."""
    request = {"instances": ["a"], "signature_name": "text"}
    assert predict(server, request, "--signature", "text").exit_code == 0
    refused = predict(server, request, "--signature", "two")
    assert refused.exit_code == 2
    assert "--signature is 'two', and the request's signature_name 'text'" in refused.output


@pytest.mark.parametrize("signature", ["serving_default", "two", "text", "slow"])
def test_an_example_is_answered_in_each_form(server: ModelServer, tmp_path: Path, signature: str) -> None:
    asked = ("predict", server.address, "--model-name", "ranker", "--signature", signature)
    shown = call(*asked, "--example")
    assert shown.exit_code == 0, shown.output
    request = json.loads(shown.stdout)
    assert ("signature_name" in request) == (signature != "serving_default")
    answered = predict(server, request)
    assert answered.exit_code == 0, answered.output
    program = call(*asked, "--example", "--as", "python").stdout
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = json.loads(call(*asked, "--example", "--as", "curl", "--json").stdout)
    assert (printed["request"], printed["version"]) == (request, 7)
    words = shlex.split(printed["text"])
    assert (words[0], json.loads(words[2])) == ("curl", request)
    assert words[3] == "http://127.0.0.1:8501/v1/models/ranker:predict"


def test_a_program_of_an_example_speaks_tls_as_the_command_did(server: ModelServer, tmp_path: Path) -> None:
    certified = Certified(tmp_path)
    config = certified.config(tmp_path / "ssl.config", verify=True)
    network = NetworkOptions(ssl_config_file=config)
    options = ServerOptions(network=network)
    access = ("--grpc", f"ca={certified.ca}", "--grpc", f"cert={certified.client.cert}")
    files = tuple(map(str, (*access, "--grpc", f"key={certified.client.key}")))
    with ModelServer(server.models.served()["ranker"].base_path, options=options) as secure:
        secure.wait_available(60)
        program = call(
            "predict", secure.address, "--model-name", "ranker", "--example", "--as", "python", *files
        )
        ran = subprocess.run(
            [sys.executable, "-c", program.stdout], capture_output=True, text=True, timeout=300
        )
    assert ran.returncode == 0, ran.stderr


def test_an_example_asks_the_version_that_it_is_of(server: ModelServer) -> None:
    asked = ("predict", server.address, "--model-name", "ranker", "--version", "7", "--example")
    assert "/v1/models/ranker/versions/7:predict" in call(*asked, "--as", "curl").stdout
    assert ", version=7)" in call(*asked, "--as", "python").stdout


def test_examples_of_borders() -> None:
    """No inputs at all; and sizes that a server says, and nobody has the memory for."""
    signature = protos.SignatureDef()
    signature.outputs["y"].tensor_shape.SetInParent()
    request = example(signature, "count")
    text = written(request, signature, Form.PYTHON, address="a:1", model="m", version=None)
    compile(text, "example", "exec")
    signature.inputs["x"].dtype = 1
    for size in (1 << 30, 1 << 30):
        signature.inputs["x"].tensor_shape.dim.add().size = size
    with pytest.raises(UsageError, match="too large for an example"):
        example(signature, "count")


def test_a_family_of_addresses_that_is_not_there_is_no_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no IPv6, names still have addresses of it."""

    def refused(*family: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr("serving.server.socket.socket", refused)
    require_free("localhost", 0)


def test_no_example_where_the_signature_does_not_say_enough(server: ModelServer) -> None:
    asked = ("predict", server.address, "--model-name", "ranker")
    done = call(*asked, "--signature", "classify", "--example")
    assert (done.exit_code, "does not say with which features" in done.stderr) == (2, True)
    for wrong in ((), ("--example", "--json-input", "-"), ("--json-input", "-", "--as", "curl")):
        done = call(*asked, *wrong, stdin="{}")
        assert (done.exit_code, "--example" in done.stderr) == (2, True)


def test_a_request_that_does_not_fit_leads_to_one_that_does(server: ModelServer) -> None:
    done = predict(server, {"inputs": {"y": [1]}})
    (hint,) = (line for line in done.stderr.splitlines() if line.startswith("hint:"))
    _, program, *arguments = shlex.split(hint)
    assert (done.exit_code, program) == (2, "serve-model")
    example = call(*arguments)
    assert predict(server, json.loads(example.stdout)).exit_code == 0


def test_an_example_is_of_the_model_that_is_there(server: ModelServer) -> None:
    done = call("predict", server.address, "--example")
    assert done.exit_code == 0, done.stderr
    assert "--model-name default" not in done.stderr


def test_predict_by_a_label(server: ModelServer) -> None:
    (ranker,) = server.models.served().values()
    config = ModelConfig("ranker", ranker.base_path)
    server.models.configure([replace(config, labels={"stable": 7})])
    done = predict(server, {"instances": [[1, 2]]}, "--label", "stable", "--json")
    assert json.loads(done.stdout)["version"] == 7
    done = predict(server, {"instances": [[1, 2]]}, "--label", "canary")
    assert (done.exit_code, "Unrecognized servable version label: canary" in done.stderr) == (7, True)
    assert "hint:  leave out --label; versions that are served: serve-model status " in done.stderr
    done = predict(server, {"instances": [[1, 2]]}, "--label", "stable", "--version", "7")
    assert (done.exit_code, "both name a version" in done.stderr) == (2, True)
    server.models.configure([config])


def test_predict_as_json(server: ModelServer) -> None:
    done = predict(server, {"instances": [[1, 2]]}, "--json")
    assert checked(json.loads(done.stdout)) == {
        "format_version": 1,
        "model": "ranker",
        "version": 7,
        "signature": "serving_default",
        "predictions": [[0.1, 0.2]],
    }


def test_predict_from_a_file(server: ModelServer, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text('{"instances": [[1, 2]]}')
    done = call("predict", server.address, "--model-name", "ranker", "--json-input", str(file))
    assert done.stdout == '{"predictions": [[0.1, 0.2]]}\n'


@pytest.mark.parametrize(
    ("request_", "options", "exit_code", "text"),
    [
        ("{", (), 2, "error: standard input is not a request of the REST interface"),
        ("[" * 100_000, (), 2, "error: standard input is not a request"),
        ("[1]", (), 2, "expected an object, found a list"),
        (
            '{"instances": []}\n{"instances": []}\n',
            (),
            2,
            "while read -r line; do printf '%s\\n' \"$line\" | ",
        ),
        ("{}", (), 2, "expected either the key 'instances' (rows) or the key 'inputs' (columns)"),
        ({"instances": [[1, 2], [3]]}, (), 2, "expected a list of 2"),
        ({"examples": [{"x": 1.0}]}, (), 2, "expected either the key 'instances'"),
        ({"instances": [[1, 2]]}, ("--signature", "none"), 2, "version 7 of ranker has no signature 'none'"),
        (
            {"instances": [[1, 2]]},
            ("--version", "9"),
            7,
            "Servable not found for request: Specific(ranker, 9)",
        ),
        ({"instances": [[-1, 2]]}, ("--signature", "check"), 7, "x must be positive"),
        ({"instances": [1 << 60]}, ("--signature", "slow", "--deadline", "0.2"), 7, "did not answer Predict"),
        ({"instances": [0]}, ("--signature", "count"), 7, "'calls' is a scalar and has no rows"),
    ],
)
def test_refused_requests(
    server: ModelServer, request_: Any, options: tuple[str, ...], exit_code: int, text: str
) -> None:
    done = predict(server, request_, *options)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert text in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_request_file(server: ModelServer, tmp_path: Path) -> None:
    done = call(
        "predict", server.address, "--model-name", "ranker", "--json-input", str(tmp_path / "none.json")
    )
    assert done.exit_code == 2
    assert "No such file" in done.stderr
    assert "hint:  name a file" in done.stderr


def test_a_version_is_no_base_path(tmp_path: Path) -> None:
    (tmp_path / "ranker" / "7").mkdir(parents=True)
    (tmp_path / "ranker" / "7" / "saved_model.pb").touch()
    done = call("run", str(tmp_path / "ranker" / "7"), "--port", "0", "--wait", "0.1")
    assert done.exit_code == 7
    assert "is itself a version" in done.stderr.replace("\n", " ")


def test_errors_as_json(server: ModelServer) -> None:
    done = predict(server, {"instances": [[1, 2]]}, "--version", "9", "--json")
    error = json.loads(done.stderr.splitlines()[-1])
    assert (error["error"], error["exit_code"]) == ("CallFailed", 7)
    assert error["cause"] == "NOT_FOUND: Servable not found for request: Specific(ranker, 9)"


def test_a_missing_base_path(tmp_path: Path) -> None:
    done = call("run", str(tmp_path / "none"), "--port", "0", "--wait", "0.1")
    assert done.exit_code == 7
    assert f"error: {tmp_path / 'none'} is not a directory" in done.stderr.replace("\n", "")


def test_a_base_path_without_versions(tmp_path: Path) -> None:
    done = call("run", str(tmp_path), "--port", "0", "--wait", "0.1")
    assert done.exit_code == 7
    assert "became available in 0.1 s" in done.stderr


@pytest.mark.parametrize("command", [(), ("run",), ("status",), ("predict",)])
def test_help_shows_examples(command: tuple[str, ...]) -> None:
    done = call(*command, "--help")
    assert done.exit_code == 0
    assert "Examples:" in done.stdout
    assert f"serve-model {' '.join(command) or 'run'}" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--help",), ("run", "--help"), ("nonsense",), ("run",), ("status", "127.0.0.1:1")]
)
def test_the_command_starts_light(arguments: tuple[str, ...]) -> None:
    code = """
import atexit, sys
heavy = {"tensorflow", "tensorflow_serving", "keras"}
heavy |= set() if "status" in sys.argv else {"grpc", "numpy"}
atexit.register(lambda: print("LOADED", *sorted(heavy & set(sys.modules)), file=sys.stderr))
from serving.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.stderr.splitlines()[-1] == "LOADED"
    assert "Traceback" not in done.stderr

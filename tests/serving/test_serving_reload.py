"""`serve-model reload`: which configuration is sent when, and a server that takes it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from typer.testing import CliRunner

from exporter.errors import ServerError
from exporter.terminal.server_access import WITHOUT_TLS
from exporter.wire.protos import message_class
from serving.agent.rebuild import Rebuilder
from serving.cli import app
from serving.client import ModelClient
from serving.model_config import absent, read_config_file, read_servers_config
from serving.reload import Labels, first_step, has_failed, problem_of
from serving.server import ModelServer
from serving.server_options import ServerOptions
from serving.status import Code, VersionState, VersionStatus
from tests.support.printed_documents import checked
from tests.support.users import as_user, needs_root

ONES = np.ones((1, 2), np.float32)


def configured(text: str) -> Any:
    config = message_class("serving.ModelServerConfig")()
    text_format.Parse(f"model_config_list {{ config {{ name: 'm' {text} }} }}", config)
    return config


SPECIFIC = "model_version_policy { specific { versions: %d } }"
LABEL = "version_labels { key: 's' value: %d }"


@pytest.mark.parametrize(
    ("wanted", "known", "first"),
    [
        ("", Labels(set(), {}), None),
        (LABEL % 1, Labels({1}, {}), None),
        (LABEL % 2, Labels({1}, {}), ""),
        (LABEL % 2, Labels({1}, {"s": 1}), LABEL % 1),
        (LABEL % 2, Labels({2}, {"s": 1}), None),
        (SPECIFIC % 2 + LABEL % 2, Labels({1}, {"s": 1}),
         "model_version_policy { specific { versions: 2 versions: 1 } }" + LABEL % 1),
        (SPECIFIC % 2 + LABEL % 2, Labels(set(), {}), SPECIFIC % 2),
        (SPECIFIC % 2 + LABEL % 2, Labels({3}, {"s": 1}), SPECIFIC % 2),
    ],
)  # fmt: skip
def test_what_is_sent_first(wanted: str, known: Labels, first: str | None) -> None:
    found = first_step(configured(wanted), {"m": known})
    assert found == (None if first is None else configured(first))


START, LOADING, AVAILABLE, END = (VersionState[name] for name in ("START", "LOADING", "AVAILABLE", "END"))
SERVED = VersionStatus(1, AVAILABLE)
BROKEN = VersionStatus(2, END, Code.NOT_FOUND, "no file")


@pytest.mark.parametrize(
    ("wanted", "statuses", "problem", "fails"),
    [
        ("", [SERVED], None, False),
        ("", [], "no version of m is available", False),
        ("", [VersionStatus(2, LOADING), SERVED], "version 2 of m is LOADING", False),
        ("", [BROKEN, SERVED], None, False),
        ("", [BROKEN], "no version of m is available: version 2 is END, NOT_FOUND: no file", True),
        (SPECIFIC % 2, [BROKEN, SERVED], "version 2 of m is END, NOT_FOUND: no file", True),
        (SPECIFIC % 2, [SERVED], "version 2 of m is missing", False),
        (SPECIFIC % 2, [VersionStatus(2, END), SERVED], "version 2 of m is END", False),
        (LABEL % 2, [SERVED], "version 2 of m is missing", False),
        (LABEL % 2, [VersionStatus(2, AVAILABLE), VersionStatus(1, END)], None, False),
    ],
)  # fmt: skip
def test_when_it_is_served(
    wanted: str, statuses: list[VersionStatus], problem: str | None, fails: bool
) -> None:
    (model,) = configured(wanted).model_config_list.config
    assert problem_of(model, statuses) == problem
    assert problem is None or has_failed(model, statuses) is fails


@pytest.fixture
def server(two_models: Path) -> Iterator[ModelServer]:
    with ModelServer(two_models / "b", options=ServerOptions(poll_seconds=0.05)) as server:
        server.wait_available(60)
        yield server


def run(server: ModelServer, *arguments: object) -> Any:
    return CliRunner().invoke(app, ["reload", server.address, *map(str, arguments)])


def listing(path: Path, *entries: str) -> Path:
    path.write_text(f"model_config_list {{ {' '.join(f'config {{ {entry} }}' for entry in entries)} }}")
    return path


def entry(two_models: Path, name: str) -> str:
    return f"name: '{name}' base_path: '{two_models / name}' model_platform: 'tensorflow'"


def test_one_model_alone(server: ModelServer, two_models: Path) -> None:
    place = ("--model-base-path", two_models / "a", "--version", 1, "--version", 2)
    done = run(
        server, "--only", "--model-name", "a", *place, "--label", "stable=1", "--label", "canary=2", "--json"
    )
    assert done.exit_code == 0, done.output
    assert checked(json.loads(done.stdout)) == {
        "format_version": 1,
        "address": server.address,
        "models": [{"model": "a", "versions": [2, 1], "labels": {"canary": 2, "stable": 1}}],
    }
    assert server.models.served().keys() == {"a"}
    assert server.models.labels("a") == {"canary": 2, "stable": 1}


def test_a_model_that_was_taken_out(server: ModelServer, two_models: Path) -> None:
    assert run(server, "--only", "--model-name", "a", "--model-base-path", two_models / "a").exit_code == 0
    with ModelClient(server.address, "b") as client:
        deadline = time.monotonic() + 60
        while client.status()[0].state is not END and time.monotonic() < deadline:
            time.sleep(0.01)
    done = CliRunner().invoke(app, ["status", server.address, "--model-name", "b"])
    assert done.exit_code == 7
    assert "version 5 is in state END" in done.stderr
    assert f"serve-model reload {server.address}" in done.stderr


def test_a_model_is_added_to_a_file(server: ModelServer, two_models: Path, tmp_path: Path) -> None:
    file = listing(tmp_path / "models.config", entry(two_models, "b"))
    done = run(
        server,
        "--model-config-file",
        file,
        "--save",
        "--model-name",
        "a",
        "--model-base-path",
        two_models / "a",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == "b: version 5 is available\na: version 2 is available\n"
    assert [model.name for model in read_config_file(file).model_config_list.config] == ["b", "a"]
    assert list(tmp_path.iterdir()) == [file]
    done = run(server, "--model-config-file", file, "--model-name", "a", "--all-versions", "--label", "old=1")
    assert done.stdout.splitlines()[1] == "a: versions 2, 1 are available; old is 1"
    assert "old" not in file.read_text()


def test_a_label_moves_when_its_version_is_available(
    server: ModelServer, two_models: Path, tmp_path: Path
) -> None:
    """And not a moment before: a request that names it never fails."""
    shutil.copytree(two_models / "a" / "1", tmp_path / "c" / "1")
    place = ("--only", "--model-name", "c", "--model-base-path", tmp_path / "c")
    assert run(server, *place, "--version", 1, "--label", "stable=1").exit_code == 0
    stop = threading.Event()
    answers: list[int] = []
    failures: list[Exception] = []

    def ask() -> None:
        with ModelClient(server.address, "c") as client:
            while not stop.is_set():
                try:
                    answers.append(client.labelled("stable") or -1)
                except Exception as error:  # noqa: BLE001 - any failure is what this is about
                    failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    shutil.copytree(two_models / "a" / "2", tmp_path / "c" / ".2")
    (tmp_path / "c" / ".2").rename(tmp_path / "c" / "2")
    done = run(server, *place, "--version", 2, "--label", "stable=2")
    stop.set()
    asking.join()
    assert done.exit_code == 0, done.output
    assert not failures
    assert answers == sorted(answers)
    assert set(answers) <= {1, 2}
    assert server.models.labels("c") == {"stable": 2}


def test_a_version_that_cannot_be_loaded(server: ModelServer, two_models: Path, tmp_path: Path) -> None:
    shutil.copytree(two_models / "a", tmp_path / "c")
    assert run(server, "--only", "--model-name", "c", "--model-base-path", tmp_path / "c").exit_code == 0
    shutil.rmtree(tmp_path / "c" / "1" / "variables")
    place = ("--only", "--model-name", "c", "--model-base-path", tmp_path / "c")
    done = run(server, *place, "--all-versions", "--label", "x=1")
    assert done.exit_code == 7
    assert "version 1 of c is END, UNKNOWN" in done.stderr
    assert "serve-model status" in done.stderr
    assert server.models.labels("c") == {}, "it was not available"
    with ModelClient(server.address, "c") as client:
        assert client.predict({"x": ONES}).version == 2


def test_a_base_path_that_is_not_there(server: ModelServer, tmp_path: Path) -> None:
    done = run(
        server,
        *("--only", "--model-name", "c", "--model-base-path", tmp_path / "later"),
        *("--no-path-check", "--deadline", 0.5, "--json"),
    )
    error = json.loads(done.stderr.splitlines()[-1])
    assert (done.exit_code, error["error"]) == (7, "CallFailed")
    assert "does not serve the configuration yet" in error["message"]
    assert "it continues to load" in error["hint"]
    assert server.models.served().keys() == {"c"}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--model-name", "a", "--model-base-path", "/m"), 2, "there is no complete configuration to send"),
        ((), 2, "there is no complete configuration to send"),
        (("--only", "--model-name", "a"), 2, "model a has no base path"),
        (("--only", "--model-name", "a", "--model-base-path", "/m", "--latest", "2", "--version", "1"), 2,
         "exclude each other"),
        (("--only", "--model-name", "a", "--model-base-path", "/m", "--label", "x=y"), 2,
         "'y' is not a version"),
        (("--only", "--model-name", "a", "--model-base-path", "/m", "--label", f"x={1 << 63}"), 2,
         "a number up to 9223372036854775807"),
        (("--only", "--model-name", "a", "--model-base-path", "/m", "--label", f"x={'9' * 5000}"), 2,
         "a number up to 9223372036854775807"),
        (("--save", "--only", "--model-name", "a", "--model-base-path", "/m"), 2, "--save needs"),
        (("--model-config-file", "none.config"), 2, "none.config cannot be read"),
        (("--only", "--model-name", "a", "--model-base-path", "gs://b/m"), 7, "gs://b/m: only local paths"),
    ],
)  # fmt: skip
def test_refused(server: ModelServer, arguments: tuple[str, ...], code: int, text: str) -> None:
    done = run(server, *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert text in done.stderr
    assert "hint: " in done.stderr
    assert server.models.served().keys() == {"b"}


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [("--version", 1 << 63, "0<=x<=9223372036854775807"), ("--latest", 1 << 32, "1<=x<=4294967295")],
)
def test_numbers_that_no_configuration_holds(option: str, value: int, text: str) -> None:
    arguments = ("--only", "--model-name", "a", "--model-base-path", "/m", option, str(value))
    done = CliRunner().invoke(app, ["reload", "127.0.0.1:1", *arguments])
    assert (done.exit_code, text in done.stderr) == (2, True), done.stderr


HERE = "name: 'a' base_path: '/m' model_platform: 'tensorflow'"
KEPT = {
    "twice": ((HERE, HERE), "Illegal to list model a multiple times in config list"),
    "no platform": (("name: 'a' base_path: '/m'",), "neither ModelServerConfig::model_type"),
    "two platforms": ((f"{HERE} model_type: 1",), "both ModelServerConfig::model_type"),
    "a relative path": ((HERE.replace("/m", "m"),), "to have an absolute path or URI"),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_a_stock_server_would_keep_although_it_refuses_it_is_not_sent(
    server: ModelServer, tmp_path: Path, case: str
) -> None:
    entries, text = KEPT[case]
    done = run(server, "--model-config-file", listing(tmp_path / "models.config", *entries))
    assert (done.exit_code, text in done.stderr) == (2, True)
    assert "until a restart" in done.stderr
    assert server.models.served().keys() == {"b"}


ABSENT = {
    "not there": ([], "", "later is not a directory"),
    "a file": (["later"], "", "later is not a directory"),
    "empty": (["later/readme"], "", "holds no version"),
    "without the versions": (["later/1/saved_model.pb"], "--version=2", "holds no version 2"),
}


@pytest.mark.parametrize("case", ABSENT)
def test_what_a_stock_server_would_wait_for_is_not_sent(
    server: ModelServer, tmp_path: Path, case: str
) -> None:
    files, option, text = ABSENT[case]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    place = ("--only", "--model-name", "c", "--model-base-path", tmp_path / "later")
    done = run(server, *place, *filter(None, [option]))
    assert (done.exit_code, text in done.stderr, "--no-path-check" in done.stderr) == (7, True, True)
    assert server.models.served().keys() == {"b"}


def test_a_path_that_is_not_seen_from_here_is_the_servers_affair(
    server: ModelServer, two_models: Path, tmp_path: Path
) -> None:
    """Its directory is not there either, it lies in a store, or the server serves the model already."""
    entries = [message_class("serving.ModelConfig")(base_path=path) for path in NOT_SEEN]
    assert [absent(entry) for entry in entries] == [""] * len(NOT_SEEN)
    shutil.copytree(two_models / "a", tmp_path / "c")
    place = ("--only", "--model-name", "c", "--model-base-path", tmp_path / "c")
    assert run(server, *place, "--version", 1, "--version", 2).exit_code == 0
    (tmp_path / "c").rename(tmp_path / "gone")
    assert run(server, *place, "--version", 2).exit_code == 0


@needs_root
@pytest.mark.parametrize("is_dir", [Path.is_dir, os.path.isdir], ids=["this Python's", "Python 3.14's"])
def test_a_path_that_this_user_may_not_look_at_is_not_called_absent(
    monkeypatch: pytest.MonkeyPatch, is_dir: Callable[[Path], bool]
) -> None:
    monkeypatch.setattr(Path, "is_dir", is_dir)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own keeps other users out
        closed = Path(name, "closed")
        (closed / "ranker").mkdir(parents=True)
        closed.chmod(0o700)
        Path(name).chmod(0o755)
        config = message_class("serving.ModelConfig")(base_path=f"{closed}/ranker")

        def looked() -> str:
            try:
                return absent(config)
            except PermissionError as error:
                return f"refused: {error.filename}"

        assert as_user(65534, looked) == f"refused: {closed}/ranker"


@pytest.mark.parametrize("is_there", [True, False])
def test_an_agent_gives_a_server_no_model_that_it_would_wait_for(
    server: ModelServer, two_models: Path, tmp_path: Path, is_there: bool
) -> None:
    """The file with which a replica is rebuilt lists one that was never served, and is not there."""
    if is_there:
        shutil.copytree(two_models / "a", tmp_path / "later")
    entries = entry(two_models, "b"), f"name: 'c' base_path: '{tmp_path}/later' model_platform: 'tensorflow'"
    config = read_servers_config("--rebuild-config", listing(tmp_path / "models.config", *entries), ["b"])
    rebuilder = Rebuilder(lambda: config, WITHOUT_TLS, 10.0, lambda address, model: False)
    if is_there:
        rebuilder.restore(server.address, "b")
    else:
        with pytest.raises(
            ServerError, match=r"lists c, which it does not serve yet: .*later is not a directory"
        ):
            rebuilder.restore(server.address, "b")
    assert server.models.served().keys() == ({"b", "c"} if is_there else {"b"})


def test_each_rebuild_reads_the_servers_file_anew(
    server: ModelServer, two_models: Path, tmp_path: Path
) -> None:
    file = listing(tmp_path / "models.config", entry(two_models, "b"))
    read = partial(read_servers_config, "--rebuild-config", file, ["b"])
    rebuilder = Rebuilder(read, WITHOUT_TLS, 10.0, lambda address, model: True)
    rebuilder.restore(server.address, "b")
    assert server.models.served().keys() == {"b"}
    listing(file, entry(two_models, "a"), entry(two_models, "b"))
    rebuilder.restore(server.address, "b")
    assert server.models.served().keys() == {"a", "b"}
    for content in ("model_config_list {", LFS_POINTER):
        file.write_text(content)
        with pytest.raises(ServerError, match=r"is not sent its configuration: .*models\.config"):
            rebuilder.restore(server.address, "b")
    assert server.models.served().keys() == {"a", "b"}


LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"
NOT_SEEN = ("/nowhere/at/all", "/nowhere-at-all", "gs://bucket/m", "s3://bucket/m")

"""`serve-model run` as a process of its own, asked over loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.client import ModelClient
from serving.status import VersionState
from tests.support.server_processes import DEADLINE_SECONDS, ROOT, end, running
from tests.support.serving_models import write_saved_model

X = np.float32([[1, 2]])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("made")
    return {n: write_saved_model(root / str(n), scale=n) for n in (1, 2)}


@pytest.fixture
def base(tmp_path: Path, made: dict[int, Path]) -> Path:
    shutil.copytree(made[1], tmp_path / "ranker" / "1")
    return tmp_path / "ranker"


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def address(process: subprocess.Popen[str]) -> str:
    return ready_line(process).split(" on ")[1].strip()


def wait_for(client: ModelClient, version: int, state: VersionState) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if (version, state) in {(s.version, s.state) for s in client.status()}:
            return
        time.sleep(0.01)
    raise AssertionError(client.status())


def publish(base: Path, source: Path, version: int) -> None:
    staged = base / f".staging-{version}"
    shutil.copytree(source, staged)
    staged.rename(base / str(version))


def test_a_life_of_a_server(base: Path, made: dict[int, Path]) -> None:
    """Ready line, a swap under load, a version that is broken, SIGTERM."""
    with running(base) as process:
        line = ready_line(process)
        host_port = line.split(" on ")[1].strip()
        assert line == f"serving ranker version 1 on {host_port}\n"
        assert host_port.startswith("127.0.0.1:")
        with ModelClient(host_port, "ranker") as client:
            answers = ask_while(host_port, lambda: swap(client, base, made[2]))
            assert {version for version, _ in answers} == {1, 2}
            assert all(version == y for version, y in answers)
            (base / "3").mkdir()
            (base / "3" / "saved_model.pb").write_bytes(b"")
            wait_for(client, 3, VersionState.END)
            assert client.predict({"x": X}).version == 2
        out, talk = end(process, signal.SIGTERM)
    assert (process.returncode, out) == (0, "")
    assert "version 2: AVAILABLE\n" in talk
    assert "warning: ranker version 3: END, NOT_FOUND: " in talk


def ask_while(host_port: str, action: Callable[[], None]) -> list[tuple[int, float]]:
    """(version, answer) of all calls that three clients made during `action`; none may fail."""
    stop = threading.Event()
    answers: list[tuple[int, float]] = []
    failures: list[Exception] = []

    def ask() -> None:
        with ModelClient(host_port, "ranker", deadline_s=DEADLINE_SECONDS) as client:
            while not stop.is_set():
                try:
                    prediction = client.predict({"x": X})
                except Exception as error:  # noqa: BLE001 - any failure is what this is about
                    failures.append(error)
                else:
                    answers.append((prediction.version, float(prediction.outputs["y"][0, 0])))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not answers and not failures:
        time.sleep(0.005)
    action()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    return answers


def swap(client: ModelClient, base: Path, source: Path) -> None:
    publish(base, source, 2)
    wait_for(client, 1, VersionState.END)


@pytest.mark.landing
def test_json_is_one_document(base: Path) -> None:
    with running(base, "--json", "--model-name", "prod") as process:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
        document = json.loads("".join(lines))
        port = document.pop("port")
        assert document == {
            "format_version": 1,
            "model": "prod",
            "version": 1,
            "models": [{"model": "prod", "version": 1, "tables": None}],
            "host": "127.0.0.1",
            "rest_port": None,
        }
        with ModelClient(f"127.0.0.1:{port}", "prod") as client:
            assert client.predict({"x": X}).version == 1
        out, _ = end(process, signal.SIGINT)
    assert (process.returncode, out) == (130, "")


@pytest.mark.landing
def test_the_start_script_of_a_stock_server(base: Path, tmp_path: Path) -> None:
    """As the image of TensorFlow Serving calls its server, with what people add to it."""
    script = tmp_path / "start.sh"
    script.write_text(
        'exec "$@" --port=0 --rest_api_port=0 --model_name="$MODEL_NAME" --model_base_path="$MODEL_BASE_PATH"'
        " --file_system_poll_wait_seconds=1 --enable_batching=true --enable_model_warmup=false"
        " --tensorflow_session_parallelism=2 --grpc_channel_arguments=grpc.max_connection_age_ms=60000\n"
    )
    environment = {**os.environ, "MODEL_NAME": "prod", "MODEL_BASE_PATH": str(base)}
    process = subprocess.Popen(
        ["sh", str(script), sys.executable, "-m", "serving.cli", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    try:
        line = ready_line(process)
        assert line.startswith("serving prod version 1 on 127.0.0.1:")
        with ModelClient(line.split(" on ")[1].split()[0].rstrip(",;"), "prod") as client:
            assert client.predict({"x": X}).version == 1
        _, talk = end(process, signal.SIGTERM)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "--enable_batching has no effect in serve-model run" in talk


@pytest.mark.landing
def test_several_models_of_a_file_are_announced(made: dict[int, Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(made[1], tmp_path / name / "1")
    entries = "".join(
        f"config {{ name: '{name}' base_path: '{tmp_path / name}' model_platform: 'tensorflow' }}"
        for name in ("b", "a")
    )
    (tmp_path / "models.config").write_text(f"model_config_list {{ {entries} }}")
    arguments = [sys.executable, "-m", "serving.cli", "run", "--port=0"]
    process = subprocess.Popen(
        [*arguments, f"--model_config_file={tmp_path / 'models.config'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        lines = [ready_line(process), ready_line(process)]
        assert [line.split()[:4] for line in lines] == [["serving", name, "version", "1"] for name in "ab"]
        end(process, signal.SIGTERM)
    finally:
        process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_while_it_waits(base: Path, number: signal.Signals, code: int) -> None:
    (base / "2").mkdir()
    with running(base) as process:
        assert process.stderr is not None
        while "version 2: LOADING" not in process.stderr.readline():
            pass
        end(process, number)
    assert process.returncode == code


@pytest.mark.landing
def test_a_call_under_way_is_answered_before_it_ends(base: Path) -> None:
    with (
        running(base) as process,
        ModelClient(address(process), "ranker", deadline_s=DEADLINE_SECONDS) as client,
    ):
        client.predict({"turns": [1]}, signature="slow")
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(client.predict({"turns": [20_000]}, signature="slow"))
        )
        thread.start()
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        thread.join(DEADLINE_SECONDS)
        assert process.wait(DEADLINE_SECONDS) == 0
    assert answers[0].outputs["rounds"] == 20_000


def test_a_version_that_cannot_be_loaded_ends_it(base: Path) -> None:
    shard = next((base / "1" / "variables").glob("*.data-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with running(base) as process:
        out, talk = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, out) == (7, "")
    assert "error: version 1 of ranker cannot be served" in talk
    assert "cause: OUT_OF_RANGE" in talk
    assert "Traceback" not in talk


@pytest.mark.landing
def test_nobody_reads_what_it_says(base: Path, made: dict[int, Path]) -> None:
    """A closed stderr must not end the thread that follows the versions."""
    with running(base) as process, ModelClient(address(process), "ranker") as client:
        assert process.stderr is not None
        process.stderr.close()
        publish(base, made[2], 2)
        wait_for(client, 2, VersionState.AVAILABLE)

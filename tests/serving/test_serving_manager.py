"""Versions that come, go and fail while requests are answered."""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import ServerError
from exporter.wire.protos import message_class
from exporter.wire.tensor_proto import fill
from serving.loader import LoadedModel, Loading
from serving.manager import VersionManager, load_warm
from serving.model_config import Every, Latest, Specific
from serving.status import Code, StatusError, VersionState, VersionStatus
from tests.support.serving_models import write_saved_model, write_warmup

DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.02


LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Version n multiplies by n."""
    root = tmp_path_factory.mktemp("made")
    return {n: write_saved_model(root / str(n), scale=n) for n in (1, 2, 3)}


class Peer:
    """A model base path and its manager, with what was announced."""

    def __init__(self, base: Path, made: dict[int, Path]) -> None:
        self.base, self.made = base, made
        self.announced: list[VersionStatus] = []
        self.manager = VersionManager(
            "ranker",
            base,
            poll_seconds=POLL_SECONDS,
            listener=lambda _, status: self.announced.append(status),
        )

    def publish(self, version: int, change: Callable[[Path], Any] = lambda path: None) -> Path:
        staged = self.base / f".staging-{version}"
        shutil.copytree(self.made[min(version, 3)], staged)
        change(staged)
        return staged.rename(self.base / str(version))

    def until(self, version: int, state: VersionState) -> VersionStatus:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            for status in self.manager.statuses():
                if (status.version, status.state) == (version, state):
                    return status
            time.sleep(0.005)
        raise AssertionError(f"version {version} never was {state.name}: {self.manager.statuses()}")

    def answer(self, version: int | None = None) -> tuple[int, float]:
        """(version that answered, 1.0 times its factor)."""
        with self.manager.borrow(version) as (number, model):
            (y,) = model.run({"x:0": np.ones((1, 2), np.float32)}, ["y:0"])
            return number, float(y[0, 0])


@pytest.fixture
def peer(tmp_path: Path, made: dict[int, Path]) -> Iterator[Peer]:
    peer = Peer(tmp_path / "ranker", made)
    peer.base.mkdir()
    yield peer
    peer.manager.stop(5.0)


def serve(peer: Peer, *versions: int) -> None:
    for version in versions:
        peer.publish(version)
    peer.manager.start()
    peer.manager.wait_available(DEADLINE_SECONDS)


def states(peer: Peer, version: int) -> list[VersionState]:
    return [status.state for status in peer.announced if status.version == version]


def test_the_newest_version_is_served(peer: Peer) -> None:
    serve(peer, 1, 2)
    assert peer.answer() == (2, 2.0)
    assert states(peer, 1) == []


def test_versions_are_compared_as_numbers(peer: Peer) -> None:
    serve(peer, 999, 1000)
    assert peer.answer()[0] == 1000


def test_a_new_version_is_loaded_before_the_old_one_goes(peer: Peer) -> None:
    serve(peer, 1)
    peer.publish(2)
    peer.until(1, VersionState.END)
    assert peer.answer() == (2, 2.0)
    order = [(status.version, status.state) for status in peer.announced]
    assert order.index((2, VersionState.AVAILABLE)) < order.index((1, VersionState.UNLOADING))
    assert states(peer, 2) == [VersionState.START, VersionState.LOADING, VersionState.AVAILABLE]
    with pytest.raises(StatusError, match=r"Specific\(ranker, 1\)"):
        peer.answer(1)


def test_a_borrowed_version_stays_until_it_is_returned(peer: Peer) -> None:
    serve(peer, 1)
    with peer.manager.borrow(None) as (number, model):
        peer.publish(2)
        peer.until(1, VersionState.UNLOADING)
        peer.until(2, VersionState.AVAILABLE)
        peer.publish(3)
        peer.until(3, VersionState.AVAILABLE)  # a request that does not end does not keep new versions away
        (y,) = model.run({"x:0": np.ones((1, 2), np.float32)}, ["y:0"])
        assert (number, float(y[0, 0])) == (1, 1.0)
        assert peer.manager.statuses()[-1].state is VersionState.UNLOADING
    peer.until(1, VersionState.END)


def test_removing_the_newest_version_goes_back(peer: Peer) -> None:
    serve(peer, 1)
    second = peer.publish(2)
    peer.until(1, VersionState.END)
    shutil.rmtree(second)
    peer.until(2, VersionState.END)
    assert peer.answer() == (1, 1.0)


def test_removing_every_version_ends_the_service(peer: Peer) -> None:
    serve(peer, 1)
    shutil.rmtree(peer.base / "1")
    peer.until(1, VersionState.END)
    with pytest.raises(StatusError) as caught:
        peer.answer()
    assert (caught.value.code, caught.value.message) == (
        Code.NOT_FOUND,
        "Servable not found for request: Latest(ranker)",
    )


def test_a_base_path_that_is_gone_for_a_moment_changes_nothing(peer: Peer) -> None:
    serve(peer, 1)
    away = peer.base.rename(peer.base.with_name("away"))
    time.sleep(5 * POLL_SECONDS)
    assert peer.answer() == (1, 1.0)
    away.rename(peer.base)
    peer.publish(2)
    peer.until(2, VersionState.AVAILABLE)


def truncate_shard(directory: Path) -> None:
    shard = next((directory / "variables").glob("*.data-*"))
    shard.write_bytes(shard.read_bytes()[:3])


def remove_variables(directory: Path) -> None:
    shutil.rmtree(directory / "variables")


def scramble_graph(directory: Path) -> None:
    (directory / "saved_model.pb").write_bytes(b"\xff" * 100)


def empty_graph(directory: Path) -> None:
    (directory / "saved_model.pb").write_bytes(b"")


def replace_manifest_by_pointer(directory: Path) -> None:
    (directory / "manifest.json").write_text(LFS_POINTER)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (truncate_shard, Code.OUT_OF_RANGE),
        (replace_manifest_by_pointer, Code.DATA_LOSS),
        (remove_variables, Code.UNKNOWN),
        (scramble_graph, Code.DATA_LOSS),
        (empty_graph, Code.NOT_FOUND),
    ],
)
def test_a_broken_version_never_takes_the_good_one_away(peer: Peer, damage: Any, code: Code) -> None:
    serve(peer, 1)
    peer.publish(2, damage)
    status = peer.until(2, VersionState.END)
    assert status.code is code
    assert status.message
    assert peer.answer() == (1, 1.0)
    peer.publish(3)
    peer.until(3, VersionState.AVAILABLE)
    peer.until(1, VersionState.END)
    assert peer.manager.statuses()[1] == status


def test_a_broken_version_is_tried_again_when_it_has_changed(peer: Peer, made: dict[int, Path]) -> None:
    serve(peer, 1)
    broken = peer.publish(2, truncate_shard)
    peer.until(2, VersionState.END)
    attempts = states(peer, 2).count(VersionState.LOADING)
    time.sleep(5 * POLL_SECONDS)
    assert states(peer, 2).count(VersionState.LOADING) == attempts
    shutil.copytree(made[2], broken, dirs_exist_ok=True)
    peer.until(2, VersionState.AVAILABLE)
    assert peer.answer() == (2, 2.0)


def test_a_directory_without_a_model_is_waited_for(peer: Peer, made: dict[int, Path]) -> None:
    (peer.base / "1").mkdir()
    peer.manager.start()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := [s for s in peer.manager.statuses() if s.code]) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (found[0].state, found[0].code) == (VersionState.LOADING, Code.NOT_FOUND)
    shutil.copytree(made[1], peer.base / "1", dirs_exist_ok=True)
    assert peer.manager.wait_available(DEADLINE_SECONDS) == 1


def test_waiting_ends_when_the_version_cannot_be_loaded(peer: Peer) -> None:
    peer.publish(1, truncate_shard)
    peer.manager.start()
    with pytest.raises(ServerError) as caught:
        peer.manager.wait_available(DEADLINE_SECONDS)
    assert caught.value.message == "version 1 of ranker cannot be served"
    assert caught.value.cause.startswith("OUT_OF_RANGE: ")
    assert str(peer.base / "1") in caught.value.hint


def test_waiting_ends_at_its_deadline(peer: Peer) -> None:
    peer.manager.start()
    with pytest.raises(ServerError) as caught:
        peer.manager.wait_available(0.1)
    assert caught.value.message == "no version of ranker became available in 0.1 s"
    assert "no directory whose name is a number" in caught.value.cause


def predict_log(signature: str, **inputs: Any) -> bytes:
    log = message_class("serving.PredictionLog")()
    log.predict_log.request.model_spec.signature_name = signature
    for name, value in inputs.items():
        fill(log.predict_log.request.inputs[name], np.array(value))
    return bytes(log.SerializeToString())


def count(peer: Peer) -> int:
    """How often the stateful signature was called before."""
    with peer.manager.borrow(None) as (_, model):
        (calls,) = model.run({"turns:0": np.array([0])}, ["called:0"])
        return int(calls)


def test_warm_up_requests_are_answered_before_the_version_serves(peer: Peer) -> None:
    records = [predict_log("count", turns=[1])] * 3 + [b""]
    peer.publish(1, lambda path: write_warmup(path, records))
    peer.manager.start()
    peer.manager.wait_available(DEADLINE_SECONDS)
    assert count(peer) == 3


@pytest.mark.parametrize(("iterations", "calls"), [(0, 0), (1, 3), (4, 12)])
def test_warm_up_requests_are_sent_as_often_as_asked(
    tmp_path: Path, made: dict[int, Path], iterations: int, calls: int
) -> None:
    shutil.copytree(made[1], tmp_path / "1")
    write_warmup(tmp_path / "1", [predict_log("count", turns=[1])] * 3)
    model = load_warm(tmp_path / "1", Loading(warmup_iterations=iterations))
    (called,) = model.run({"turns:0": np.array([0])}, ["called:0"])
    model.close()
    assert called == calls


def test_a_graph_with_other_tags_is_not_there(made: dict[int, Path]) -> None:
    with pytest.raises(StatusError, match="tags 'serve', 'gpu' could not be found") as caught:
        load_warm(made[1], Loading(tags=("serve", "gpu")))
    assert caught.value.code is Code.NOT_FOUND


def test_threads_of_a_session(made: dict[int, Path]) -> None:
    model = load_warm(made[1], Loading(intra_op_threads=1, inter_op_threads=1))
    (y,) = model.run({"x:0": np.ones((1, 2), np.float32)}, ["y:0"])
    model.close()
    assert y.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("kind", ["classify", "regress", "multi_inference"])
def test_warm_up_by_other_calls(peer: Peer, kind: str) -> None:
    log = message_class("serving.PredictionLog")()
    request = getattr(log, f"{kind}_log").request
    if kind == "multi_inference":
        task = request.tasks.add(method_name="tensorflow/serving/regress")
        task.model_spec.name, task.model_spec.signature_name = "ranker", "regress"
    else:
        request.model_spec.signature_name = kind
    added = request.input.example_list.examples.add()
    added.features.feature["x"].float_list.value.extend([1, 2])
    peer.publish(1, lambda path: write_warmup(path, [log.SerializeToString()]))
    peer.manager.start()
    assert peer.manager.wait_available(DEADLINE_SECONDS) == 1


NEGATIVE = predict_log("check", x=np.float32([[-1, 1]]))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("write", "code", "text"),
    [
        (lambda p: write_warmup(p, [NEGATIVE]), Code.INVALID_ARGUMENT, "x must be positive"),
        (lambda p: write_warmup(p, [predict_log("none")]), Code.FAILED_PRECONDITION, '"none" not found'),
        (lambda p: write_warmup(p, [b"\xff\xff"]), Code.INVALID_ARGUMENT, "Failed to parse warmup record"),
        (lambda p: write_warmup(p, [b""] * 1001), Code.INVALID_ARGUMENT, "exceeds the maximum (1000)"),
        (lambda p: write_warmup(p, [session_run_log()]), Code.UNIMPLEMENTED, "Unsupported log_type"),
        (lambda p: flip_last_byte(write_warmup(p, [b"", b""])), Code.DATA_LOSS, "verify your warmup data"),
        (lambda p: write_warmup(p, []).write_bytes(b"short"), Code.DATA_LOSS, "verify your warmup data"),
        (lambda p: write_warmup(p, []).write_text(LFS_POINTER), Code.DATA_LOSS, "is a pointer of Git LFS"),
        (lambda p: write_warmup(p, []).write_bytes(b"\xff" * 64), Code.DATA_LOSS, "verify your warmup data"),
    ],
)  # fmt: skip
def test_a_failing_warm_up_keeps_the_version_from_serving(
    peer: Peer, write: Any, code: Code, text: str
) -> None:
    serve(peer, 1)
    peer.publish(2, write)
    status = peer.until(2, VersionState.END)
    assert status.code is code
    assert text in status.message
    assert peer.answer() == (1, 1.0)


def session_run_log() -> bytes:
    log = message_class("serving.PredictionLog")()
    log.session_run_log.SetInParent()
    return bytes(log.SerializeToString())


def test_a_loaded_version_holds_its_manifest(peer: Peer) -> None:
    """What retention asks before it removes a version."""
    manifest = peer.publish(1, lambda path: (path / "manifest.json").write_text("{}")) / "manifest.json"
    peer.manager.start()
    peer.manager.wait_available(DEADLINE_SECONDS)
    with manifest.open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        peer.publish(2)
        peer.until(1, VersionState.END)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_failed_load_lets_go_of_the_manifest(peer: Peer) -> None:
    def damage(path: Path) -> None:
        (path / "manifest.json").write_text("{}")
        truncate_shard(path)

    manifest = peer.publish(1, damage) / "manifest.json"
    peer.manager.start()
    peer.until(1, VersionState.END)
    with manifest.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_version_that_is_being_removed_is_not_loaded(peer: Peer) -> None:
    manifest = peer.publish(1, lambda path: (path / "manifest.json").write_text("{}")) / "manifest.json"
    with manifest.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        peer.manager.start()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not [s for s in peer.manager.statuses() if s.code] and time.monotonic() < deadline:
            time.sleep(0.005)
        assert {s.code for s in peer.announced if s.code} == {Code.UNAVAILABLE}
    assert peer.manager.wait_available(DEADLINE_SECONDS) == 1  # the lock is free: it was kept after all


def test_other_policies(peer: Peer) -> None:
    serve(peer, 1, 2, 3)
    peer.manager.follow(peer.base, Every())
    peer.until(1, VersionState.AVAILABLE)
    peer.until(2, VersionState.AVAILABLE)
    assert [peer.answer(version)[1] for version in (1, 2, 3)] == [1.0, 2.0, 3.0]
    peer.manager.follow(peer.base, Specific(frozenset({2})))
    peer.until(3, VersionState.END)
    assert peer.answer() == (2, 2.0)
    peer.manager.follow(peer.base, Latest())
    peer.until(2, VersionState.END)
    assert peer.answer() == (3, 3.0)


def test_no_request_fails_while_versions_change(peer: Peer) -> None:
    serve(peer, 1)
    stop = threading.Event()
    answers: list[tuple[int, float]] = []
    failures: list[Exception] = []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(peer.answer())
            except Exception as error:  # noqa: BLE001 - any failure is what this test is about
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in (2, 3):
        peer.publish(version)
        peer.until(version - 1, VersionState.END)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert {number for number, _ in answers} >= {1, 3}
    assert all(number == answer for number, answer in answers)


def test_stopping_unloads_everything(peer: Peer) -> None:
    serve(peer, 1)
    peer.manager.stop(5.0)
    assert peer.manager.statuses() == [VersionStatus(1, VersionState.END)]
    with pytest.raises(StatusError):
        peer.answer()


def test_a_version_that_was_unloaded_meanwhile_stops_nothing(peer: Peer) -> None:
    serve(peer, 1)
    for _ in range(2):  # `stop`, and the thread of an unload that had begun
        peer.manager._unload(1, 0.0)
    assert peer.manager.statuses() == [VersionStatus(1, VersionState.END)]


def test_stopping_cuts_off_what_does_not_end(peer: Peer) -> None:
    serve(peer, 1)
    failures: list[Exception] = []

    def never_ends() -> None:
        with peer.manager.borrow(None) as (_, model):
            started.set()
            try:
                model.run({"turns:0": np.array([1 << 60])}, [rounds])
            except Exception as error:  # noqa: BLE001 - TensorFlow's class, imported late
                failures.append(error)

    with peer.manager.borrow(None) as (_, model):
        rounds = model.signatures["slow"].outputs["rounds"].name
    started = threading.Event()
    thread = threading.Thread(target=never_ends)
    thread.start()
    started.wait(DEADLINE_SECONDS)
    time.sleep(0.1)
    peer.manager.stop(0.1)
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert type(failures[0]).__name__ == "CancelledError"


def test_a_version_whose_warm_up_fails_is_closed(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never served, and would stay in memory."""
    closed: list[object] = []
    close = LoadedModel.close
    monkeypatch.setattr(LoadedModel, "close", lambda model: (closed.append(model), close(model))[1])
    peer.publish(1, lambda path: write_warmup(path, [NEGATIVE]))
    peer.manager.start()
    peer.until(1, VersionState.END)
    assert len(closed) == 1

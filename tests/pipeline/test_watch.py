"""A directory that is followed: which checkpoint is exported, when, and that none is exported twice."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exporter import ExportRequest, StopWhen, Watching, watch
from exporter.checkpoint.tensor_bundle import index_path, read_array, read_catalog, shard_path
from exporter.errors import (
    CheckpointChanged,
    CheckpointNotFound,
    CorruptFile,
    ExportError,
    MissingTensors,
    UsageError,
)
from exporter.options import DeltaDtype
from exporter.pipeline.incremental import export_incremental
from exporter.publish.commit import model_lock
from exporter.publish.model import newest_made_from
from exporter.publish.versions import read_manifest, version_dirs
from exporter.storage.layout import WATCH_LOCK_FILE
from exporter.terminal.progress import NoProgress
from tests.support.bundles import write

ONE_LOOK = Watching(0.01, StopWhen(after_seconds=0))


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The .meta of y = x * factor."""
    import tensorflow as tf

    path = tmp_path_factory.mktemp("graph") / "model.meta"
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        tf.multiply(x, tf.compat.v1.get_variable("factor", [], use_resource=True), "y")
        tf.compat.v1.train.export_meta_graph(str(path))
    return path


@pytest.fixture
def request_(graph: Path, tmp_path: Path) -> ExportRequest:
    names = {"inputs": {"x": "x:0"}, "outputs": {"y": "y:0"}}
    return ExportRequest(tmp_path / "train", tmp_path / "model", model=str(graph), **names)


def save(train: Path, step: int, *, value: float | None = None) -> Path:
    train.mkdir(exist_ok=True)
    factor = np.float32(step if value is None else value)
    return write(train / f"model.ckpt-{step}", factor=factor)


def one_look(request: ExportRequest, told: list[ExportError] | None = None) -> list[int]:
    """The steps that a watch exports at its first look; each call is a restart."""
    tell = (lambda error: None) if told is None else told.append
    return [done.plan.catalog.step or 0 for done in watch(request, watching=ONE_LOOK, tell=tell)]


def published(model: Path) -> list[str]:
    """The checkpoints of the versions, oldest first; none twice."""
    origins = [read_manifest(child.path).source for child in reversed(version_dirs(model))]
    digests = [origin.digest for origin in origins]
    assert None not in digests
    assert len(set(digests)) == len(digests), "a checkpoint was exported twice"
    return [origin.checkpoint for origin in origins]


def served_factor(model: Path) -> float:
    catalog = read_catalog(version_dirs(model)[0].path / "variables/variables")
    return float(read_array(catalog, catalog.tensors["factor"]))


def test_a_directory_that_is_not_there_yet_is_waited_for(request_: ExportRequest) -> None:
    told: list[ExportError] = []
    assert one_look(request_, told) == []
    request_.ckpt_dir.mkdir()
    assert one_look(request_, told) == []
    assert [type(error).__name__ for error in told] == ["CheckpointNotFound"] * 2
    assert not request_.out.exists(), "nothing is written before there is something to export"
    save(request_.ckpt_dir, 10)
    assert one_look(request_) == [10]


def test_no_checkpoint_is_exported_twice_also_after_a_restart(request_: ExportRequest) -> None:
    save(request_.ckpt_dir, 10)
    assert [one_look(request_) for _ in range(3)] == [[10], [], []]
    save(request_.ckpt_dir, 20)
    assert [one_look(request_) for _ in range(2)] == [[20], []]
    assert published(request_.out) == ["model.ckpt-10", "model.ckpt-20"]


def test_of_several_new_checkpoints_the_newest_is_exported(request_: ExportRequest) -> None:
    for step in (9, 10, 100):
        save(request_.ckpt_dir, step)
    assert one_look(request_) == [100]
    assert one_look(request_) == []
    assert published(request_.out) == ["model.ckpt-100"]


def test_one_watch_follows_the_directory(request_: ExportRequest) -> None:
    save(request_.ckpt_dir, 10)
    following = watch(request_, watching=Watching(0.01, StopWhen(count=3)))
    steps = []
    for done in following:
        steps.append(done.published.version)
        save(request_.ckpt_dir, steps[-1] + 10)
    assert steps == [10, 20, 30]


def test_a_checkpoint_is_known_by_its_content(request_: ExportRequest) -> None:
    save(request_.ckpt_dir, 10)
    assert one_look(request_) == [10]
    save(request_.ckpt_dir, 10, value=0.5)
    assert one_look(request_) == [10], "the trainer went back and saved other values under the same name"
    assert served_factor(request_.out) == 0.5
    save(request_.ckpt_dir, 20, value=10)
    assert one_look(request_) == [], "the same values under another name"


def test_an_archive_that_is_overwritten_is_another(request_: ExportRequest) -> None:
    request_.ckpt_dir.mkdir()
    request = replace(request_, ckpt_dir=request_.ckpt_dir / "latest.npz")
    for value in (1.0, 2.0):
        np.savez(request.ckpt_dir.with_name("next.npz"), factor=np.float32(value))
        request.ckpt_dir.with_name("next.npz").rename(request.ckpt_dir)
        assert [len(one_look(request)) for _ in range(2)] == [1, 0]
        assert served_factor(request.out) == value


def test_an_archive_that_becomes_complete_is_met_at_once(request_: ExportRequest) -> None:
    request_.ckpt_dir.mkdir()
    np.savez(whole := request_.out.with_name("whole.npz"), factor=np.float32(2))
    file, content = request_.ckpt_dir / "model.npz", whole.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    once_an_hour = Watching(3600, StopWhen(count=1, after_seconds=3600))
    began, told = time.monotonic(), list[ExportError]()

    def complete(error: ExportError) -> None:
        told.append(error)
        file.write_bytes(content)

    assert len([*watch(request_, watching=once_an_hour, tell=complete)]) == 1
    assert time.monotonic() - began < 600
    assert (len(told), served_factor(request_.out)) == (1, 2)


def test_what_lies_beside_an_archive_makes_it_no_other(request_: ExportRequest) -> None:
    request_.ckpt_dir.mkdir()
    request = replace(request_, ckpt_dir=request_.ckpt_dir / "latest.npz")
    np.savez(request.ckpt_dir, factor=np.float32(1))
    assert len(one_look(request)) == 1
    request.ckpt_dir.with_name("latest.npz.sha256").write_text("0" * 64)
    assert one_look(request) == []


def test_a_version_that_was_exported_without_watching_counts(request_: ExportRequest) -> None:
    from exporter import export

    save(request_.ckpt_dir, 10)
    digest = export(request_).plan.checkpoint.digest
    assert one_look(request_) == []
    made = newest_made_from(request_.out, digest)
    assert made is not None
    assert made.version == 10


def without_shard(prefix: Path) -> Callable[[], None]:
    shard = shard_path(prefix, 0, 1)
    shard.rename(prefix.parent / "elsewhere")
    return lambda: (prefix.parent / "elsewhere").rename(shard) and None


def half_of(path: Path) -> Callable[[], None]:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return lambda: path.write_bytes(content) and None


@pytest.mark.parametrize(
    "spoil",
    [
        without_shard,
        lambda prefix: half_of(index_path(prefix)),
        lambda prefix: half_of(shard_path(prefix, 0, 1)),
    ],
    ids=["no shard", "half an index", "half a shard"],
)
def test_a_half_written_checkpoint_is_never_exported(
    request_: ExportRequest, spoil: Callable[[Path], Callable[[], None]]
) -> None:
    complete = spoil(save(request_.ckpt_dir, 10))
    for _ in range(2):
        with pytest.raises(ExportError):
            one_look(request_)
    assert published(request_.out) == []
    complete()
    assert one_look(request_) == [10]


def test_a_damaged_checkpoint_is_told_and_the_next_one_exported(request_: ExportRequest) -> None:
    index = index_path(save(request_.ckpt_dir, 10))
    content = bytearray(index.read_bytes())
    content[10] ^= 1
    index.write_bytes(content)
    told = []

    def tell(error: ExportError) -> None:
        told.append(type(error))
        save(request_.ckpt_dir, 20)

    (done,) = watch(request_, watching=Watching(0.01, StopWhen(count=1)), tell=tell)
    assert (done.published.version, told) == (20, [CorruptFile])


def test_the_graph_beside_a_checkpoint_is_waited_for(request_: ExportRequest, graph: Path) -> None:
    """A Saver writes the .meta after the index and the state file."""
    request, prefix = replace(request_, model=None), save(request_.ckpt_dir, 10)
    told: list[ExportError] = []
    assert one_look(request, told) == []
    assert "model.ckpt-10.meta" in told[0].message
    with pytest.raises(CheckpointNotFound, match=r"model\.ckpt-10\.meta"):
        export_incremental(request, is_watching=True)
    shutil.copy(graph, prefix.with_name("model.ckpt-10.meta"))
    assert one_look(request) == [10]


def test_a_graph_that_never_comes_is_not_waited_for(request_: ExportRequest) -> None:
    """A tf.train.Checkpoint has no .meta."""
    import tensorflow as tf

    tf.train.Checkpoint(factor=tf.Variable(1.0)).write(str(request_.ckpt_dir / "ckpt-1"))
    with pytest.raises(UsageError, match="--model"):
        one_look(replace(request_, model=None))


def test_the_saved_model_that_variables_belong_to_is_served(request_: ExportRequest, graph: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    directory = request_.ckpt_dir / "saved_model"
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(str(graph))
        session.run(v1.global_variables_initializer())
        x, y = (session.graph.get_tensor_by_name(name) for name in ("x:0", "y:0"))
        v1.saved_model.simple_save(session, str(directory), {"x": x}, {"y": y})
    request = ExportRequest(directory / "variables", request_.out)
    assert len(one_look(request)) == 1


def test_a_checkpoint_that_is_pruned_meanwhile_is_no_failure(request_: ExportRequest) -> None:
    prefix = save(request_.ckpt_dir, 10)

    def build() -> None:
        for path in prefix.parent.glob("model.ckpt-10.*"):
            path.unlink()
        raise FileNotFoundError("the builder reads the checkpoint, which is gone")

    told: list[ExportError] = []
    assert one_look(replace(request_, model=build, inputs={}, outputs={}), told) == []
    assert [type(error) for error in told] == [CheckpointChanged]
    save(request_.ckpt_dir, 20)
    assert one_look(request_) == [20]


def test_a_checkpoint_that_does_not_fit_ends_the_watch(request_: ExportRequest) -> None:
    request_.ckpt_dir.mkdir()
    write(request_.ckpt_dir / "model.ckpt-10", other=np.float32(1))
    with pytest.raises(MissingTensors):
        one_look(request_)
    assert published(request_.out) == []


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_published(request_: ExportRequest) -> None:
    """The files of another checkpoint of the same name and size come between the index and the links."""
    save(request_.ckpt_dir, 10)
    told = []

    @contextmanager
    def replacing(label: str, total: int) -> Iterator[Any]:
        if not told:
            save(request_.ckpt_dir, 10, value=0.5)
        yield NoProgress()

    (done,) = watch(
        request_, watching=Watching(0.01, StopWhen(count=1)), tell=told.append, progress=replacing
    )
    assert [type(error) for error in told] == [CheckpointChanged]
    assert done.published.version == 10
    assert served_factor(request_.out) == 0.5


def test_watches_at_once_share_the_work(request_: ExportRequest) -> None:
    save(request_.ckpt_dir, 10)
    start, exported = threading.Barrier(4), list[int]()

    def follow() -> None:
        start.wait(60)
        exported.extend(one_look(request_))

    threads = [threading.Thread(target=follow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert exported == [10]
    assert published(request_.out) == ["model.ckpt-10"]


def test_a_watch_lets_another_one_finish(request_: ExportRequest) -> None:
    save(request_.ckpt_dir, 10)
    request_.out.mkdir()
    told: list[ExportError] = []
    with ExitStack() as other:
        other.enter_context(model_lock(request_.out, name=WATCH_LOCK_FILE))
        assert one_look(request_, told) == []
        release = threading.Timer(0.2, other.close)
        release.start()
        watching = Watching(0.01, StopWhen(count=1, after_seconds=60))
        (done,) = watch(request_, watching=watching, tell=told.append)
        release.join()
    assert (done.published.version, told) == (10, [])


def test_a_builder_runs_once(request_: ExportRequest) -> None:
    import tensorflow as tf

    runs = []

    def build() -> Any:
        runs.append(1)
        x = tf.compat.v1.placeholder(tf.float32, [None], "x")
        return {"x": x}, {"y": x * tf.compat.v1.get_variable("factor", [])}

    request = replace(request_, model=build, inputs={}, outputs={})
    save(request.ckpt_dir, 10)
    for done in watch(request, watching=Watching(0.01, StopWhen(count=3))):
        assert served_factor(request.out) == done.published.version
        save(request.ckpt_dir, done.published.version + 1)
    assert (len(runs), published(request.out)) == (1, [f"model.ckpt-{step}" for step in (10, 11, 12)])


def test_one_versions_number_is_refused(request_: ExportRequest) -> None:
    with pytest.raises(UsageError, match="--version 7"):
        list(watch(replace(request_, version="7"), watching=ONE_LOOK))


@pytest.mark.parametrize("option", [{"min_change": 0.5}, {"delta_dtype": DeltaDtype.BFLOAT16}])
def test_options_of_deltas_are_refused(request_: ExportRequest, option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a version is exact"):
        one_look(replace(request_, **option))

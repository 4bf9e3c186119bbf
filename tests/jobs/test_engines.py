"""One contract for every engine: equal results, whatever dies, is done twice, is interrupted or goes wrong.

Each runs real: Ray's and Dask's clusters of one machine, Beam's worker processes, each in an environment of
its extra. `make engines` has what takes longer.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from exporter.bundle.variables import Move
from exporter.catalog import SliceSpec, TensorRef
from exporter.checkpoint.admission import EVERYONE
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.delta.compare_rows import Compare, StoredSide
from exporter.delta.format import ChangeKind, ServedVariable
from exporter.delta.newest_rows import Merge, NewestRows
from exporter.delta.row_reader import RowReader, SliceOrder
from exporter.errors import EngineFailed, UsageError
from exporter.jobs.engines import beam, dask, process
from exporter.jobs.engines.beam import OUTCOMES, do, numbered_works, outcomes_of, put_works
from exporter.jobs.engines.engine_options import require_reachable, require_room, require_short, why
from exporter.jobs.engines.process import Asked, ProcessEngine
from exporter.jobs.execute import OPERATIONS, decode, encode, failed
from exporter.jobs.runner import choose_engine
from exporter.jobs.shard_sections import MovedRows
from exporter.jobs.task import Digest, Input
from exporter.storage.output_directory import open_directory
from exporter.tables.geometry import TableGeometry
from exporter.tables.place_keys import KeyRanges, KeyRun, Partition, PlaceKeys, RangeRun, SortedKeys
from exporter.verify.version_files import Checksum
from exporter.version import __version__
from exporter.wire.dtypes import DType
from tests.support import engine_job
from tests.support.engine_runs import ENGINES, TABLES, EngineRuns, python_of, wait_until
from tests.support.faulty_store import Fault, Weather, faulty
from tests.support.object_stores import Bucket
from tests.support.small_disks import small_disk

REPLACES_WORKERS = {"ray", "dask"}
"""Engines that go on when a worker dies. Of the others the command ends, and the same command resumes."""


@pytest.fixture(params=ENGINES)
def runs(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> EngineRuns:
    return EngineRuns(request.param, python_of(request.param, tmp_path_factory), tmp_path)


def test_what_the_extras_install_fits_together() -> None:
    subprocess.run([sys.executable, "-m", "pip", "check"], check=True)


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--engine ray needs ray") as caught:
        choose_engine("ray")
    assert "pip install '.[ray]'" in caught.value.hint


def test_an_engine_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="there is no engine 'spark'") as caught:
        choose_engine("spark")
    assert "local, ray" in caught.value.hint


def test_the_local_engine_has_no_cluster() -> None:
    for wrong in ({"address": "tcp://127.0.0.1:1"}, {"options": {"num_cpus": "2"}}):
        with pytest.raises(UsageError, match="neither an address nor options"):
            choose_engine("local", **wrong)


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(EngineFailed, match=r"nothing answers at 127\.0\.0\.1:1") as caught:
        decode(next(choose_engine("ray", 1, "127.0.0.1:1").run([b""]))).settle()
    assert "Connection refused" in caught.value.cause


@pytest.mark.parametrize(
    ("engine", "address"),
    [
        ("ray", "head"),
        ("ray", "tcp://head:6379"),
        ("dask", "http://scheduler:8786"),
        ("dask", "scheduler:port"),
        ("beam", "job-server:99999"),
        ("beam", ":8099"),
    ],
)
def test_what_is_no_address(engine: str, address: str) -> None:
    with pytest.raises(UsageError, match=f"{address} is not an address of {engine}"):
        require_reachable(engine, address)


def test_something_else_at_an_address() -> None:
    """Engines would wait for it for ever."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        engine = ProcessEngine(Asked("dask", address=address, silent_s=3))
        with pytest.raises(EngineFailed, match=f"dask did not begin at {address} within 3 s"):
            decode(next(engine.run([b""]))).settle()


@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_more_workers_than_a_machine_has_room_for(engine: str) -> None:
    with pytest.raises(UsageError, match="of memory, and this machine has"):
        decode(next(choose_engine(engine, 1_000_000).run([b""]))).settle()


@pytest.mark.parametrize(
    ("run", "option", "says"),
    [
        (dask.run, {"foo": "1"}, "Dask does not take --engine foo"),
        *(
            (beam.run, {"stall": text}, f"stall={text} is not a number of seconds")
            for text in ("soon", "nan", "inf", "-1", "0")
        ),
        (beam.run, {"stall": "1e12"}, "--engine stall is 1e.12 seconds, which is too long"),
        (beam.run, {"results": "hdfs://a/b"}, "hdfs://a/b"),
        (beam.run, {"runner": "DataflowRunner"}, "where to put what they did"),
    ],
)
def test_options_that_no_engine_follows(run: Any, option: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        next(run(iter(()), Asked("any", options=option)))


def test_options_that_ray_does_not_follow() -> None:
    with pytest.raises(UsageError, match="Invalid option keyword nonsense"):
        decode(next(choose_engine("ray", 1, "", {"nonsense": "1"}).run([b""]))).settle()
    there = {"CPU": 2.0, "memory": 1e9}
    require_room({"num_cpus": 2, "memory": 1e9, "resources": None, "max_retries": 3}, there)
    for wanted in ({"num_cpus": 3}, {"num_gpus": 0.5}, {"resources": {"IO": 1}}):
        with pytest.raises(UsageError, match="a task asks for"):
            require_room(wanted, there)


def test_a_directory_that_is_too_long_for_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(str(tmp_path)) > 31
    with pytest.raises(UsageError, match="too long a path") as caught:
        decode(next(choose_engine("ray", 1).run([b""]))).settle()
    assert "TMPDIR=/tmp" in caught.value.hint
    require_short("/tmp/ray-12345678")


def expected(runs: EngineRuns) -> str:
    """What this process makes of the checkpoint."""
    return engine_job.main(runs.asked(engine="local", kept=""))["digest"]


@pytest.mark.landing
def test_workers_that_are_killed(runs: EngineRuns) -> None:
    for task, step in ((3, "before"), (6, "between"), (9, "after")):
        runs.at(step, task, "kill")
    ran = [runs.run()]
    while "digest" not in ran[-1]:
        assert len(ran) < 4
        ran.append(runs.run())
    assert list(runs.faults.iterdir()) == [], "all were killed"
    assert ran[-1]["digest"] == expected(runs)
    assert ran[-1]["heavy"] == [], "a command imports neither TensorFlow nor the engine"
    if runs.engine in REPLACES_WORKERS:
        assert len(ran) == 1
    else:
        assert ran[-1]["works"] < TABLES
        assert all(done.get("error", "EngineFailed") == "EngineFailed" for done in ran[:-1])
    runs.await_no_process()


@pytest.mark.landing
def test_an_interrupted_job_goes_on_on_another_engine(runs: EngineRuns) -> None:
    held = [runs.at("before", task, "wait") for task in range(10, TABLES)]
    process = runs.start()
    wait_until(lambda: len(runs.receipts()) == 10, f"ten tasks are done: {runs.receipts()}")
    process.send_signal(signal.SIGINT)
    if runs.engine == "local":  # threads end what they have begun
        time.sleep(0.5)
        release(held)
    process.communicate(timeout=120)
    assert process.returncode in (-signal.SIGINT, 1)
    runs.await_no_process()
    release(held)
    done = len(runs.receipts())
    assert 10 <= done < TABLES
    time.sleep(0.5)
    assert len(runs.receipts()) == done, "nobody writes any more"
    last = runs.run(engine="local")
    assert last["works"] == TABLES - done
    assert last["digest"] == expected(runs)


def release(held: list[Path]) -> None:
    for path in held:
        path.unlink(missing_ok=True)


def test_every_operation_and_whatever_goes_wrong(
    runs: EngineRuns, bucket: Bucket, full_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session of the engine does all of it: an error with a name is an outcome like another."""
    with faulty(bucket.environment["AWS_ENDPOINT_URL"], WeatherOfKeys()) as (address, weather):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        runs.kept.mkdir()  # as a command does: a worker that does not see it is elsewhere
        works = [*on_files(runs, full_disk), *in_a_store(runs, bucket)]
        file = runs.directory / "works"
        file.write_bytes(b"\n".join(work for _, work in works))
        outcomes = [decode(json.dumps(each).encode()) for each in runs.run(works=str(file))["outcomes"]]
    assert {json.loads(work)["operation"] for _, work in works} == set(OPERATIONS)
    ended = Counter(each.failure.error if each.failure else "ok" for each in outcomes)
    assert ended == Counter(name for name, _ in works)
    for key, count in weather.seen.items():
        assert "/403/" not in key[1] or count == 1, "nobody asks that again"
    done = [each.receipt for each in outcomes if each.receipt]
    assert len({(receipt.task, receipt.read, receipt.wrote, receipt.rows) for receipt in done}) == 7, (
        "the same whatever happened on the way"
    )
    names = {"table", "compared", "sorted", "placed", "merged"}
    assert runs.outputs() == names | {f"{name}.json" for name in names}
    assert (runs.kept / "merged").read_bytes() == (runs.kept / "table").read_bytes()
    written = [key for key in bucket.keys("") if key.endswith("/out/table")]
    assert sorted(written) == sorted(f"{fault}/out/table" for fault in SURVIVED)


SURVIVED = {
    "good": (None, 0),
    "500-twice": (Fault.STATUS_500, 2),
    "429-twice": (Fault.STATUS_429, 2),
    "closed": (Fault.CLOSED, 1),
    "half": (Fault.HALF, 1),
    "slow": (Fault.SLOW, 1),
}
"""What a store may do to a task that ends well, and how often; keys begin with it."""

FATAL = {"403": (Fault.STATUS_403, 1 << 30), "500": (Fault.STATUS_500, 1 << 30)}


class WeatherOfKeys(Weather):
    """Each object has its own."""

    def fault_of(self, method: str, path: str) -> Fault | None:
        self.seen[method, path] += 1
        for name, (fault, times) in (SURVIVED | FATAL).items():
            if f"/{name}/" in path and self.seen[method, path] <= times:
                return None if fault is Fault.HALF and "/receipts/" in path else fault
        return None


def on_files(runs: EngineRuns, full: Path) -> Iterator[tuple[str, bytes]]:
    """What works end with, and the works; what is done twice is asked for twice."""
    source = Input.of(runs.shard)
    of_index = list(indexing(runs, source, str(runs.kept)))
    for _ in range(2):
        yield "ok", reading(runs, source)
        yield "ok", encode(Digest(name="table", inputs=(source,)), "", keep=False)
        yield "ok", writing(runs, source, str(runs.kept))
        yield "ok", comparing(runs, source, str(runs.kept))
        yield from (("ok", work) for work in of_index)
        yield "ok", merging(runs, source, str(runs.kept))
    yield "CheckpointChanged", reading(runs, Input(source.place, source.size, "1"))
    yield "DiskFull", writing(runs, source, str(full))
    yield "UsageError", writing(runs, source, str(runs.directory / "of another machine"))
    yield "UsageError", reading(runs, source).replace(__version__.encode(), b"0.0.1")


def in_a_store(runs: EngineRuns, bucket: Bucket) -> Iterator[tuple[str, bytes]]:
    """The same of objects, which the store gives and takes as their keys say."""
    for fault in (*SURVIVED, *FATAL):
        bucket.put(f"{fault}/shard", runs.shard.read_bytes())
        tag = bucket.client.head_object(Bucket=bucket.name, Key=f"{fault}/shard")["ETag"]
        source = Input(bucket.url(f"{fault}/shard"), runs.shard.stat().st_size, tag)
        yield "ok" if fault in SURVIVED else "StoreUnavailable", reading(runs, source)
        if fault != "500":
            good = Input.of(runs.shard)
            work = writing(runs, good, bucket.url(f"{fault}/out"))  # which looks for a receipt first
            yield "ok" if fault in SURVIVED else "StoreUnavailable", work
    replaced = structs.replace(source, place=bucket.url("good/shard"), tag='"1"')
    yield "CheckpointChanged", reading(runs, replaced)


def reading(runs: EngineRuns, source: Input) -> bytes:
    ranges = (runs.table_range(),)
    return encode(Checksum(name="table", inputs=(source,), ranges=ranges), "", keep=False)


def writing(runs: EngineRuns, source: Input, directory: str) -> bytes:
    wanted = runs.table_range()
    segment = MovedRows("t", DType.FLOAT, DType.FLOAT, wanted.size // 4, (wanted,), False, (1,), False)
    return encode(Move(name="table", inputs=(source,), sections=(segment,)), directory, keep=True)


def indexing(runs: EngineRuns, source: Input, directory: str) -> Iterator[bytes]:
    """A table's bytes, taken for keys, are sorted, and what was sorted before is placed in an index."""
    stored = read_catalog(runs.prefix).tensors["t00"]
    assert stored.extent is not None
    count = stored.extent.size // 8
    ref = TensorRef("keys", DType.INT64, (count,), structs.replace(stored.extent, shard=0))
    ranges = KeyRanges.of(TableGeometry.for_keys(count), count)
    runs_of_keys = (KeyRun(ranges, ref, 0, count, 0),)
    sort = Partition(
        name="sorted", inputs=(source,), checkpoint="c", runs=runs_of_keys, admission=EVERYONE, step=None
    )
    yield encode(sort, directory, keep=True)
    sort.run(open_directory(str(runs.directory)))
    run = RangeRun("t", ranges, 0, 1, (SortedKeys(0, 0, (count,)),), (("keys", count),))
    sorted_keys = Input.of(runs.directory / "sorted")
    yield encode(
        PlaceKeys(name="placed", inputs=(sorted_keys,), checkpoint="c", runs=(run,)), directory, keep=True
    )


def comparing(runs: EngineRuns, source: Input, directory: str) -> bytes:
    """The rows in which two tables of the shard differ: all."""
    catalog = read_catalog(runs.prefix)
    old, new = (catalog.tensors[name] for name in ("t00", "t01"))
    box = SliceSpec.whole(old.shape)
    rows = old.shape[0]
    sides = [
        StoredSide.of(RowReader("t", catalog, each, box, each.dtype, SliceOrder()), 0, rows, number)
        for number, each in enumerate((old, new))
    ]
    task = Compare(
        name="compared",
        inputs=(source, source),
        variable=ServedVariable("t", old.dtype, old.shape, ChangeKind.TABLE),
        old=sides[0],
        new=sides[1],
        start=0,
        stop=rows,
        seed=7,
    )
    return encode(task, directory, keep=True)


def merging(runs: EngineRuns, source: Input, directory: str) -> bytes:
    """The rows of a base that no delta changed."""
    ref = read_catalog(runs.prefix).tensors["t00"]
    variable = ServedVariable("t", ref.dtype, ref.shape, ChangeKind.TABLE)
    section = NewestRows(variable, 0, ref.shape[0], (), (runs.table_range(),))
    return encode(Merge(name="merged", inputs=(source,), sections=(section,)), directory, keep=True)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own without space for a table."""
    with small_disk(tmp_path / "disk", "4k") as disk:
        (disk.path / "filler").write_bytes(bytes(4096))
        yield disk.path


def test_a_pipeline_of_beam_that_hangs_is_given_up(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = EngineRuns("beam", python_of("beam", tmp_path_factory), tmp_path)
    held = [runs.at("before", task, "wait") for task in range(10, TABLES)]
    done = runs.run(options={"stall": "4"})
    assert done["error"] == "EngineFailed"
    assert "was done for 4 s" in done["message"]
    assert "stall=SECONDS" in done["hint"]
    runs.await_no_process()
    release(held)
    begun = len(runs.receipts())
    done = runs.run(engine="local")
    assert (done["works"], done["digest"]) == (TABLES - begun, expected(runs))


def test_workers_of_beam_tell_of_many_works_by_one_object(tmp_path: Path) -> None:
    """In a store the command would wait for each: 9 ms a task."""
    directory = open_directory(str(tmp_path))
    works = [encode(Checksum(name=str(n), ranges=()), "", keep=False) for n in range(300)]
    assert put_works(directory, works) == 300
    numbered = [each for name in directory.names("works") for each in numbered_works(str(tmp_path), name)]
    assert sorted(numbered) == list(enumerate(works))
    do(str(tmp_path), numbered)
    (name,) = directory.names(OUTCOMES)
    told = {number: decode(outcome).settle().task for number, outcome in outcomes_of(directory, name)}
    assert told == {number: str(number) for number in range(300)}
    with pytest.raises(EngineFailed, match="does not see"):
        numbered_works(str(tmp_path / "of another machine"), "works/0")


@pytest.mark.landing
@pytest.mark.parametrize("fails", [False, True])
def test_beam_leaves_nothing_where_its_workers_tell_outcomes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, fails: bool
) -> None:
    runs = EngineRuns("beam", python_of("beam", tmp_path_factory), tmp_path)
    held = [runs.at("before", 3, "wait")] if fails else []
    results = tmp_path / "results"
    done = runs.run(options={"stall": "4" if fails else "60", "results": str(results)})
    assert done.get("error") == ("EngineFailed" if fails else None)
    assert not list(results.iterdir())
    if fails:
        assert f"remove what its workers may yet write below {results}" in done["hint"]
    release(held)


@pytest.mark.landing
def test_a_node_of_dask_is_killed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A scheduler and two workers over TCP; one worker's whole machine, as it were, is gone in mid-task."""
    runs = EngineRuns("dask", python_of("dask", tmp_path_factory), tmp_path)
    held = [runs.at("before", task, "wait") for task in range(4, TABLES)]
    with runs.dask_cluster(workers=2) as (address, nodes):
        process = runs.start(address=address)
        wait_until(lambda: len(runs.receipts()) == 4, "four tasks are done")
        nodes[0].kill()
        nodes[0].wait()
        release(held)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["digest"] == expected(runs)


def test_workers_of_dask_that_lack_the_package(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A worker that cannot read what it is sent dies, and Dask waits for another one for ever."""
    runs = EngineRuns("dask", python_of("dask", tmp_path_factory), tmp_path)
    (tmp_path / "without/exporter").mkdir(parents=True)
    raises = "raise ModuleNotFoundError(\"No module named 'exporter'\")"
    (tmp_path / "without/exporter/__init__.py").write_text(raises)
    with runs.dask_cluster(workers=1, path=str(tmp_path / "without")) as (address, _):
        done = runs.run(address=address)
    assert (done["error"], done["message"]) == ("EngineFailed", "dask gave up")
    assert "install the same version of export-model" in done["hint"]


def test_an_error_on_another_machine_says_where() -> None:
    """What is not installed or not set is so there, and not where the command runs."""
    outcome = failed(UsageError("no library", hint="pip install it"))
    with pytest.raises(UsageError, match=r"^no library"):
        decode(outcome).settle()
    there = outcome.replace(json.dumps(socket.gethostname()).encode(), b'"node-7"')
    with pytest.raises(UsageError, match=r"^on node-7: no library") as caught:
        decode(there).settle()
    assert caught.value.hint == "pip install it"
    silent = outcome.replace(b"," + b'"host":' + json.dumps(socket.gethostname()).encode(), b"")
    assert silent != outcome
    with pytest.raises(UsageError, match=r"^no library"):
        decode(silent).settle()


def test_what_libraries_raise() -> None:
    """A worker's traceback is not shown; what is said in several lines is."""
    remote = 'ray::execute() (pid=7)\n  File "/a.py", line 1, in <module>\nImportError: no x'
    cause, hint = why(RuntimeError(remote))
    assert (cause, "on every worker" in hint) == ("ImportError: no x", True)
    found = why(RuntimeError("Version mismatch:\n  Ray: 1\n  Ray: 2"))
    assert found == ("RuntimeError: Version mismatch: Ray: 1 Ray: 2", "")

"""Tasks, receipts and the runner: each task is done once across commands, errors keep their names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from exporter.bundle.variables import Move, VariablesReport, write_variables
from exporter.catalog import Catalog, Extent
from exporter.checkpoint.tensor_bundle import BundleWriter, read_array, read_catalog
from exporter.errors import CheckpointChanged, CorruptFile, EngineFailed, MappingError, UsageError
from exporter.graph.inference_graph import GraphVariable
from exporter.jobs import shard_job, shard_sections
from exporter.jobs.execute import decode, encode, execute
from exporter.jobs.runner import LocalEngine, Runner, plan_digest
from exporter.jobs.shard_job import Sources, Stored
from exporter.jobs.shard_sections import MovedRows
from exporter.jobs.task import Input, Range, RangeChecksums, Receipt
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.storage.layout import RECEIPTS_DIRECTORY
from exporter.verify.version_files import Checksum
from exporter.wire.crc32c import extend
from exporter.wire.dtypes import DType
from tests.support.engine_runs import Noted
from tests.support.logs import damage_tensor


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Twelve tables of 100 rows of four floats, in one shard."""
    with BundleWriter(tmp_path / "model.ckpt") as writer:
        for number in range(12):
            writer.add(f"t{number}", table(number))
    return read_catalog(tmp_path / "model.ckpt")


def table(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(100, 4)).astype(np.float32)


def export(catalog: Catalog, out: Path, runner: Runner, cast: DType = DType.BFLOAT16) -> VariablesReport:
    """Cast all tables; a shard for each, by the size of a task."""
    sources = tuple(
        TensorSource(name, (GraphVariable(name, name, cast, ref.shape),), ref, cast=cast)
        for name, ref in catalog.tensors.items()
    )
    return write_variables(VariableMapping(catalog, sources), out, runner=runner)


def test_another_version_goes_on_with_no_job_of_ours(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write other bytes for the same task, and takes a receipt for what it would have written."""
    task = Checksum(name="a", inputs=(Input.of(catalog.shards[0]),), ranges=(Range(0, 0, 1),))
    plan = plan_digest([task])
    assert plan_digest([task]) == plan
    monkeypatch.setattr("exporter.jobs.runner.__version__", "99.0")
    assert plan_digest([task]) != plan


def assert_cast(report: VariablesReport) -> None:
    written = read_catalog(report.catalog.prefix)
    assert len(written.shards) == 12
    for number in range(12):
        found = read_array(written, written.tensors[f"t{number}"])
        np.testing.assert_array_equal(found, table(number).astype(ml_dtypes.bfloat16))


def test_a_job_that_ended_half_way_is_gone_on_with(catalog: Catalog, tmp_path: Path) -> None:
    kept = str(tmp_path / "jobs")
    first = Noted(stop_after=5)
    with pytest.raises(EngineFailed, match="noted ended before"):
        export(catalog, tmp_path / "1", Runner(first, task_bytes=800, kept=kept))
    second = Noted()
    assert_cast(export(catalog, tmp_path / "2", Runner(second, task_bytes=800, kept=kept)))
    assert (len(first.done), len(second.done)) == (5, 7)


@pytest.mark.parametrize("damage", ["receipt", "output", "receipt cut", "output grown"])
def test_what_is_not_as_its_receipt_says_is_done_anew(catalog: Catalog, tmp_path: Path, damage: str) -> None:
    runner = Runner(Noted(stop_after=5), task_bytes=800, kept=str(tmp_path / "jobs"))
    with pytest.raises(EngineFailed):
        export(catalog, tmp_path / "1", runner)
    (job,) = (tmp_path / "jobs").iterdir()
    shard = sorted(job.glob("variables.data-*"))[2]
    receipt = job / RECEIPTS_DIRECTORY / f"{shard.name}.json"
    match damage:
        case "receipt":
            receipt.unlink()
        case "receipt cut":
            receipt.write_bytes(receipt.read_bytes()[:20])
        case "output":
            shard.unlink()
        case "output grown":
            shard.write_bytes(shard.read_bytes() + b"\0")
    second = Noted()
    assert_cast(export(catalog, tmp_path / "2", structs.replace(runner, engine=second)))
    assert len(second.done) == 8


def test_a_task_done_twice_leaves_the_same(catalog: Catalog, tmp_path: Path) -> None:
    twice = Noted(times=2)
    assert_cast(export(catalog, tmp_path / "1", Runner(twice, task_bytes=800)))
    assert len(twice.done) == 12


def test_another_plan_begins_anew(catalog: Catalog, tmp_path: Path) -> None:
    kept = str(tmp_path / "jobs")
    with pytest.raises(EngineFailed):
        export(catalog, tmp_path / "1", Runner(Noted(stop_after=5), task_bytes=800, kept=kept))
    half = Noted()
    export(catalog, tmp_path / "2", Runner(half, task_bytes=800, kept=kept), cast=DType.HALF)
    assert len(half.done) == 12
    shard = catalog.shards[0]
    shard.touch()  # a trainer that writes the same bytes again is another checkpoint
    again = Noted()
    assert_cast(export(catalog, tmp_path / "3", Runner(again, task_bytes=800, kept=kept)))
    assert len(again.done) == 12


def test_an_input_that_is_replaced_meanwhile(catalog: Catalog, tmp_path: Path) -> None:
    shard = catalog.shards[0]

    class Replacing(Noted):
        def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
            for outcome in super().run(works):
                shard.touch()
                yield outcome

    with pytest.raises(CheckpointChanged, match="was replaced or written to"):
        export(catalog, tmp_path / "1", Runner(Replacing(), task_bytes=800))


@pytest.mark.parametrize("engine", [LocalEngine(1), LocalEngine(3), Noted()], ids=["one", "three", "noted"])
def test_damage_and_what_does_not_fit_keep_their_names(
    catalog: Catalog, tmp_path: Path, engine: LocalEngine | Noted
) -> None:
    with catalog.shards[0].open("r+b") as file:
        file.seek(catalog.tensors["t3"].extents[0].offset)
        file.write(np.float32(1.5).tobytes())
    with pytest.raises(CorruptFile, match="is damaged at 't3': its checksum is"):
        export(catalog, tmp_path / "1", Runner(engine, task_bytes=800))
    with BundleWriter(tmp_path / "large.ckpt") as writer:
        writer.add("w", np.float32([70000]))
    with pytest.raises(MappingError, match="too large for float16") as caught:
        export(read_catalog(tmp_path / "large.ckpt"), tmp_path / "2", Runner(engine), cast=DType.HALF)
    assert "bfloat16" in caught.value.hint


def test_a_worker_of_another_version_is_refused() -> None:
    work = msgspec.json.decode(encode(Checksum(name="a", ranges=()), "", keep=False))
    work["version"] = "0.0.1"
    with pytest.raises(UsageError, match=r"this worker has export-model .*, the command 0\.0\.1"):
        decode(execute(msgspec.json.encode(work))).settle()


def test_tasks_are_values_that_survive_json(catalog: Catalog) -> None:
    source = Input.of(catalog.shards[0])
    task = Checksum(name="a", inputs=(source,), bytes_=16, ranges=(Range(0, 0, 16),))
    assert msgspec.json.decode(msgspec.json.encode(task), type=Checksum) == task
    receipt = decode(execute(encode(task, "", keep=False))).settle()
    assert receipt == Receipt("a", read=(extend(0, catalog.shards[0].read_bytes()[:16]),))
    other = structs.replace(task, bytes_=17)
    assert plan_digest([task]) == plan_digest([task]) != plan_digest([other])
    assert plan_digest([Move(name="a", sections=())]) != plan_digest([Checksum(name="a", ranges=())])


@given(
    read=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    buffer=st.sampled_from([1, 7, 1 << 20]),
)
def test_copied_bytes_have_their_checksums_however_they_are_cut(
    read: list[int], cuts: list[int], buffer: int
) -> None:
    """Each byte is checked once; the checksums are those of every range read and of every run written."""
    content = np.random.default_rng(0).bytes(sum(read))
    ends = sorted(min(cut, len(content)) for cut in [0, *cuts, len(content)])
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_sections, "COPY_BYTES", buffer)
        (Path(name) / "source").write_bytes(b"before" + content)
        sources, at = [], 6
        for size in read:
            sources.append(Range(0, at, size))
            at += size
        counts = tuple(stop - start for start, stop in pairwise(ends))
        segment = MovedRows("t", DType.UINT8, DType.UINT8, 1, tuple(sources), False, counts, False)
        task = Move(name="out", inputs=(Input.of(Path(name) / "source"),), sections=(segment,))
        receipt = decode(execute(encode(task, name, keep=False))).settle()
        assert (Path(name) / "out").read_bytes() == content
    assert receipt.read == tuple(extend(0, content[r.offset - 6 : r.offset - 6 + r.size]) for r in sources)
    assert receipt.wrote == tuple(extend(0, content[start:stop]) for start, stop in pairwise(ends))


def test_checksums_of_ranges_are_joined_where_one_ends_and_the_next_begins() -> None:
    content = np.random.default_rng(0).bytes(100)
    found, whole = RangeChecksums[str](), Extent(0, 10, 60, 0)
    assert found.joined("a", Range(0, 10, 20), extend(0, content[10:30]), whole) is None
    assert found.of("a", 10, 60) is None, "the rest was not read"
    assert found.joined("a", Range(0, 30, 40), extend(0, content[30:70]), whole) == extend(0, content[10:70])
    found.add("a", 80, 10, extend(0, content[80:90]))
    assert found.of("a", 10, 80) is None, "ten bytes in between were not read"
    assert found.of("a", 10, 50) is None, "a range ends behind it"
    assert found.of("b", 10, 60) is None, "another file"


def test_a_run_that_the_tasks_read_in_part_is_checked_whole(catalog: Catalog) -> None:
    """A checksum in an index is that of all bytes, whichever of them were needed."""
    for damaged in (False, True):
        files = Sources()
        run = files.range_of(Stored(catalog, catalog.tensors["t3"]))
        part = structs.replace(run, offset=run.offset + 100, size=run.size - 100)
        content = catalog.shards[0].read_bytes()[part.offset : part.offset + part.size]
        files.note(part, extend(0, content))
        if damaged:
            damage_tensor(catalog.prefix, "t3")
            with pytest.raises(CorruptFile, match="'t3'"):
                files.check()
        else:
            files.check()


def test_strings_that_are_copied_are_checked_as_strings(tmp_path: Path) -> None:
    """Their checksum in an index is not that of the bytes alone."""
    with BundleWriter(tmp_path / "model.ckpt") as writer:
        writer.add("words", np.array([b"some", b"", b"words"], object))
    catalog = read_catalog(tmp_path / "model.ckpt")
    for damaged in (False, True):
        if damaged:
            damage_tensor(catalog.prefix, "words")
        files = Sources()
        run = files.range_of(Stored(catalog, catalog.tensors["words"]))
        files.note(run, extend(0, catalog.shards[0].read_bytes()[run.offset : run.offset + run.size]))
        if damaged:
            with pytest.raises(CorruptFile, match="'words'"):
                files.check()
        else:
            files.check()


def test_what_tasks_read_is_not_read_again_for_its_checksums(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers elsewhere have read terabytes; their receipts tell."""
    monkeypatch.setattr(shard_job, "check_values", None)
    assert_cast(export(catalog, tmp_path / "out", Runner(task_bytes=800)))


def test_threads_take_few_works_ahead(catalog: Catalog) -> None:
    """A plan may have a million tasks."""
    task = Checksum(name="a", inputs=(Input.of(catalog.shards[0]),), ranges=(Range(0, 0, 16),))
    taken = list[int]()

    def works() -> Iterator[bytes]:
        for number in range(100):
            taken.append(number)
            yield encode(task, "", keep=False)

    outcomes = LocalEngine(1).run(works())
    for done in range(1, 101):
        next(outcomes)
        assert len(taken) <= done + 3
    assert len(taken) == 100
    assert next(outcomes, None) is None


def test_a_worker_imports_neither_tensorflow_nor_an_engine(catalog: Catalog) -> None:
    task = Checksum(name="a", inputs=(Input.of(catalog.shards[0]),), ranges=(Range(0, 0, 16),))
    code = (
        "import sys; from exporter.jobs.execute import decode, execute\n"
        "decode(execute(sys.stdin.buffer.read())).settle()\n"
        "print({'tensorflow', 'ray', 'distributed', 'apache_beam', 'obstore'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=encode(task, "", keep=False), capture_output=True, check=True
    )
    assert done.stdout == b"set()\n"

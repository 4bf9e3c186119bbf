"""Full exports: bytes that stay where they are, against TensorFlow's own way to load and save a model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.benchmarks import data
from tests.benchmarks.data import Checkpoint
from tests.benchmarks.harness import Benchmark, Lab, Measured, Sample, command, job
from tests.benchmarks.rows import Quantity, Row, bounded, bytes_, cost, gain, seconds

EXPORT_MODEL = Path(sys.executable).with_name("export-model")
MODEL = Path(__file__).with_name("model.py")

_MEMORY_BESIDE_IMPORT = 100e6
_MOST_METADATA = 1 << 20


def bytes_moved(lab: Lab) -> Iterator[Row]:
    """The same model with small and huge tables: shards are linked, so that size does not matter."""
    labels = ("100 MB", "1.5 GB", "1 TB")
    checkpoints = [data.ranker(lab, label) for label in labels]
    small, *others = lab.side_by_side(*(_export(lab, checkpoint) for checkpoint in checkpoints))
    yield Row(f"full export, after imports, {labels[0]} checkpoint", small.time)
    for label, found in zip(labels[1:], others, strict=True):
        yield cost(f"  {label}, against {labels[0]}", found.time, small.time, at_most=1.3)
    results = [sample.result for found in (small, *others) for sample in found.samples]
    yield bounded("  bytes of data written, at any size", _most(results, "data"), at_most=bytes_(0))
    yield bounded("  graph, index, manifest", _most(results, "rest"), at_most=bytes_(_MOST_METADATA))


def many_tensors(lab: Lab) -> Iterator[Row]:
    """A model of as many variables: what each costs beside its bytes."""
    count = 50 if lab.quick else 10_000
    wide = data.wide(lab, count)
    tensors, whole = lab.side_by_side(_variables(lab, wide), _export(lab, wide))
    yield bounded(f"{count:,} tensors: read, map, link, write index", tensors.time, at_most=seconds(0.1))
    yield Row(f"  the same with its training graph of {count:,} variables cleaned, published", whole.time)


def whole_command(lab: Lab) -> Iterator[Row]:
    """`export-model`, from the shell's prompt back to it, beside the import that any exporter begins with."""
    checkpoint = data.ranker(lab, "1.5 GB")
    meta = ["--model", f"{checkpoint.prefix}.meta", "--input", "ids=ids:0", "--output", "score=score:0"]
    builder = ["--model", f"{MODEL}:ranker", "--model-arg", f"rows={checkpoint.rows}"]
    imported, *ours = lab.side_by_side(
        lambda: command(sys.executable, "-c", "import tensorflow"),
        lambda: _export_model(lab, checkpoint, *meta),
        lambda: _export_model(lab, checkpoint, *builder),
        repeats=3,
    )
    limit = bytes_(imported.peak.value + _MEMORY_BESIDE_IMPORT)
    for name, found in zip(("a .meta", "a builder"), ours, strict=True):
        what = f"export-model, 1.5 GB, {name}"
        yield cost(f"{what}, against python -c 'import tensorflow'", found.time, imported.time, at_most=1.3)
        yield bounded("  peak memory", found.peak, at_most=limit, stock=imported.peak)


def against_stock(lab: Lab) -> Iterator[Row]:
    """`import_meta_graph`, `Saver.restore` and `SavedModelBuilder.save` of the same checkpoint."""
    yield from _against_stock(lab, "1.5 GB", "all", at_least=100)
    if not lab.quick:  # there it is all the same
        yield from _against_stock(lab, "1.5 GB", "served", at_least=None)
        yield from _against_stock(lab, "100 MB", "all", at_least=None)


def _against_stock(lab: Lab, label: str, kept: str, *, at_least: float | None) -> Iterator[Row]:
    checkpoint, stock_out = data.ranker(lab, label), lab.directory / "stock"
    ours, stock = lab.side_by_side(_export(lab, checkpoint), _stock_export(lab, checkpoint, kept), repeats=3)
    ours_digest, stock_digest = job(
        "jobs_full_export:answers", checkpoint.rows, _bundle(lab), stock_out
    ).result
    assert ours_digest == stock_digest
    what = f"full export, {label}, against Saver + SavedModelBuilder of {kept} variables"
    yield gain(what, ours.time, stock.time, at_least=at_least)
    yield cost("  peak memory", ours.peak, stock.peak)
    yield cost("  bytes written", ours.written, stock.written)


def compact(lab: Lab) -> Iterator[Row]:
    """`--data compact` beside `cp` of the bytes that it keeps; sources in the page cache, targets new."""
    checkpoint, kept = data.ranker(lab, "1.5 GB"), _kept_bytes(lab)
    ours, stock = lab.side_by_side(
        _variables(lab, checkpoint, "compact"), lambda: command("cp", "-r", kept, lab.fresh("copied"))
    )
    assert ours.samples[0].result == _size(kept)
    label = bytes_(_size(kept))
    yield gain(f"--data compact, copying {label}, against cp", ours.time, stock.time, at_least=0.8)
    durable = 'cp -r "$1" "$2" && sync "$2"/*'
    ours, stock = lab.side_by_side(
        _export(lab, checkpoint, "compact"),
        lambda: command("sh", "-c", durable, "sh", kept, lab.fresh("copied")),
    )
    yield gain("  the whole export, synced, against cp and sync", ours.time, stock.time, at_least=0.8)


def verify(lab: Lab) -> Iterator[Row]:
    """`--verify bytes` beside tools that read the same bytes."""
    kept = _kept_bytes(lab)
    files = sorted(kept.glob("*.data-*"))
    ours, crc, cat = lab.side_by_side(
        lambda: job("jobs_full_export:verify", _bundle(lab)),
        lambda: job("jobs_full_export:plain_crc", *files),
        lambda: command("sh", "-c", 'cat "$@" > /dev/null', "sh", *files),
    )
    assert ours.samples[0].result == crc.samples[0].result
    label = bytes_(ours.samples[0].result)
    yield gain(f"--verify bytes, {label}, against crc32c in one thread", ours.time, crc.time, at_least=1)
    yield gain("  against cat > /dev/null", ours.time, cat.time)


def start_up(lab: Lab) -> Iterator[Row]:
    """What answers without TensorFlow, beside the interpreter alone."""
    checkpoint = data.ranker(lab, "1.5 GB")
    nothing, help_, inspect = lab.side_by_side(
        lambda: command(sys.executable, "-c", "pass"),
        lambda: command(EXPORT_MODEL, "--help"),
        lambda: command(EXPORT_MODEL, "inspect", checkpoint.prefix),
    )
    yield cost("export-model --help, against python -c pass", help_.time, nothing.time)
    yield cost("export-model inspect, 1.5 GB", inspect.time, nothing.time)


def _export(lab: Lab, checkpoint: Checkpoint, mode: str = "auto") -> Measured:
    """Our export into an empty model base path; the version is `_bundle` until the next one."""
    tiny = data.ranker(lab, "100 MB")
    name = "jobs_full_export:export"
    return lambda: job(name, tiny.prefix, checkpoint.prefix, lab.fresh("ours"), mode)


def _bundle(lab: Lab) -> Path:
    return lab.directory / "ours" / "1"


def _variables(lab: Lab, checkpoint: Checkpoint, mode: str = "auto") -> Measured:
    return lambda: job("jobs_full_export:variables", checkpoint.prefix, lab.fresh("variables"), mode)


def _stock_export(lab: Lab, checkpoint: Checkpoint, kept: str) -> Measured:
    tiny = data.ranker(lab, "100 MB")
    name = "jobs_full_export:stock_export"
    return lambda: job(name, tiny.prefix, checkpoint.prefix, lab.fresh("stock"), kept)


def _export_model(lab: Lab, checkpoint: Checkpoint, *options: object) -> Sample:
    return command(
        EXPORT_MODEL, "--ckpt-dir", checkpoint.prefix, "--out", lab.fresh("ours"), "--quiet", *options
    )


def _kept_bytes(lab: Lab) -> Path:
    """A directory with what a compact export keeps of 1.5 GB, verified; the export is `_bundle`."""
    _export(lab, data.ranker(lab, "1.5 GB"), "compact")()
    kept = lab.fresh("kept")
    shutil.copytree(_bundle(lab) / "variables", kept)
    assert job("jobs_full_export:verify", _bundle(lab)).result == _size(kept)
    return kept


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.data-*"))


def _most(results: Iterable[dict[str, int]], key: str) -> Quantity:
    return bytes_(max(result[key] for result in results))


BENCHMARKS: tuple[Benchmark, ...] = (
    bytes_moved,
    many_tensors,
    whole_command,
    against_stock,
    compact,
    verify,
    start_up,
)

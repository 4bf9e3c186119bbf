"""What runs in processes of their own for `bench_full_export`; arguments are text, results are JSON.

What is timed begins after imports: each job has done its work once, on something tiny, before the timer runs.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from exporter.bundle.variables import ShardOrigin, write_variables
from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.mapping.build import build_mapping
from exporter.mapping.mapping_rules import MappingRules
from exporter.options import DataMode, ExportRequest
from exporter.pipeline.full import export as run_export
from exporter.pipeline.full import plan
from exporter.storage.layout import VARIABLES_PREFIX
from exporter.verify.version_files import verify_bytes
from exporter.wire.crc32c import chunks_of, extend
from tests.benchmarks.job import Timer


def export(timer: Timer, tiny: str, prefix: str, out: str, data: str = "auto") -> dict[str, int]:
    """Our export of a `.meta` model; what became of the bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        run_export(export_request(tiny, scratch, data))
    with timer:
        done = run_export(export_request(prefix, out, data))
    shards = [shard.path.name for shard in done.variables.shards if shard.how is not ShardOrigin.LINKED]
    own = [path for path in done.published.path.rglob("*") if path.is_file() and path.stat().st_nlink == 1]
    assert sum(path.name in shards for path in own) == len(shards)
    return {
        "data": sum(path.stat().st_size for path in own if path.name in shards),
        "rest": sum(path.stat().st_size for path in own if path.name not in shards),
    }


def variables(timer: Timer, prefix: str, out: str, data: str = "auto") -> int:
    """The tensors' way alone: read the index, map, link or copy, write the index. The bytes served."""
    graph = plan(export_request(prefix, out)).graph  # also warms what is imported late
    with timer:
        mapping = build_mapping(graph, open_checkpoint(Path(prefix)), MappingRules())
        done = write_variables(mapping, Path(out), data=DataMode(data))
    return done.catalog.bytes_


def export_request(prefix: str, out: str, data: str = "auto") -> ExportRequest:
    tensors = {"inputs": {"ids": "ids:0"}, "outputs": {"score": "score:0"}}
    return ExportRequest(Path(prefix), Path(out), **tensors, data=DataMode(data))


def stock_export(timer: Timer, tiny: str, prefix: str, out: str, kept: str = "all") -> None:
    """TensorFlow's own way: import the training graph, restore and save "all" or the "served" variables."""
    with tempfile.TemporaryDirectory() as scratch:
        restore_and_save(tiny, f"{scratch}/1", kept)
    with timer:
        restore_and_save(prefix, out, kept)


def restore_and_save(prefix: str, out: str, kept: str) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        saver = v1.train.import_meta_graph(f"{prefix}.meta", clear_devices=True)
        if kept == "served":
            saver = v1.train.Saver(v1.trainable_variables(), sharded=True)
        saver.restore(session, prefix)
        signature = v1.saved_model.predict_signature_def(
            {"ids": graph.get_tensor_by_name("ids:0")}, {"score": graph.get_tensor_by_name("score:0")}
        )
        builder = v1.saved_model.Builder(out)
        signatures = {"serving_default": signature}
        builder.add_meta_graph_and_variables(session, ["serve"], signatures, saver=saver)
        builder.save()


def answers(timer: Timer, rows: str, *bundles: str) -> list[str]:
    """For each SavedModel a digest of what it answers to the same requests."""
    import tensorflow as tf

    v1 = tf.compat.v1
    ids = requests(int(rows))
    digests = []
    for bundle in bundles:
        with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
            meta = v1.saved_model.load(session, ["serve"], bundle)
            signature = meta.signature_def["serving_default"]
            score = session.run(signature.outputs["score"].name, {signature.inputs["ids"].name: ids})
            digests.append(hashlib.sha256(score.tobytes()).hexdigest())
    assert score.std() > 0
    return digests


def requests(rows: int, batch: int = 64) -> Any:
    """Ids as the ranker takes them, int64 [batch, 8]; the same each time."""
    return np.random.default_rng(1).integers(0, rows, (batch, 8))


def verify(timer: Timer, bundle: str) -> int:
    """Every stored byte against its checksum; how many there are."""
    catalog = read_catalog(Path(bundle) / VARIABLES_PREFIX)
    with timer:
        return verify_bytes(catalog)


def plain_crc(timer: Timer, *files: str) -> int:
    """google-crc32c over whole files, one after another in one thread; how many bytes they have."""
    sizes = [Path(file).stat().st_size for file in files]
    with timer:
        for file, size in zip(files, sizes, strict=True):
            crc = 0
            with Path(file).open("rb") as opened:
                for chunk in chunks_of(opened.fileno(), 0, size):
                    crc = extend(crc, chunk)
    return sum(sizes)

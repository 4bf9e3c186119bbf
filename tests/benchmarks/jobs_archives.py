"""What runs in processes of their own for `bench_archives`; arguments are text, results are JSON."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint import open_checkpoint
from exporter.checkpoint.tensor_bundle import write_bundle
from exporter.options import ExportRequest
from exporter.pipeline.full import export
from tests.benchmarks.job import Timer
from tests.benchmarks.jobs_full_export import requests

MODEL = Path(__file__).with_name("model.py")


def save(timer: Timer, directory: str, rows: str) -> None:
    """One model in every form that is measured, and in `expected.npz` what Keras answers."""
    import keras

    from tests.benchmarks.model import tower

    target = Path(directory)
    keras.utils.set_random_seed(1)
    model = tower(int(rows))
    model.save(target / "model.keras")
    model.save_weights(target / "model.weights.h5")
    values = {variable.path: variable.numpy() for variable in model.variables}
    np.savez(target / "model.npz", **values)
    _save_v1(target / "model.ckpt-1", values)
    ids = requests(int(rows))
    np.savez(target / "expected.npz", ids=ids, score=model(ids)["score"])


def _save_v1(prefix: Path, values: dict[str, Any]) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [v1.get_variable(name, value.shape) for name, value in values.items()]
        for variable, value in zip(variables, values.values(), strict=True):
            variable.load(value, session)
        saver = v1.train.Saver(variables, write_version=v1.train.SaverDef.V1)
        saver.save(session, str(prefix), write_meta_graph=False, write_state=False)


def check(timer: Timer, directory: str, rows: str, *archives: str) -> None:
    """Export each archive and compare the version's answers with Keras' own."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with np.load(Path(directory, "expected.npz")) as expected:
        ids, score = expected["ids"], expected["score"]
    assert score.std() > 0
    for archive in archives:
        with tempfile.TemporaryDirectory(dir=directory) as out:
            arguments = {"model": f"{MODEL}:tower", "model_args": {"rows": rows}}
            done = export(ExportRequest(Path(directory, archive), Path(out), **arguments))
            with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
                meta = v1.saved_model.load(session, ["serve"], str(done.published.path))
                signature = meta.signature_def["serving_default"]
                feeds = {signature.inputs["ids"].name: ids}
                found = session.run(signature.outputs["score"].name, feeds)
        np.testing.assert_allclose(found, score, rtol=0, atol=1e-5)


def convert(timer: Timer, tiny: str, archive: str, out: str) -> dict[str, int]:
    """Everything in an archive as a tensor bundle: its bytes, and the peak of memory before it began."""
    with tempfile.TemporaryDirectory() as scratch:
        _convert(tiny, scratch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with timer:
        stored = _convert(archive, out)
    return {"bytes": stored, "peak_before": peak}


def _convert(archive: str, out: str) -> int:
    catalog = open_checkpoint(Path(archive))
    return write_bundle(catalog, catalog.tensors.values(), Path(out, "bundle")).bytes_

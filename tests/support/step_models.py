"""A model with one table, whose every value is the step that it was saved at; its graph is a file."""

from __future__ import annotations

from pathlib import Path

from exporter.options import ExportRequest
from exporter.publish.versions import version_dirs

MODEL = """
import tensorflow as tf

def build():
    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], "ids")
    table = v1.get_variable("table", [6, 2])
    return {"ids": ids}, {"rows": tf.gather(table, ids)}
"""


def save(train: Path, step: int) -> None:
    import numpy as np

    from exporter.checkpoint.tensor_bundle import BundleWriter

    train.mkdir(exist_ok=True)
    with BundleWriter(train / f"model.ckpt-{step}") as writer:
        writer.add("table", np.full([6, 2], step, np.float32))
        writer.add("global_step", np.array(step, np.int64))
    (train / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')


def published(directory: Path, *steps: int, plain: bool = False) -> ExportRequest:
    """A base of the first step, and a delta to each other one; or `plain` versions."""
    from exporter.pipeline.full import export
    from exporter.pipeline.incremental import export_incremental

    (directory / "model.py").write_text(MODEL)
    request = request_of(directory)
    for step in steps:
        save(request.ckpt_dir, step)
        export(request) if plain else export_incremental(request)
    return request


def request_of(directory: Path) -> ExportRequest:
    model = f"{directory / 'model.py'}:build"
    return ExportRequest(directory / "train", directory / "served", model=model)


def versions(model: Path) -> list[int]:
    return [child.version for child in version_dirs(model)]

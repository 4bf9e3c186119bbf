"""Models with a table that is large enough to be mapped, and what of a process's memory is a file's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROWS, DIM = 20_000, 16
IDS = np.array([0, 7, 19_999, 3, 7], np.int64)

MODEL = f"""
import tensorflow as tf

def build(parts="0"):
    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], "ids")
    split = v1.fixed_size_partitioner(int(parts)) if int(parts) else None
    emb = v1.get_variable("emb", [{ROWS}, {DIM}], partitioner=split, use_resource=True)
    other = v1.get_variable("whole", [{ROWS}, {DIM}], use_resource=True)
    kernel = v1.get_variable("kernel", [{DIM}, 2], use_resource=True)
    rows = v1.nn.embedding_lookup(emb, ids, partition_strategy="div")
    total = tf.reduce_sum(other, name="tower/total")
    return {{"ids": ids}}, {{"rows": rows, "scores": tf.matmul(rows, kernel) + total}}
"""


class MappedModel:
    """A checkpoint and a builder in `directory`; what the model answers to `IDS`."""

    def __init__(self, directory: Path, step: int = 7) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.py").write_text(MODEL)
        self.model = f"{directory / 'model.py'}:build"
        self.train, self.out = directory / "train", directory / "served"
        self.save(step)

    def save(self, step: int, table: Any = None) -> None:
        """Write the trainer's next checkpoint: of this table, or of a new one."""
        from exporter.checkpoint.tensor_bundle import BundleWriter

        rng = np.random.default_rng(step)
        self.table = rng.normal(size=(ROWS, DIM)).astype(np.float32) if table is None else table
        self.train.mkdir(exist_ok=True)
        with BundleWriter(self.train / f"model.ckpt-{step}") as writer:
            writer.add("emb", self.table)
            writer.add("emb/Adagrad", np.ones_like(self.table))
            writer.add("kernel", np.ones((DIM, 2), np.float32))
            writer.add("whole", np.zeros((ROWS, DIM), np.float32))
            writer.add("global_step", np.array(step, np.int64))
        (self.train / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')

    def request(self, **options: Any) -> Any:
        """Export it with mapped tables."""
        from exporter.options import ExportRequest

        given = {"ckpt_dir": self.train, "out": self.out, "model": self.model, "map_tables": True}
        return ExportRequest(**{**given, **options})


@contextmanager
def in_session(version: Path) -> Iterator[Any]:
    """A function from named inputs to named outputs, as TF Serving loads the version."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(version))
        signature = meta.signature_def["serving_default"]
        outputs = {name: info.name for name, info in signature.outputs.items()}

        def answer(**inputs: Any) -> Mapping[str, Any]:
            fed = {signature.inputs[name].name: value for name, value in inputs.items()}
            found: Mapping[str, Any] = session.run(outputs, fed)
            return found

        yield answer


def mapped_below(directory: Path, process: int | None = None) -> set[str]:
    """The shards below a directory that are memory of a process: of this one, if none is named."""
    text = Path(f"/proc/{process or os.getpid()}/maps").read_bytes().decode(errors="surrogateescape")
    paths = (line.split(maxsplit=5)[5] for line in text.splitlines() if len(line.split(maxsplit=5)) == 6)
    return {path for path in paths if path.startswith(f"{directory}/") and ".data-" in path}

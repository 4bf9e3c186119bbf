"""A node of a MultiWorkerMirroredStrategy: two workers that train one tf-keras model, and save it together.

    python mirrored_node.py DIRECTORY        (in TF_CONFIG: who this node is)

Each prints a line of JSON: what it took itself for, where it saved, how many epochs it trained. The chief
leaves checkpoints in `fit/` (by a callback) and `ckpt/`, an export of the first in `models/`, `expected.npz`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tensorflow as tf
import tf_keras

sys.path.insert(0, str(Path(__file__).parents[2]))
from exporter import ExportRequest
from exporter.training import ExportCallback, StopAfterCallback, checkpoint_dir, is_chief
from tests.support.object_trainers import IDS, LABELS, tower2

BUILDER = f"{Path(__file__).parents[1] / 'support/object_trainers.py'}:tower2"


def main(directory: Path) -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation
    chief = is_chief(strategy)
    with strategy.scope():
        tf_keras.utils.set_random_seed(1)
        model = tower2()
        model.compile("adagrad", "mse")
    data = tf.data.Dataset.from_tensor_slices((IDS, LABELS)).repeat().batch(16)  # each worker takes its part
    exports = ExportCallback(
        ExportRequest(directory / "fit", directory / "models", model=BUILDER), wait_seconds=300
    )
    callbacks = [
        tf_keras.callbacks.ModelCheckpoint(str(directory / "fit" / "cp-{epoch}"), save_weights_only=True),
        exports,
        StopAfterCallback(3600 if chief else 0.001),  # the worker's time is up, and both stop
    ]
    history = model.fit(data, steps_per_epoch=4, epochs=9, verbose=0, callbacks=callbacks)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    with checkpoint_dir(directory / "ckpt", strategy) as place:
        manager = tf.train.CheckpointManager(checkpoint, place, max_to_keep=1)
        saved = [Path(manager.save()).name for _ in range(2)]
        model.save_weights(place / "weights.weights.h5")
        written = sorted(path.name for path in place.iterdir() if path.is_file())
    answers = model(IDS[:5], training=False).numpy()  # of statistics that all replicas keep: read by all
    outcomes = [outcome.exit_code for outcome in exports.outcomes]
    report = {"task": json.loads(os.environ["TF_CONFIG"])["task"], "chief": chief, "place": str(place)}
    report |= {"saved": saved, "written": written, "epochs": len(history.epoch), "exports": outcomes}
    if chief:
        import numpy as np

        np.savez(directory / "expected.npz", ids=IDS[:5], answers=answers)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Trains the tower for a moment and leaves an object-based checkpoint and a Keras archive.

Once more, it goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf
from model import tower


def main() -> None:
    """Train, save, say where."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory")
    out = parser.parse_args().out
    model = tower()
    model.compile("adam", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    if newest := tf.train.latest_checkpoint(out):
        checkpoint.restore(newest).assert_consumed()
        print(f"training goes on from {newest}")
    things = np.random.default_rng(1).integers(0, 1000, (512, 3))
    model.fit(things, things.argmax(axis=1), batch_size=64, epochs=2, verbose=0)
    saved = checkpoint.save(out / "ckpt")
    model.save(out / "tower.keras")
    print(f"trained {int(model.optimizer.iterations)} steps: {saved}")


if __name__ == "__main__":
    main()

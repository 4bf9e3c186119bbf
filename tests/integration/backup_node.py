"""A worker of MultiWorkerMirroredStrategy: fit with a backup each epoch, as both workers run it.

    python backup_node.py DIRECTORY        (in TF_CONFIG: who this node is)

Statistics of the batch normalisation live on both workers, so both take part in each save: the chief's is the
backup, the other's goes to a temporary directory. Each leaves in `saved-<type>` where its saves went; the
chief leaves `expected.npz`, what a model on one machine answers with the weights that training ended with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.family_trainers import FEATURES, LABELS, keep, precise2


def record_saves(file: Path) -> None:
    """Note the directory of each checkpoint that a manager of this process writes."""
    save = tf.train.CheckpointManager.save

    def recorded(manager: Any, *arguments: Any, **options: Any) -> Any:
        path = save(manager, *arguments, **options)
        assert Path(f"{path}.index").is_file()
        with file.open("a") as lines:
            lines.write(f"{Path(path).parent.name}\n")
        return path

    tf.train.CheckpointManager.save = recorded


def main() -> None:
    directory = Path(sys.argv[1])
    role = tf.distribute.cluster_resolver.TFConfigClusterResolver().task_type
    record_saves(directory / f"saved-{role}")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf_keras.utils.set_random_seed(8)
    with strategy.scope():
        model = precise2("float32")
        model.compile("adam", "mse")
    data = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(16)
    backup = tf_keras.callbacks.BackupAndRestore(str(directory / "backup"), delete_checkpoint=False)
    model.fit(data, epochs=3, verbose=0, callbacks=[backup])
    weights = model.get_weights()  # of the statistics a reduction, so both workers ask for it
    if role == "chief":
        alone = precise2("float32")
        alone.set_weights(weights)
        keep(directory, {"features": FEATURES}, alone(FEATURES, training=False))


if __name__ == "__main__":
    main()

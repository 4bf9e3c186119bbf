"""Train canned Estimators whose input functions have one batch size: `python FILE DIRECTORY`.

It runs in TensorFlow 1.15 or 2.15.

Each model's directory gets `answers.json`: the names of the input tensors, rows, and the probabilities that
the Estimator itself predicts for each row alone.
"""

import json
import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow

tf = tensorflow.compat.v1
tf.disable_v2_behavior()
fc = tensorflow.feature_column
BATCH = 16
WORDS = ["red", "green", "blue"]


def rows(count):
    random = np.random.RandomState(count)
    return {
        "age": random.uniform(0, 60, count).astype(np.float32),
        "word": np.array([([*WORDS, "none"])[n] for n in random.randint(0, 4, count)]),
        "ids": random.randint(0, 9, count).astype(np.int64),
        "other": random.randint(0, 9, count).astype(np.int64),
    }


def columns():
    age, word = (
        fc.numeric_column("age"),
        fc.categorical_column_with_vocabulary_list("word", WORDS, num_oov_buckets=2),
    )
    ids = fc.categorical_column_with_identity("ids", 9)
    hashed = fc.categorical_column_with_hash_bucket("word", 20)
    bucketized = fc.bucketized_column(age, [20.0, 40.0])
    crossed = fc.crossed_column([bucketized, "word"], 30)
    wide = [bucketized, word, ids, crossed]
    deep = [
        age,
        bucketized,
        fc.indicator_column(word),
        fc.embedding_column(ids, 3),
        fc.embedding_column(hashed, 2),
    ]
    deep += [fc.embedding_column(crossed, 2), fc.indicator_column(crossed)]
    shared = tf.feature_column.shared_embedding_columns
    deep += shared([ids, fc.categorical_column_with_identity("other", 9)], 2)
    return wide, deep


def by_dataset(features, labels, names):
    def give():
        data = (
            tf.data.Dataset.from_tensor_slices((features, labels)).repeat().batch(BATCH, drop_remainder=True)
        )
        found = tf.data.make_one_shot_iterator(data).get_next()
        names.update({name: tensor.name for name, tensor in found[0].items()})
        return found

    return give


def by_numpy(features, labels, names):
    inputs = tf.estimator.inputs.numpy_input_fn(
        features, labels, batch_size=BATCH, num_epochs=None, shuffle=True
    )

    def give():
        found = inputs()
        names.update({name: tensor.name for name, tensor in found[0].items()})
        return found

    return give


def estimators(directory):
    wide, deep = columns()
    parts = tf.min_max_variable_partitioner(max_partitions=3, min_slice_size=16)
    config = tf.estimator.RunConfig(save_summary_steps=None, tf_random_seed=3)
    common = {"config": config}
    yield "linear", tf.estimator.LinearClassifier(wide, str(directory / "linear"), **common)
    yield "dnn", tf.estimator.DNNClassifier([8, 4], deep, str(directory / "dnn"), **common)
    yield (
        "both",
        tf.estimator.DNNLinearCombinedClassifier(
            str(directory / "both"),
            wide,
            dnn_feature_columns=deep,
            dnn_hidden_units=[6],
            input_layer_partitioner=parts,
            **common,
        ),
    )
    yield "regressor", tf.estimator.DNNRegressor([5], deep, str(directory / "regressor"), **common)


def main(directory):
    features = rows(200)
    labels = (features["ids"] % 2).astype(np.int32)
    for kind, give in (("dataset", by_dataset), ("numpy", by_numpy)):
        for name, estimator in estimators(directory / kind):
            names = {}
            estimator.train(
                give(features, labels.astype(np.float32) if name == "regressor" else labels, names), steps=20
            )
            asked = rows(2 * BATCH + 1)
            whole = tf.estimator.inputs.numpy_input_fn(asked, batch_size=1, shuffle=False)
            output = "predictions" if name == "regressor" else "probabilities"
            found = [each[output].tolist() for each in estimator.predict(whole)]
            listed = {key: value.tolist() for key, value in asked.items()}
            said = {"names": names, "output": output, "rows": listed, "answers": found}
            (directory / kind / name / "answers.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

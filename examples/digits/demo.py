"""From training to serving in a minute: a cluster trains, `export-model` publishes, `serve-model` answers."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.cluster import ClusterError, run_cluster
from examples.commands import run, serve, show, workspace
from exporter.terminal.tensorflow_import import on_import_of_tensorflow

HERE = Path(__file__).parent
TOLERANCE = 1e-6

_RPC_S = 60
_INK = " .:-=+*#%@"


def main() -> int:
    """Run the whole demonstration; 0 if what is served is what was trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and leave everything there")
    parser.add_argument("--steps", type=int, default=600, help="training steps of all nodes together")
    options = parser.parse_args()
    on_import_of_tensorflow()
    with workspace(options.keep) as directory:
        expected = train(directory, options.steps)
        export(directory / "checkpoints", directory / "models" / "digits")
        print("\n3. Serve, and predict the held-out digits over gRPC")
        with serve(directory / "models" / "digits") as address:
            scores, digits = predict(address, "digits", expected["images"])
    return report(expected, scores, digits)


def train(directory: Path, steps: int) -> dict[str, NDArray]:
    """Train on a cluster; the training graph's own answers for the held-out digits."""
    print("1. Train: 2 parameter servers, a chief and 2 workers, each a process, over gRPC on loopback")
    start = time.monotonic()
    answers = directory / "expected.npz"
    command = [HERE / "train.py", "--ckpt-dir", directory / "checkpoints", "--expected", answers]
    run_cluster(
        [*command, "--steps", str(steps)],
        logs=directory / "logs",
        on_line=lambda line: print(f"   {line}", flush=True) if line.startswith("step ") else None,
    )
    with np.load(answers) as arrays:
        expected = dict(arrays)
    print(f"   {time.monotonic() - start:.0f} s, start-up of 5 processes included")
    return expected


def export(checkpoints: Path, model: Path) -> None:
    """Run `export-model` as a user would, and list what it published."""
    print("\n2. Export: the moving averages, without what only training needs")
    builder = os.path.relpath(HERE / "model.py")
    source = ["--ckpt-dir", checkpoints, "--model", f"{builder}:serving", "--average", "ema"]
    command = ["export-model", *source, "--out", model]
    show(command)
    print(textwrap.indent(run(command), "   "), end="")
    for path in sorted(model.glob("*/**/*")):
        if path.is_file():
            print(f"   {path.stat().st_size:9,} bytes  {path.relative_to(model.parent)}")


def predict(address: str, model: str, images: NDArray[np.float32]) -> tuple[NDArray, NDArray]:
    """Scores [n, 10] and digits [n] from the server, asked with TensorFlow Serving's own client stub."""
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis.predict_pb2 import PredictRequest
    from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub

    request = PredictRequest()
    request.model_spec.name = model
    request.inputs["images"].CopyFrom(tf.make_tensor_proto(images))
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        outputs = PredictionServiceStub(channel).Predict(request, timeout=_RPC_S).outputs
    return tf.make_ndarray(outputs["scores"]), tf.make_ndarray(outputs["digits"])


def report(expected: dict[str, NDArray], scores: NDArray, digits: NDArray) -> int:
    """Show some answers, and compare all of them with the training graph's."""
    shown = [int((expected["labels"] == digit).argmax()) for digit in (3, 1, 4, 2)]
    _draw(expected["images"][shown])
    print("   " + "".join(f"{f'served: {digit}':^18}" for digit in digits[shown]))
    accuracy = (digits == expected["labels"]).mean()
    difference = float(np.abs(scores - expected["scores_ema"]).max())
    equal = difference <= TOLERANCE
    print(f"   accuracy on {len(digits)} held-out digits: {accuracy:.3f}")
    verdict = "equal to" if equal else "DIFFERENT from"
    print(f"   served scores are {verdict} the training graph's: largest difference {difference:.1e}")
    return 0 if equal else 1


def _draw(images: NDArray[np.float32]) -> None:
    for rows in zip(*images, strict=True):
        pictures = ("".join(2 * _INK[round(float(ink) * 9)] for ink in row) for row in rows)
        print("   " + "  ".join(pictures))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

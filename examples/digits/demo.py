"""From training to serving in a minute: a cluster trains, `export-model` publishes, `serve-model` answers."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from cluster import ClusterError, run_cluster
from numpy.typing import NDArray

from exporter.quiet_import import quiet_tensorflow

HERE = Path(__file__).parent
TOLERANCE = 1e-6

_STARTUP_S = 60
_SHUTDOWN_S = 10
_RPC_S = 30
_INK = " .:-=+*#%@"


def main() -> int:
    """Run the whole demonstration; 0 if what is served is what was trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and leave everything there")
    parser.add_argument("--steps", type=int, default=600, help="training steps of all nodes together")
    options = parser.parse_args()
    quiet_tensorflow()
    with _workspace(options.keep) as directory:
        expected = train(directory, options.steps)
        export(directory / "checkpoints", directory / "models" / "digits")
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
    command = ["export-model", "--ckpt-dir", checkpoints, "--model", f"{builder}:serving"]
    said = _run([*command, "--out", model, "--average", "ema"])
    print(textwrap.indent(said, "   "), end="")
    for path in sorted(model.glob("*/**/*")):
        if path.is_file():
            print(f"   {path.stat().st_size:9,} bytes  {path.relative_to(model.parent)}")


@contextlib.contextmanager
def serve(model: Path) -> Iterator[str]:
    """The address of a `serve-model` that serves `model`."""
    print("\n3. Serve, and predict the held-out digits over gRPC")
    command = ["serve-model", "run", str(model), "--port", "0"]
    print(f"   $ {shlex.join(command)}", flush=True)
    with (
        tempfile.TemporaryFile() as talk,
        subprocess.Popen(_installed(command), stdout=subprocess.PIPE, stderr=talk, bufsize=0) as server,
    ):
        try:
            yield _ready(server, talk)
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_SHUTDOWN_S)
            server.kill()


def _ready(server: subprocess.Popen[bytes], talk: IO[bytes]) -> str:
    deadline = time.monotonic() + _STARTUP_S
    while select.select([server.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = server.stdout.readline().decode()
        if found := re.match(r"serving .* on (\S+:\d+)$", line):
            print(f"   {line}", end="", flush=True)
            return found[1]
        if not line:
            break
    talk.seek(0)
    sys.exit(f"error: serve-model did not get ready:\n{talk.read().decode(errors='replace')}")


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


def _run(command: list[str | Path]) -> str:
    words = [str(word) for word in command]
    print(f"   $ {shlex.join(words)}", flush=True)
    done = subprocess.run(
        _installed(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"error: {words[0]} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def _installed(command: list[str]) -> list[str]:
    """The console script of this Python's environment, whatever PATH says."""
    return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


@contextlib.contextmanager
def _workspace(keep: Path | None) -> Iterator[Path]:
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="digits-") as directory:
            yield Path(directory)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

"""A server's part of TensorFlow, in a process of its own: load a version from `gs://`, and answer.

python -m tests.support.gs_reader URL      JSON [signature, inputs] a line in, its outputs a line out
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Reader:
    """The process, seen from a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, signature: str, **inputs: list[int]) -> dict[str, list[Any]]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([signature, inputs]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, list[Any]] = json.loads(self._process.stdout.readline())
        return answer

    def update(self, up_to: int = -1) -> tuple[int, str]:
        """Where `incremental_update` leads to, and what it says."""
        found = self.call("incremental_update", up_to=[up_to])
        return found["position"][0], found["status"][0]


@contextmanager
def reading(url: str, environment: Mapping[str, str]) -> Iterator[Reader]:
    """TensorFlow reads its environment when it is imported: hence a process."""
    command = [sys.executable, "-m", "tests.support.gs_reader", url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**environment}, text=True) as process:
        try:
            yield Reader(process)
        finally:
            process.kill()


def main(url: str) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        meta = v1.saved_model.load(session, ["serve"], url)
        for line in sys.stdin:
            name, inputs = json.loads(line)
            signature = meta.signature_def[name]
            fed = {signature.inputs[key].name: value for key, value in inputs.items()}
            found = session.run({key: info.name for key, info in signature.outputs.items()}, fed)
            print(json.dumps({key: _plain(value) for key, value in found.items()}), flush=True)


def _plain(value: Any) -> Any:
    return [each.decode() if isinstance(each, bytes) else each for each in value.tolist()]


if __name__ == "__main__":
    main(*sys.argv[1:])

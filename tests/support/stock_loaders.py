"""The C++ loaders of TensorFlows that servers run, each as a process in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from exporter.graph.graph_files import read_saved_model
from exporter.wire.dtypes import DType
from tests.support.environments import clean_environ, python_of

OWN = "2.21.0"
"""The TensorFlow of this environment, where it is the newest."""


class StockLoader:
    """A C++ loader of one TensorFlow, which holds one SavedModel at a time."""

    def __init__(self, tensorflow: str) -> None:
        self.tensorflow = tensorflow
        own = tensorflow == OWN and version("tensorflow") == OWN
        python = Path(sys.executable) if own else python_of(tensorflow)
        script = Path(__file__).with_name("stock_loader.py")
        self._process = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean_environ(),
        )
        self._signatures: Mapping[str, Any] = {}

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a line."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(what)}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the loader died with {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def load(self, directory: Path) -> int:
        """Load a SavedModel; how many tables the process maps then. AssertionError: the loader refuses it."""
        self._signatures = read_saved_model(directory).meta_graphs[0].signature_def
        found = self.ask({"load": str(directory)})
        assert not found["error"], found["error"]
        return int(found["mapped"])

    def call(self, signature: str, feeds: Mapping[str, Any], times: int = 1) -> list[dict[str, Any] | str]:
        """Answers by output, or messages, of so many calls of a signature at once."""
        known = self._signatures[signature]
        run = {
            known.inputs[name].name: [DType(known.inputs[name].dtype).label, np.asarray(values).tolist()]
            for name, values in feeds.items()
        }
        outputs = {name: info.name for name, info in sorted(known.outputs.items())}
        said = self.ask({"run": run, "fetch": [*outputs.values()], "times": times})["answers"]

        dtypes = [DType(known.outputs[name].dtype) for name in outputs]

        def answer(values: list[Any]) -> dict[str, Any]:
            found = zip(outputs, values, dtypes, strict=True)
            kinds = {DType.STRING: object}
            return {name: np.array(value, kinds.get(dtype) or dtype.numpy) for name, value, dtype in found}

        return [each if isinstance(each, str) else answer(each) for each in said]

    def predict(self, **feeds: Any) -> dict[str, Any]:
        """What the default signature answers."""
        (found,) = self.call("serving_default", feeds)
        assert not isinstance(found, str), found
        return found

    def update(self, callers: int = 1, up_to: int = -1) -> tuple[int, str]:
        """Position and status after an update, to the newest position; of several callers one does it."""
        said = self.call("incremental_update", {"up_to": [up_to]}, callers)
        assert not (failed := [each for each in said if isinstance(each, str)]), failed
        ends = [(int(each["position"][0]), each["status"][0]) for each in said if isinstance(each, dict)]
        done = [end for end in ends if "another update runs" not in end[1]]
        assert done, ends
        return max(done)

    def __enter__(self) -> StockLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

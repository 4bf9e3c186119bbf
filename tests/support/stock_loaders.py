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

from exporter.graph.graph_files import read_saved_model
from exporter.wire.dtypes import DType
from tests.support.environments import clean_environ, python_of

OWN = "2.21.0"
"""The TensorFlow of this environment, where it is the newest."""


class StockLoader:
    """A C++ loader of one TensorFlow, which holds one SavedModel at a time."""

    def __init__(self, tensorflow: str) -> None:
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

    def load(self, directory: Path) -> str:
        """What the loader says, empty if it holds the SavedModel now."""
        self._signatures = read_saved_model(directory).meta_graphs[0].signature_def
        return str(self.ask({"load": str(directory)})["error"])

    def call(self, signature: str, feeds: Mapping[str, Any], times: int = 1) -> list[Any]:
        """Answers by output, or messages, of so many calls of a signature at once."""
        known = self._signatures[signature]
        run = {
            known.inputs[name].name: [DType(known.inputs[name].dtype).label, values]
            for name, values in feeds.items()
        }
        outputs = {name: info.name for name, info in sorted(known.outputs.items())}
        said = self.ask({"run": run, "fetch": [*outputs.values()], "times": times})["answers"]
        return [each if isinstance(each, str) else dict(zip(outputs, each, strict=True)) for each in said]

    def __enter__(self) -> StockLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

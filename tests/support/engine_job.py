"""A job on an engine, as a process of the engine's own environment: `python -m` this.

It prints what came of it as JSON; of `works`, a file of them, the outcomes, whatever they are.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from exporter.bundle.variables import write_variables
from exporter.checkpoint.tensor_bundle import read_catalog
from exporter.errors import ExportError
from exporter.graph.inference_graph import GraphVariable
from exporter.jobs.engines import Engine
from exporter.jobs.runner import Runner, choose_engine
from exporter.mapping.build import VariableMapping
from exporter.mapping.tensor_source import TensorSource
from exporter.wire.dtypes import DType


class Counting:
    """An engine, and how many works were given to it."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.works = 0
        self._engine = engine

    def run(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        yield from self._engine.run(self._counted(works))

    def _counted(self, works: Iterable[bytes]) -> Generator[bytes, None, None]:
        for work in works:
            self.works += 1
            yield work


def cast(runner: Runner, prefix: Path, out: Path) -> str:
    """Cast every table to bfloat16, each in a task of its own; the digest of all files."""
    catalog = read_catalog(prefix)
    sources = tuple(
        TensorSource(name, (GraphVariable(name, name, DType.BFLOAT16, ref.shape),), ref, cast=DType.BFLOAT16)
        for name, ref in catalog.tensors.items()
    )
    write_variables(VariableMapping(catalog, sources), out, runner=runner)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    assert len(files) == len(catalog.tensors) + 1
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def main(asked: dict[str, Any]) -> dict[str, Any]:
    chosen = choose_engine(asked["engine"], 2, asked.get("address", ""), asked.get("options"))
    engine = Counting(chosen)
    done: dict[str, Any] = {}
    try:
        if "works" in asked:
            works = Path(asked["works"]).read_bytes().splitlines()
            done["outcomes"] = [json.loads(outcome) for outcome in engine.run(works)]
        else:
            runner = Runner(engine, task_bytes=asked["task_bytes"], kept=asked["kept"])
            done["digest"] = cast(runner, Path(asked["prefix"]), Path(asked["out"]))
    except ExportError as error:
        done |= {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    done["works"] = engine.works
    done["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    done["heavy"] = sorted({"tensorflow", "ray", "distributed", "apache_beam"} & set(sys.modules))
    return done


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

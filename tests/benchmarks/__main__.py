"""`make bench`: run the benchmarks, print one table; `--json FILE` keeps the figures with their commit."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import pkgutil
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from tests import benchmarks
from tests.benchmarks.harness import ROOT, Benchmark, Lab, use_warm_processes
from tests.benchmarks.rows import Row, table


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 0 whether targets are met or not: figures depend on the machine, results must not."""
    options = _options(arguments)
    talk = Console(stderr=True)
    chosen = [(name, run) for name, run in _all() if fnmatch.fnmatch(name, f"*{options.only}*")]
    if options.list or not chosen:
        print(*(name for name, _ in _all()), sep="\n")
        sys.exit(None if options.list else f"no benchmark is called {options.only!r}")
    if options.quick:
        use_warm_processes()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="export-model-bench-", dir=options.dir) as directory:
        talks = partial(talk.print, style="dim")
        lab = Lab(Path(directory), quick=options.quick, say=talks, scale=options.scale)
        try:
            for name, run in chosen:
                lab.say(name)
                rows.extend(run(lab))  # row by row
        finally:  # whatever stops a long run, what was measured is not lost
            _report(rows, options)


def _report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(_document(rows, options.quick), indent=1) + "\n")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("only", nargs="?", default="", metavar="ONLY", help="part of a name, or a pattern")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--quick", action="store_true", help="small sizes, once: does the suite still run?")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="bases of copies, in GiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, the commit beside them")
    parser.add_argument("--dir", type=Path, help="where temporary data goes; needs 10 GB unless --quick")
    return parser.parse_args(arguments)


def _all() -> Iterator[tuple[str, Benchmark]]:
    """Every benchmark by name: those that the `bench_*` modules list in BENCHMARKS."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name.startswith("bench_"):
            for run in import_module(f"{benchmarks.__name__}.{module.name}").BENCHMARKS:
                yield f"{module.name.removeprefix('bench_')}.{run.__name__}", run


def _document(rows: Sequence[Row], quick: bool) -> dict[str, Any]:
    return {
        "format_version": 1,
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "exporter", "serving")),
        "quick": quick,
        "python": platform.python_version(),
        "tensorflow": version("tensorflow"),
        "processors": len(os.sched_getaffinity(0)),
        "rows": [row.as_document() for row in rows],
    }


def _git(*arguments: str) -> str | None:
    """None outside a repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()

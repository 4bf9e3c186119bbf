"""Import a user's code as its files are now, also if Python has an older version loaded.

A process that goes on (a watch) may be asked for a model again after its files were edited. Python would give
it the modules that it has, so those of edited files are forgotten first, with all that import them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exporter.errors import BuilderError
from exporter.graph.sources import SourceFile, find_builder, read_sources

_imported: dict[Path, str] = {}
"""Digests of files as they were when this process imported them for a user."""


def import_code(where: str) -> Any:
    """The module `pkg.mod`, or the file `path/file.py` as one; what it prints goes to stderr.

    Raises:
        Exception: whatever the import raises.
    """
    with contextlib.suppress(BuilderError):  # the import says what is wrong
        if (found := find_builder(where)) is not None:
            _forget_edited({found.root / file.path: file.digest for file in read_sources(found)})
    with contextlib.redirect_stdout(sys.stderr):
        return _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)


def code_behind(model: object) -> tuple[SourceFile, ...]:
    """The files behind `pkg.mod:fn` or `path/file.py:fn` as they are now; none for whatever else."""
    if not isinstance(model, str):
        return ()
    with contextlib.suppress(BuilderError):
        found = find_builder(model.rpartition(":")[0])
        return () if found is None else read_sources(found)
    return ()


def _forget_edited(files: dict[Path, str]) -> None:
    """Forget the modules of these files if one of the files was edited since it was imported.

    Modules that were there before this process was asked for them belong to the program, and stay.
    """
    if any(_imported.get(path, digest) != digest for path, digest in files.items()):
        _forget(files)
        importlib.invalidate_caches()
    _imported.update(files)


def _forget(files: Iterable[Path]) -> None:
    gone = {*files}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name == "__main__" or file is None or Path(file).resolve() not in gone:
            continue
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and getattr(sys.modules[parent], child, None) is module:
            delattr(sys.modules[parent], child)  # `from pkg import mod` would find it there


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module

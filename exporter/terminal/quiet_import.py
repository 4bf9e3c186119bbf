"""Silence TensorFlow's messages at import, for the command lines.

TensorFlow's C++ side writes some lines straight to file descriptor 2 before any of its log settings apply. A
finder on `sys.meta_path` redirects that descriptor while the package is imported, and prints what was caught
if the import fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # importing it takes as long as a small command
    from importlib.abc import Loader

_PACKAGE = "tensorflow"


def quiet_tensorflow() -> None:
    """From now on importing TensorFlow says nothing; settings that the user made in the environment win."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # an export computes nothing that a device would help
    if _PACKAGE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _QuietLoader(spec.loader))
        return spec


class _QuietLoader:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import logging

        logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with _descriptor_2_turned_away():
            self._loader.exec_module(module)


@contextmanager
def _descriptor_2_turned_away() -> Iterator[None]:
    import tempfile

    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except BaseException:
            caught.seek(0)
            os.write(original, caught.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)

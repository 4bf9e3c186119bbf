"""TensorFlow: refuse unsupported versions by name; and, at the command lines, silence messages at import.

TensorFlow's C++ side writes some lines straight to file descriptor 2 before any of its log settings apply. A
finder on `sys.meta_path` redirects that descriptor while the package is imported, and prints the caught text
if the import fails.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, cast

from exporter.errors import ExportError, TensorFlowNeeded
from exporter.while_needed import WhileNeeded

if TYPE_CHECKING:  # importing it takes as long as a small command
    from importlib.abc import Loader

_PACKAGE = "tensorflow"
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-rocm", "tensorflow-macos")
"""Names under which the package is installed."""


OLDEST, NEWEST = (2, 15), (2, 22)
"""The oldest and newest release of TensorFlow with which this package is tested: tests/matrix."""
_NIGHTLY = "tf-nightly"
"""An unreleased TensorFlow, installed to try it on purpose; any newer version is accepted."""


def require_tensorflow(purpose: str) -> None:
    """Refuse to go on unless a supported TensorFlow is installed; `purpose` names the work in the message.

    It is not imported.

    Raises:
        TensorFlowNeeded: there is none, or an unsupported one.
    """
    if PathFinder.find_spec(_PACKAGE) is None:
        raise TensorFlowNeeded(f"{purpose} runs in TensorFlow, which is not installed")
    require_fitting()


def needed(error: ModuleNotFoundError) -> ExportError:
    """Return the error to report for a failed import: TensorFlowNeeded for TensorFlow or Keras.

    A plain ExportError for any other module.
    """
    if not _is_of_tensorflow(error):
        return ExportError(f"unexpected {type(error).__name__}: {error}")
    return TensorFlowNeeded("this runs in TensorFlow, which is not installed", cause=str(error))


@contextmanager
def said_by_name() -> Iterator[None]:
    """Run the block; raise TensorFlowNeeded if it imports TensorFlow, and no supported one is installed.

    For other people's programs: no message is silenced. During the block a finder is on `sys.meta_path`.

    Raises:
        TensorFlowNeeded: TensorFlow is imported in the block, and is missing or unsupported; or was imported
            before, and is unsupported.
        ModuleNotFoundError: another module is missing.
    """
    if sys.modules.get(_PACKAGE) is not None:
        require_fitting()
    try:
        with _WATCHED():
            yield
    except ModuleNotFoundError as error:
        if not _is_of_tensorflow(error):
            raise
        raise needed(error) from error


@contextmanager
def _watched() -> Iterator[None]:
    finder = _Finder(is_quiet=False)
    if not _is_watched():
        sys.meta_path.insert(0, finder)  # before the path finder, which finds TensorFlow, too
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


_WATCHED = WhileNeeded(_watched)


def require_fitting() -> None:
    """Refuse an installed TensorFlow of an unsupported release, by its metadata; it is not imported.

    No TensorFlow at all is accepted, and any newer tf-nightly.

    Raises:
        TensorFlowNeeded: it is too old, or too new.
    """
    from importlib.metadata import PackageNotFoundError, version

    for distribution in _DISTRIBUTIONS:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        numbers = re.findall(r"[0-9]+", found)[:2]
        release = tuple(map(int, numbers))
        is_too_new = release > NEWEST and distribution != _NIGHTLY
        if release < OLDEST or is_too_new:
            fitting = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
            which = "old" if release < OLDEST else "new"
            raise TensorFlowNeeded(f"TensorFlow {'.'.join(numbers)} is too {which}: {fitting}")
        return


def on_import_of_tensorflow() -> None:
    """Silence imports of TensorFlow in this process, and let an unsupported one raise TensorFlowNeeded.

    For the rest of the process. Two environment variables are set, unless the user has set them: TensorFlow
    logs errors only, and sees no GPU. No finder is added if TensorFlow is imported already.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # an export computes nothing that a device would help
    if _PACKAGE not in sys.modules and not _is_watched():
        sys.meta_path.insert(0, _Finder(is_quiet=True))  # before the path finder


def _is_of_tensorflow(error: ModuleNotFoundError) -> bool:
    return (error.name or "").partition(".")[0] in (_PACKAGE, "keras")


def _is_watched() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder:
    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            require_fitting()
        if self._is_quiet and spec is not None and spec.loader is not None:
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
            # `importlib.resources` asks the loader for the package's files: ours could not answer.
            module.__spec__.loader = self._loader
        with _descriptor_2_turned_away():
            self._loader.exec_module(module)


@contextmanager
def _descriptor_2_turned_away() -> Iterator[None]:
    import tempfile

    sys.stderr.flush()  # what was written before must not be caught
    original = os.dup(2)
    # A file, and no pipe: nobody reads during the import, and a full pipe would block it for ever.
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

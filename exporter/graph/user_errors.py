"""Report errors of a user's code: the error that it raised, its file, line and function, and a way out.

Keras and AutoGraph raise an error again inside a text of their own, with frames of files that they generated.
The original error is the context of the last such exception; its place in the user's file is in their text.
(Source: keras/src/utils/traceback_utils.py; tensorflow/python/autograph/impl/api.py, `_ErrorMetadata`.)
"""

from __future__ import annotations

import contextlib
import importlib
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from exporter.errors import BuilderError, ExportError

_WRAPS = re.compile(
    r"in user code:|Exception encountered when calling|Could not automatically infer"
    r"|Error when deserializing class|<class [^>]*> could not be deserialized properly"
)
_TRACED = re.compile(r'^ *File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
# The text of TensorFlow and Keras around the error itself: nodes, stacks, long advice.
_ABOUT = re.compile(
    r"Graph execution error:\s*(Detected at.*?\nNode: [^\n]*\n)?"
    r"|\s(You can attempt the following|You are likely doing|\[\[{{node|Original stack trace for).*",
    re.DOTALL,
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_MAX_CHARACTERS = 500
_USE_KERAS_2 = "run it with Keras 2: pip install tf-keras, then TF_USE_LEGACY_KERAS=1 export-model ..."

_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = re.compile(r"[\\/](site|dist)-packages[\\/](?P<package>[^\\/]+)")
_STANDARD = sysconfig.get_path("stdlib") + os.sep

_UNTRACED = re.compile("Binding inputs to tf.function failed due to `missing a required argument")
_NO_VALUE = re.compile(
    r"[Ss]ymbolic(?! placeholder)|numpy\(\) is only available|`adapt` is only supported"
    r"|uninitialized value|can mean the variable is uninitialized"
)
_EAGER = re.compile(r"is not a valid root scope name|\beager (mode|execution)\b|\bexecuting_eagerly\b")
# Layers such as TPUEmbeddingForServing read the values of their own variables while they make others.
_READS_ITSELF = re.compile(r"[\\/]tensorflow[\\/]python[\\/]tpu[\\/]")
NEEDS_EAGER = (
    "a builder runs in a graph, and this one asks for eager execution: "
    "export it with tf.saved_model.save, and name that: --model DIRECTORY"
)
_KERAS_2_ALONE = re.compile(
    r"not (available|supported) (with|in) Keras 3|compat\.v1' has no attribute 'layers'"
)
_GONE = re.compile(r"module 'keras\._tf_keras\.(?P<module>keras[^']*)' has no attribute '(?P<name>\w+)'")
# Keras 3's errors about code that Keras 2 accepts: operations of TensorFlow on inputs, `add_weight(name)`,
# layers of tf-keras mixed with its own.
_STRICTER = re.compile(
    r"KerasTensor|multiple values for argument 'shape'|`name` must be passed as a keyword|\btf_keras\b"
)
_TF_KERAS = re.compile(r"\btf\.keras\b|\btensorflow\.keras\b|from tensorflow import .*\bkeras\b")
_KERAS = re.compile(r"^\s*(import keras\b|from keras\b)", re.MULTILINE)


class _Place(NamedTuple):
    file: str
    line: int
    function: str


@contextlib.contextmanager
def failures(what: str) -> Iterator[None]:
    """Raise BuilderError, with a position and a hint, for an error of a user's code in the block.

    `what` begins the message, such as "calling the model". Any Exception and SystemExit count; if the user's
    own error is an ExportError, that is raised unchanged.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        own = own_error(error)
        if isinstance(own, ExportError):
            raise own from None
        raise BuilderError(
            f"{what} raised {type(own).__name__}", cause=error_line(error), hint=way_out(error)
        ) from error


def own_error(error: BaseException) -> BaseException:
    """Return the error that a user's code raised itself, without the errors that wrap it."""
    while (inner := error.__context__) is not None and _only_wraps(error, inner):
        error = inner
    return error


def error_line(error: BaseException) -> str:
    """Return the user's own error on one line, followed by the file, line and function that it came from.

    These are left out if it came neither from the user's files nor from an installed package. A message of
    more than 500 characters is cut.
    """
    own = own_error(error)
    place = _place(error)
    text = _text(own) or (place and linecache.getline(place.file, place.line).strip()) or ""
    words = " ".join(_ANSI.sub("", _ABOUT.sub("", text)).split())
    if len(words) > _MAX_CHARACTERS:
        words = f"{words[:_MAX_CHARACTERS]}..."
    said = f"{type(own).__name__}: {words}" if words else type(own).__name__
    return f"{said} ({place.file}:{place.line} in {place.function})" if place else said


def way_out(error: BaseException) -> str:
    """Return a hint for a user's error; "" if nothing general is known."""
    text = _text(own_error(error))
    if _wants_keras_2(error, text):
        return _USE_KERAS_2
    if _UNTRACED.search(text):
        return "say what it is called with: @tf.function(input_signature=[tf.TensorSpec(...)])"
    if any(_READS_ITSELF.search(place.file) for place in _frames(own_error(error))):
        return NEEDS_EAGER
    if _NO_VALUE.search(text):
        return (
            "a builder runs in a graph, where tensors and variables have no values: compute with operations "
            "of TensorFlow, and give a layer its vocabulary or statistics instead of adapt()"
        )
    if _EAGER.search(text):
        return NEEDS_EAGER
    if "KerasTensor cannot be used" in text:
        return "compute with keras.layers or keras.ops, and end with: return keras.Model(inputs, outputs)"
    return ""


def keras_choice(keras_2: bool, files: Iterable[str]) -> str:
    """Return a hint to run code with Keras 2 (with `keras_2`) or with Keras 3.

    "" if this process uses that one already, if no file in `files` (paths of source files) uses `tf.keras`,
    or if one imports `keras` itself.
    """
    if keras_2 == _keras_2_is_chosen() or not _means_tf_keras(files):
        return ""
    return _USE_KERAS_2 if keras_2 else "run it with Keras 3: without TF_USE_LEGACY_KERAS in the environment"


def _keras_2_is_chosen() -> bool:
    """True if `tf.keras` is Keras 2 in this process. (Source: tensorflow/python/util/lazy_loader.py.)"""
    return os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")


def _only_wraps(error: BaseException, inner: BaseException) -> bool:
    """True if an error's message only reports the error `inner`, as Keras and AutoGraph do."""
    text = _text(error)
    return _WRAPS.match(text) is not None or text == f"{type(inner).__name__}: {inner}"


def _text(error: BaseException) -> str:
    """Return an error's message.

    A KeyError's is quoted, as `str` does it, unless Keras or AutoGraph raised it to report another error.
    """
    first = error.args[0] if error.args and not isinstance(error, KeyError) else None
    if isinstance(error, KeyError) and error.args and _WRAPS.match(str(error.args[0])):
        first = error.args[0]
    return first if isinstance(first, str) and len(error.args) == 1 else str(error)


def _place(error: BaseException) -> _Place | None:
    """Return the innermost position, in the user's files, that an error came from; None if there is none.

    If all positions are in installed packages, positions in the outermost package count.
    """
    found = _user_places(_places(error))
    return found[-1] if found else None


def _places(error: BaseException) -> list[_Place]:
    """Return the files, lines and functions of an error's traceback, outermost first.

    If AutoGraph's message names lines of the user's own files, these lines are returned instead of the
    traceback's, which are in generated files.
    """
    own = own_error(error)
    while error is not own and error.__context__ is not None:
        traced = [_Place(m["file"], int(m["line"]), m["function"]) for m in _TRACED.finditer(_text(error))]
        if _user_places(traced):
            return traced
        error = error.__context__
    return [*_frames(error)]


def _frames(error: BaseException) -> Iterator[_Place]:
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<") and "__autograph_generated_file" not in frame.filename:
            yield _Place(frame.filename, frame.lineno or 0, frame.name)


def _user_places(places: Iterable[_Place]) -> list[_Place]:
    """Return the places in the user's files, in the given order.

    If all places are in installed packages: the ones in the first package's files, none if that package is a
    framework, such as Keras.
    """
    others = [p for p in places if not p.file.startswith((_OURS, _STANDARD)) or _LIBRARY.search(p.file)]
    found = [p for p in others if not _LIBRARY.search(p.file)]
    return found or [p for p in others if _package(p) == _package(others[0]) not in _FRAMEWORKS]


_FRAMEWORKS = {"tensorflow", "keras", "tf_keras", "numpy"}


def _package(place: _Place) -> str:
    library = _LIBRARY.search(place.file)
    return library["package"] if library else ""


def _wants_keras_2(error: BaseException, text: str) -> bool:
    """True if an error, with the message `text`, means that Keras 3 refuses code that Keras 2 accepts.

    False if this process uses Keras 2. If the message leaves it open, the result is True only if the user's
    code uses `tf.keras`. The function may import tf_keras.
    """
    if _keras_2_is_chosen():
        return False
    if _KERAS_2_ALONE.search(text):
        return True
    if gone := _GONE.search(text):
        return _keras_2_has(gone["module"], gone["name"])
    files = [place.file for place in _places(error)]  # tf-keras itself may fail on objects of Keras 3
    is_stricter = any(map(_STRICTER.search, [text, *files]))
    return is_stricter and _means_tf_keras(place.file for place in _user_places(_places(error)))


def _keras_2_has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module.replace("keras", "tf_keras", 1)), name)
    except ImportError:
        return False


def _means_tf_keras(files: Iterable[str]) -> bool:
    sources = ["".join(linecache.getlines(file)) for file in {*files}]
    return any(map(_TF_KERAS.search, sources)) and not any(map(_KERAS.search, sources))

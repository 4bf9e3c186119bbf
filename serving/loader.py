"""Load a SavedModel version as TF Serving does: one graph, one session, tensors run by name."""

from __future__ import annotations

import fcntl
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from exporter.storage.files import close_quietly, open_regular
from exporter.storage.layout import MANIFEST_FILE, SAVED_MODEL_FILES
from exporter.while_needed import uncollected
from exporter.wire.protos import message_class
from serving.status import Code, StatusError, invalid


class Loading(Struct, frozen=True, kw_only=True):
    """Settings for loading versions."""

    tags: tuple[str, ...] = ("serve",)
    """Tags of the graph to load from a SavedModel."""
    session_config: bytes = b""
    """A serialised `ConfigProto`; thread numbers below override its own, unless 0."""
    intra_op_threads: int = 0
    """Threads for one operation; 0 leaves the number to TensorFlow."""
    inter_op_threads: int = 0
    """Operations that run at the same time; 0 leaves the number to TensorFlow."""
    warmup_iterations: int = 1
    """The number of times that each warm-up request is replayed; 0 replays none."""


DEFAULT_LOADING = Loading()


class LoadedModel:
    """A version in memory. Any number of threads may call `run` until `close`."""

    def __init__(self, session: Any, signatures: Mapping[str, Any], lock: int | None) -> None:
        self.signatures = signatures
        self._session = session
        self._lock = lock
        self._outputs: dict[str, Any] = {}

    def run(
        self, feeds: Mapping[str, NDArray[Any]], fetches: Sequence[str], timeout_ms: int | None = None
    ) -> list[NDArray[Any]]:
        """Return the values of the tensors `fetches`, computed from the values in `feeds`.

        StatusError for unknown tensor names; TensorFlow's own errors pass.

        Args: feeds: values by tensor name; TensorFlow checks dtypes, and the operations check shapes.
        fetches: names of tensors, in the order of the result. timeout_ms: milliseconds after which the
        session stops the step, at least 1; None is never.
        """
        # `Session.run` casts dtypes, refuses shapes that TF Serving accepts, and takes 140 us longer. This is
        # the call that it makes in the end: the same C++ `Session::Run` and error messages as TF Serving's.
        inputs = {self._output(name): value for name, value in feeds.items()}
        outputs = [self._output(name) for name in fetches]
        options = _run_options(timeout_ms)
        try:
            values = self._session._call_tf_sessionrun(options, inputs, outputs, [], None)
        finally:
            _delete_options(options)
        return list(values)

    def _output(self, name: str) -> Any:
        try:
            return self._outputs[name]
        except KeyError:
            pass
        try:
            output = self._session.graph.get_tensor_by_name(name)._as_tf_output()
        except (KeyError, ValueError, TypeError):
            raise invalid(
                f"Tensor {name}, specified in either feed_devices or fetch_devices was not found in the Graph"
            ) from None
        self._outputs[name] = output
        return output

    def close(self) -> None:
        """Free the session's memory and release the lock; may be called once.

        TensorFlow cancels steps in progress.
        """
        session, self._session = self._session, None
        session.close()
        self._outputs.clear()
        if self._lock is not None:
            close_quietly(self._lock)
            self._lock = None


def has_saved_model(directory: Path) -> bool:
    """Return True if the directory has a SavedModel's graph file; a copy in progress may still lack it."""
    return any((directory / name).is_file() for name in SAVED_MODEL_FILES)


def load(directory: Path, loading: Loading = DEFAULT_LOADING) -> LoadedModel:
    """Load the SavedModel in `directory`, and hold a shared lock on its manifest, if any, until `close`.

    `loading` has the tags of its graph and the session's settings. StatusError: NOT_FOUND if there is no
    SavedModel, or none with these tags; UNAVAILABLE if it is being removed; DATA_LOSS if it does not parse,
    or has a pipe or device. OSError if a file cannot be read, LfsPointer if the manifest is a pointer of Git
    LFS; TensorFlow's own errors pass.
    """
    if not has_saved_model(directory):
        names = " or ".join(SAVED_MODEL_FILES)
        raise StatusError(Code.NOT_FOUND, f"Could not find {names} in {directory}")
    # Before the import, which takes seconds, and before TensorFlow opens anything.
    _require_files(directory)
    import tensorflow as tf
    from tensorflow.python.saved_model.loader_impl import SavedModelLoader

    # Before the load: from here on retention removes no file that the session still has to read.
    lock = _lock(directory / MANIFEST_FILE)
    config = tf.compat.v1.ConfigProto.FromString(loading.session_config)
    config.intra_op_parallelism_threads = loading.intra_op_threads or config.intra_op_parallelism_threads
    config.inter_op_parallelism_threads = loading.inter_op_threads or config.inter_op_parallelism_threads
    session = tf.compat.v1.Session(graph=tf.Graph(), config=config)
    try:
        with uncollected(), session.graph.as_default():
            # `tf.compat.v1.saved_model.load` calls this, and logs a deprecation notice for each load.
            meta_graph = SavedModelLoader(str(directory)).load(session, list(loading.tags))
        # `Session.run` does this before each step; `_call_tf_sessionrun` alone misses nodes added since.
        session._extend_graph()
    except BaseException as error:
        session.close()
        if lock is not None:
            close_quietly(lock)
        if isinstance(error, RuntimeError):  # the Python loader's error for missing tags
            raise StatusError(Code.NOT_FOUND, str(error)) from error
        if isinstance(error, OSError) and error.errno is None:  # its error for a file that does not parse
            raise StatusError(Code.DATA_LOSS, str(error)) from error
        raise
    own = message_class("SignatureDef")  # the calls' messages are from another pool than TensorFlow's
    signatures = {k: own.FromString(v.SerializeToString()) for k, v in meta_graph.signature_def.items()}
    return LoadedModel(session, signatures, lock)


def _require_files(directory: Path) -> None:
    """Raise StatusError (DATA_LOSS) if the directory holds a pipe, socket or device, at any depth.

    TensorFlow would open a pipe and block for ever, and all later loads would wait behind that.
    """
    for path in directory.rglob("*"):
        with suppress(OSError):
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise StatusError(Code.DATA_LOSS, f"{path} is not a regular file")


def _lock(manifest: Path) -> int | None:
    """Acquire the shared lock that keeps retention from removing the version, without waiting for it.

    Returns its descriptor, which the caller closes; None if there is no manifest. StatusError UNAVAILABLE if
    the version is being removed; OSError if the manifest cannot be opened; LfsPointer if it is a pointer of
    Git LFS.
    """
    try:
        descriptor = open_regular(manifest)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        close_quietly(descriptor)
        raise StatusError(Code.UNAVAILABLE, f"{manifest.parent} is being removed") from None
    return descriptor


def _run_options(timeout_ms: int | None) -> Any:
    if timeout_ms is None:
        return None
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.client import pywrap_tf_session

    # At least 1: TensorFlow takes 0 for no limit, and a step whose deadline has passed would run on.
    options = config_pb2.RunOptions(timeout_in_ms=max(1, timeout_ms))
    return pywrap_tf_session.TF_NewBufferFromString(options.SerializeToString())


def _delete_options(options: Any) -> None:
    if options is not None:
        from tensorflow.python.client import pywrap_tf_session

        pywrap_tf_session.TF_DeleteBuffer(options)

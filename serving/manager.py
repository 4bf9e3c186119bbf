"""Keep the versions of one model in memory: a thread follows the base path, requests borrow loaded versions.

A version replays its warm-up requests before it becomes available. They are `PredictionLog` messages in an
uncompressed TFRecord file (source: tensorflow_serving/g3doc/saved_model_warmup.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import ModelPathNotFound, ServerError
from exporter.storage.files import regular_file
from exporter.storage.layout import SAVED_MODEL_FILE, WARMUP_FILE
from exporter.storage.local_paths import quoted
from exporter.wire.protos import Proto, message_class
from serving.inference import DEFAULT_INFERENCE, Inference, Model, classify, multi_inference, predict, regress
from serving.loader import DEFAULT_LOADING, LoadedModel, Loading, has_saved_model, load
from serving.model_config import NEWEST, Load, VersionPolicy, next_action, versions_among
from serving.status import Code, StatusError, VersionState, VersionStatus, invalid, status_of

MAX_RECORDS = 1000
"""TF Serving's limit for warm-up requests."""

Listener = Callable[[str, VersionStatus], None]
"""Called with a model's name and a version's new status, from the thread that changed it."""

_REPLAYS: dict[str, tuple[Callable[[Model, Proto, Proto, Inference], None], str]] = {
    "predict_log": (predict, "serving.PredictResponse"),
    "classify_log": (classify, "serving.ClassificationResponse"),
    "regress_log": (regress, "serving.RegressionResponse"),
    "multi_inference_log": (multi_inference, "serving.MultiInferenceResponse"),
}


def load_warm(
    directory: Path, loading: Loading = DEFAULT_LOADING, how: Inference = DEFAULT_INFERENCE
) -> LoadedModel:
    """Load the SavedModel in `directory` and replay its warm-up requests; return the model.

    StatusError if it is absent, damaged or being removed, or a request is refused; OSError if a file cannot
    be read, LfsPointer if one is a pointer of Git LFS; TensorFlow's own errors pass. After a failed request
    the model is closed.
    """
    model = load(directory, loading)
    try:
        warm_up(model, directory, how, iterations=loading.warmup_iterations)
    except BaseException:
        model.close()
        raise
    return model


def warm_up(model: Model, directory: Path, how: Inference = DEFAULT_INFERENCE, *, iterations: int = 1) -> int:
    """Replay the warm-up requests of the SavedModel in `directory`, in file order; return their number.

    Each is replayed `iterations` times before the next one. Without a file of requests, or with 0 iterations,
    nothing happens and 0 is returned. StatusError for more than `MAX_RECORDS` requests, a damaged file, or a
    request that does not fit, after the requests before it were replayed; OSError if the file cannot be read,
    LfsPointer if it is a pointer of Git LFS; TensorFlow's own errors pass.
    """
    from exporter.wire.tfrecord import DamagedRecord, read_records

    path = directory / WARMUP_FILE
    if not path.is_file() or not iterations:
        return 0
    count = 0
    with regular_file(path) as file:
        try:
            for count, record in enumerate(read_records(file), 1):
                if count > MAX_RECORDS:
                    raise invalid(f"Number of warmup records exceeds the maximum ({MAX_RECORDS}) at {path}")
                _replay(model, record, path, how, iterations)
        except DamagedRecord:
            text = f"{path} is damaged. Please verify your warmup data is in TFRecord format."
            raise StatusError(Code.DATA_LOSS, text) from None
    return count


def _replay(model: Model, record: bytes, path: Path, how: Inference, iterations: int) -> None:
    from google.protobuf.message import DecodeError

    try:
        log = message_class("serving.PredictionLog").FromString(record)
    except DecodeError:
        raise invalid(f"Failed to parse warmup record from {path}") from None
    kind = log.WhichOneof("log_type")
    if kind is None:
        return
    if kind not in _REPLAYS:
        raise StatusError(Code.UNIMPLEMENTED, f"Unsupported log_type for warmup: {kind}")
    run, response = _REPLAYS[kind]
    for _ in range(iterations):
        run(model, getattr(log, kind).request, message_class(response)(), how)


class _Served(Struct):
    """A loaded version and the number of requests that use it."""

    model: LoadedModel
    borrowers: int = 0


class VersionManager:
    """A thread that loads and unloads the versions of one model as their directories come and go.

    After a failed load it waits until the directory changes before it loads the version again. So a version
    that is still being copied is loaded in the end, and a broken one costs nothing. `policy` chooses the
    versions; `poll_seconds` is the time between two looks at the base path (0: look once); `load` loads a
    version's directory; `listener` gets each new status.
    """

    def __init__(
        self,
        name: str,
        base_path: Path,
        *,
        policy: VersionPolicy = NEWEST,
        poll_seconds: float = 1.0,
        load: Callable[[Path], LoadedModel] = load_warm,
        listener: Listener | None = None,
    ) -> None:
        self.name = name
        self.base_path = base_path
        self._policy: VersionPolicy | None = policy
        self._poll_seconds = poll_seconds
        self._load_model = load
        self._listener = listener
        self._changed = threading.Condition()
        self._wanted: frozenset[int] = frozenset()
        self._statuses: dict[int, VersionStatus] = {}
        self._served: dict[int, _Served] = {}
        self._failures: dict[int, object] = {}
        self._starts = 1
        """The model's starts: the first, and each `follow` while retired or without a version."""
        self._noticed = 0
        """The start on which the thread has acted last. While it is lower, loaded versions may still go."""
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"versions of {name}", daemon=True)

    def start(self) -> None:
        """Start to follow the base path, in a thread; may be called once."""
        self._thread.start()

    def stop(self, grace_seconds: float) -> None:
        """Unload everything, and wait, for about `grace_seconds` in all.

        A load in progress may end in that time, and so may requests in progress; then they are cut off.
        """
        deadline = time.monotonic() + grace_seconds
        with self._changed:
            self._stopping = True
            # `_states` lists failed versions, too, of which nothing is loaded that could be unloaded.
            self._failures = {}
        self._wake.set()
        if self._thread.ident is not None:  # joining a thread that was never started raises RuntimeError
            self._thread.join(grace_seconds)
        for version in self._states():
            self._announce(VersionStatus(version, VersionState.UNLOADING))
            self._unload(version, max(0.0, deadline - time.monotonic()))

    def follow(self, base_path: Path, policy: VersionPolicy) -> None:
        """Follow another base path, or choose versions by another policy, from now on; does not wait.

        Nothing happens if both are as before, unless the model is retired: then it starts again. A loaded
        version of the same number stays, from whichever path it was loaded, as in TF Serving.
        """
        with self._changed:
            if (self.base_path, self._policy) == (base_path, policy):
                return
            self._starts += self.is_retired or not self._available()
            self.base_path, self._policy = base_path, policy
            self._wanted = frozenset()  # old failures must not count until the thread has read the new path
        self._wake.set()

    def retire(self) -> None:
        """Unload everything, and keep the last status of each version; does not wait.

        `follow` starts the model again.
        """
        with self._changed:
            self._policy = None
            self._changed.notify_all()
        self._wake.set()

    @property
    def is_retired(self) -> bool:
        """Return True after `retire`, until `follow`."""
        return self._policy is None

    @contextmanager
    def borrow(self, version: int | None) -> Iterator[tuple[int, LoadedModel]]:
        """Yield number and model of an available version: `version`, or the newest for None.

        It stays loaded inside the `with` block. StatusError NOT_FOUND if it is not available.
        """
        with self._changed:
            number = version if version is not None else max(self._available(), default=-1)
            if number not in self._available():
                wanted = f"Latest({self.name})" if version is None else f"Specific({self.name}, {version})"
                raise StatusError(Code.NOT_FOUND, f"Servable not found for request: {wanted}")
            served = self._served[number]
            # Under the lock, as the look before it: `_unload` closes a version once nobody borrows it.
            served.borrowers += 1
        try:
            yield number, served.model
        finally:
            with self._changed:
                served.borrowers -= 1
                if not served.borrowers:
                    self._changed.notify_all()

    def statuses(self) -> list[VersionStatus]:
        """Return the last status of every version that the manager has ever seen, the newest first."""
        with self._changed:
            return sorted(self._statuses.values(), key=lambda status: -status.version)

    def is_available(self) -> bool:
        """Return True if some version is available to requests."""
        return bool(self.available())

    def available(self) -> list[int]:
        """Return the versions that are available to requests, in no particular order."""
        with self._changed:
            return self._available()

    def is_coming(self) -> bool:
        """Return True while the manager looks for a first version, or loads one that has not failed."""
        with self._changed:
            if self._policy is None or self._stopping:
                return False
            if self._noticed != self._starts:
                return True
            return not self._available() and not self._wanted <= self._failures.keys()

    def wait_available(self, timeout_seconds: float, is_wanted: Callable[[], bool] = lambda: True) -> int:
        """Wait for an available version and return the newest one's number.

        ServerError after `timeout_seconds`, if `is_wanted`, called about once a second, returns False, or if
        no version can become available; ModelPathNotFound, a ServerError, if the base path does not exist.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not (available := self._available()) or self._noticed != self._starts:
                late = time.monotonic() >= deadline or not is_wanted()
                if late or self._hopeless():
                    raise self._not_available(timeout_seconds if late else None)
                # In steps: between them Python can run a signal's handler.
                self._changed.wait(min(1.0, deadline - time.monotonic()))
            return max(available)

    def _available(self) -> list[int]:
        return [v for v in self._served if self._statuses[v].state is VersionState.AVAILABLE]

    def _hopeless(self) -> bool:
        if self._policy is None or self._stopping:
            return True
        # A failed version may be loading again: only those in END count.
        ended = {v for v in self._failures if self._statuses[v].state is VersionState.END}
        return bool(self._wanted) and self._wanted <= ended

    def _not_available(self, waited_seconds: float | None) -> ServerError:
        if self._policy is None or self._stopping:
            return ServerError(
                f"{self.name} is no longer served",
                cause="it was removed from the configuration"
                if self.is_retired
                else "the server is stopping",
                hint="add it to the configuration: serve-model reload",
            )
        failures = [status for status in self._statuses.values() if status.code]
        if not failures and (self.base_path / SAVED_MODEL_FILE).is_file():
            return ServerError(
                f"{self.base_path} is itself a version",
                cause="a model base path holds versions, in directories whose names are numbers",
                hint=f"name the directory above it: serve-model run {quoted(self.base_path.parent)}",
            )
        if not failures and not self.base_path.is_dir():
            return ModelPathNotFound(
                f"{self.base_path} is not a directory",
                cause=f"the server waited {waited_seconds:.3g} s for it",
            )
        if not failures:
            return ServerError(
                f"no version of {self.name} became available in {waited_seconds:.3g} s",
                cause=self._nothing_found(),
                hint="publish a version with export-model, or wait longer with --wait SECONDS",
            )
        failed = max(failures, key=lambda status: status.version)
        return ServerError(
            f"version {failed.version} of {self.name} cannot be served",
            cause=f"{failed.code.name}: {failed.message}",
            hint=f"publish a version that loads, or remove {self.base_path / str(failed.version)}",
        )

    def _nothing_found(self) -> str:
        if self._wanted:
            return f"version {max(self._wanted)} is still loading"
        return f"{self.base_path} has no directory whose name is a number"

    def _follow(self) -> None:
        while not self._stopping:
            self._wake.clear()  # before reading the policy, so that a change meanwhile sets it again
            with self._changed:
                policy, base_path, starts = self._policy, self.base_path, self._starts
            if policy is None:
                self._settle(frozenset(), {}, starts)
            else:
                try:
                    directories = versions_among(path.name for path in base_path.iterdir())
                    paths = {version: base_path / name for version, name in directories.items()}
                    self._settle(policy.choose(directories), paths, starts)
                except OSError:  # a base path that is missing for a moment changes nothing
                    self._notice(starts)
            # Without a policy, or with 0 s, only `follow`, `retire` and `stop` wake the thread.
            self._wake.wait(None if policy is None else self._poll_seconds or None)

    def _notice(self, starts: int) -> None:
        with self._changed:
            self._noticed = starts
            self._changed.notify_all()

    def _settle(self, wanted: frozenset[int], directories: dict[int, Path], starts: int) -> None:
        """Load and unload versions until exactly `wanted` is served, or until `stop`.

        A version that fails to load is left out, until its directory changes. `directories` has the path of
        each existing version; `starts` is the number of the model's start to which both belong.
        """
        failures = {
            version: fingerprint
            for version, fingerprint in self._failures.items()
            if version in wanted and fingerprint == _fingerprint(directories[version])
        }
        with self._changed:
            if self._stopping:
                return
            self._wanted, self._failures = wanted, failures
            self._notice(starts)
        self._end_unfinished(wanted)
        for version in sorted(wanted - self._statuses.keys()):
            self._announce(VersionStatus(version, VersionState.START))
        while not self._stopping and (action := next_action(wanted, self._states())):
            if isinstance(action, Load):
                self._load(action.version, directories[action.version])
            else:
                self._begin_unload(action.version)

    def _end_unfinished(self, wanted: frozenset[int]) -> None:
        """Announce END for versions that never got loaded and are not wanted any more."""
        for status in self.statuses():
            is_waiting = status.state in (VersionState.START, VersionState.LOADING)
            if is_waiting and status.version not in wanted:
                self._announce(replace(status, state=VersionState.END))

    def _states(self) -> dict[int, VersionState]:
        with self._changed:
            served = {version: self._statuses[version].state for version in self._served}
            return served | dict.fromkeys(self._failures, VersionState.END)

    def _load(self, version: int, directory: Path) -> None:
        self._announce(VersionStatus(version, VersionState.LOADING))
        # Before the load: files that change meanwhile give another fingerprint, and so another try.
        fingerprint = _fingerprint(directory)
        try:
            model = self._load_model(directory)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - of a foreign model, or of TensorFlow's import
            status = status_of(error)
            unfinished = status.code is Code.UNAVAILABLE or not has_saved_model(directory)
            # None equals no fingerprint: a version that is being removed is tried again at each look.
            self._failures[version] = None if status.code is Code.UNAVAILABLE else fingerprint
            state = VersionState.LOADING if unfinished else VersionState.END
            self._announce(VersionStatus(version, state, status.code, status.message))
            return
        self._announce(VersionStatus(version, VersionState.AVAILABLE), _Served(model))

    def _begin_unload(self, version: int) -> None:
        """Begin to unload a version in a separate thread, without waiting for its requests.

        One that never ends must not delay new versions.
        """
        self._announce(VersionStatus(version, VersionState.UNLOADING))
        threading.Thread(target=self._unload, args=(version,), name=f"unload {version}", daemon=True).start()

    def _unload(self, version: int, timeout_seconds: float | None = None) -> None:
        with self._changed:
            served = self._served.get(version)
            if served is not None:
                self._changed.wait_for(lambda: not served.borrowers, timeout_seconds)
            if served is None or self._served.pop(version, None) is None:
                return  # `stop` and the thread of an unload meet here: who comes second finds it gone
        # Outside the lock: other versions answer while TensorFlow frees this one.
        served.model.close()
        self._announce(VersionStatus(version, VersionState.END))

    def _announce(self, status: VersionStatus, served: _Served | None = None) -> None:
        with self._changed:
            if self._statuses.get(status.version) == status:
                return
            self._statuses[status.version] = status
            if served:
                self._served[status.version] = served
            self._changed.notify_all()
        if self._listener:
            with suppress(OSError, ValueError):  # the listener's stream may be closed; serving continues
                self._listener(self.name, status)


def _fingerprint(directory: Path) -> object:
    """Return paths, sizes and modification times of everything below a directory, sorted.

    The value changes when the directory does. What cannot be looked at is left out.
    """
    found = []
    for path in directory.rglob("*"):
        with suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_size, stat.st_mtime_ns))
    return sorted(found)

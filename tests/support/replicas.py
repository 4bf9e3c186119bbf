"""A server in numpy: it loads the newest base, and applies the deltas that its hold allows, as graphs do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from exporter.delta.format import Rows
from exporter.publish.delta_log import DeltaLog, LogBase, LogDelta, read_log
from exporter.publish.model import Model
from exporter.publish.versions import VersionDir
from tests.support.logs import Values, values_at


def bits_of(values: Values) -> str:
    """What two servers have in common if all their values have the same bits."""
    named = (
        f"{name} {value.dtype} {value.shape} ".encode() + value.tobytes() for name, value in values.items()
    )
    return hashlib.sha256(b"".join(sorted(named))).hexdigest()


def read_base(model: Path, version: str) -> dict[str, np.ndarray]:
    """The values of a base."""
    base = LogBase.read(model / version)
    alone = VersionDir(base.at.position, base.path, has_manifest=True)
    return values_at(DeltaLog(model, base, (alone,), ()))


class Replica:
    """A server of a directory: its `version`, `position` and `values`, and the bits of all states since."""

    def __init__(self, model: Path) -> None:
        self._model, self._seen = model, Model()
        self.version: int | None = None
        self.position = -1
        self.values: dict[str, np.ndarray] = {}
        self.passed: list[str] = []

    @property
    def bits(self) -> str:
        """Of its values."""
        return bits_of(self.values)

    def follow(self) -> None:
        """Load the newest base unless it is loaded, and go on as far as the hold allows."""
        seen = self._seen = Model.look(self._model, self._seen)
        if seen.newest_version is None:
            return
        base = LogBase.read(self._model / str(seen.newest_version))
        if seen.newest_version != self.version:
            self._reach(read_base(self._model, base.path.name), base.at.position)
            self.version = seen.newest_version
        log = seen.logs[base.manifest.lineage or ""]
        for span in log.reach(self.position):
            changes = read_log(self._model).open(LogDelta(log.path, span.start, span.end)).changes
            values = {name: value.copy() for name, value in self.values.items()}
            for name, change in changes.items():
                if isinstance(change, Rows):
                    values[name][change.ids] = change.values
                else:
                    values[name] = np.asarray(change).reshape(values[name].shape)
            self._reach(values, span.end)

    def _reach(self, values: dict[str, np.ndarray], position: int) -> None:
        self.values, self.position = values, position
        self.passed.append(self.bits)

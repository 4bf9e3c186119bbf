"""Remember which tensors' checksums were verified, as long as their files do not change.

    {"files": {name: [device, inode, bytes, modified, changed]}, "runs": [[name, offset, bytes, crc32c]]}

Published files are never written to. A delta that holds rows back asks for the distance of some rows of a
base, again and again; it need not read the whole base each time as long as these five numbers stay the same.
What is published as it was read (a rollback, a new base) does not ask this cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from exporter.delta.row_reader import RowReader, StoredRun
from exporter.files import kept_identity

_Identity = list[int]
_RunKey = tuple[str, int, int, int]


class CheckedFiles(Struct, frozen=True):
    """The cache in a file; `identities` are those of the shards before anything was read."""

    path: Path
    identities: dict[str, _Identity]

    @classmethod
    def of(cls, path: Path, variables: Iterable[RowReader]) -> CheckedFiles:
        """The cache for what these variables are made of."""
        shards = {run.path for variable in variables for run in variable.runs}
        found = {shard.name: _identity(shard) for shard in shards}
        return cls(path, {name: identity for name, identity in found.items() if identity})

    def known(self, variables: Iterable[RowReader]) -> frozenset[StoredRun]:
        """The runs that were compared before, in files that have not changed since."""
        try:
            document = json.loads(self.path.read_bytes())
            same = {name for name, was in document["files"].items() if self.identities.get(name) == was}
            checked: set[_RunKey] = {tuple(run) for run in document["runs"] if run[0] in same}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return frozenset()
        return frozenset(run for variable in variables for run in variable.runs if _key(run) in checked)

    def save(self, checked: Collection[StoredRun]) -> None:
        """Save what was verified; failing to do so does no harm."""
        runs = [_key(run) for run in checked if run.path.name in self.identities]
        content = json.dumps({"files": self.identities, "runs": sorted(runs)})
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            temporary.write_text(content)
            temporary.replace(self.path)


def _identity(path: Path) -> _Identity:
    try:
        return kept_identity(path)
    except OSError:
        return []


def _key(run: StoredRun) -> _RunKey:
    return (run.path.name, run.extent.offset, run.extent.size, run.extent.crc32c)

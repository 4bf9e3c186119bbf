"""Notice new checkpoints in a directory, whoever saves them."""

from __future__ import annotations

from pathlib import Path

from exporter.checkpoint.locate import candidates
from exporter.checkpoint.tensor_bundle import index_path
from exporter.errors import CheckpointError
from exporter.files import FileIdentity, identity_of
from exporter.layout import CHECKPOINT_STATE_FILE


class NewCheckpoints:
    """The newest checkpoint of a directory, looked up when files changed; a look costs three system calls."""

    def __init__(self, ckpt_dir: Path) -> None:
        self._ckpt_dir = ckpt_dir
        self._looked: tuple[FileIdentity | None, ...] | None = None
        self._newest: tuple[Path, FileIdentity] | None = None

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint at the last look."""
        return self._newest[0] if self._newest else None

    def new(self) -> Path | None:
        """The newest checkpoint (prefix or archive) if it is another, or written anew, since the last."""
        looked = (identity_of(self._ckpt_dir), identity_of(self._ckpt_dir / CHECKPOINT_STATE_FILE))
        if looked == self._looked and not self._is_overwritten():
            return None
        before = self._newest
        self._looked, self._newest = looked, self._find()
        return self.newest if self._newest != before else None

    def _is_overwritten(self) -> bool:
        """An archive may be written anew in place; then its directory stays as it was."""
        return self._newest is not None and _saved(self._newest[0]) != self._newest[1]

    def _find(self) -> tuple[Path, FileIdentity] | None:
        try:
            newest = candidates(self._ckpt_dir)[0]
        except CheckpointError:
            return None
        return (newest, identity) if (identity := _saved(newest)) else None


def _saved(checkpoint: Path) -> FileIdentity | None:
    return identity_of(index_path(checkpoint)) or identity_of(checkpoint)

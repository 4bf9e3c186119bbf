"""The command that publishes a new base of a model, complete, ready to be typed.

It has the arguments that an export kept. Without them, as for copies and models of earlier releases, it is
made from the names in the base's manifest.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from exporter.errors import ManifestError
from exporter.options import Updates, arguments
from exporter.publish.kept_export import export_kept_of
from exporter.publish.manifest import BaseEntry
from exporter.publish.versions import newest_version, read_manifest
from exporter.storage.local_paths import quoted


def new_base(model: str | Path, ckpt_dir: Path | None = None, manifests: Path | None = None) -> str:
    """Return the command line that publishes a new base of a model, which is given by its path or URL.

    Without kept arguments it is made from the manifest of the newest version, read in `model`, or in
    `manifests`, a copy of it; words in capitals stand for what is not known, also if that manifest is damaged
    or missing. `ckpt_dir` is the trainer's directory; None takes it from the manifest.

    Raises:
        UsageError: a URL is malformed; or keys are trusted there, and a file of keys cannot be read.
        CheckpointError: the manifest cannot be fetched from its store.
    """
    if again := export_kept_of(model):
        return again
    words = ["export-model", "--ckpt-dir", str(ckpt_dir or "DIR"), "--model", "WHAT", "--out", str(model)]
    with suppress(ManifestError, OSError):
        newest = newest_version(manifests or Path(model))
        manifest = None if newest is None else read_manifest(newest.path)
        entry = None if manifest is None else manifest.incremental
        if manifest is not None:
            words[2] = str(ckpt_dir or manifest.source.directory)
        if isinstance(entry, BaseEntry):
            if entry.origin is not None and entry.origin.files:
                named = entry.origin.files[0].path, entry.origin.function
                words[4] = ":".join(filter(None, named))
            words += arguments(entry.updates) if entry.updates != Updates() else ()
        if manifest is not None and manifest.signature is not None:
            words += ["--sign-key", "KEY"]
    return " ".join([*map(quoted, words), "--new-base always", "--again"])

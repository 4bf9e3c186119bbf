"""The command that publishes a new base of a model, whole, so that it can be typed.

An export keeps its own arguments beside the model, for its own user alone: neither servers nor stores read
the file. Without it, as for models of earlier releases and copies, the base's manifest knows the
names of what it was made from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.errors import ManifestError
from exporter.options import ExportRequest, Updates, arguments
from exporter.publish.manifest import BaseEntry
from exporter.publish.versions import newest_version, read_manifest
from exporter.storage.files import read_regular
from exporter.storage.layout import MADE_BY_FILE
from exporter.storage.local_paths import quoted

_LONGEST_BYTES = 1 << 16


class _Kept(Struct, frozen=True):
    """The file: the directory in which the arguments were typed."""

    directory: str
    arguments: list[str]


def _kept(model: Path) -> _Kept | None:
    """What an export of this user kept; None without it, or if it cannot be read."""
    with suppress(OSError, msgspec.DecodeError):
        if (model / MADE_BY_FILE).lstat().st_uid != os.getuid():
            return None  # a command that others wrote is not one to type
        return msgspec.json.decode(read_regular(model / MADE_BY_FILE, _LONGEST_BYTES), type=_Kept)
    return None


def keep_command(request: ExportRequest) -> None:
    """Keep an export's arguments beside its model; nothing is kept of one whose model has no name.

    It is for people, so that a failure to write it fails nothing.
    """
    place = request.out / MADE_BY_FILE
    with suppress(OSError):
        if request.model is not None and not isinstance(request.model, str):
            place.unlink(missing_ok=True)
            return
        try:
            content = msgspec.json.encode(_Kept(str(Path.cwd()), list(_arguments(request))))
        except UnicodeEncodeError:  # a name that is not UTF-8 has no form in JSON
            place.unlink(missing_ok=True)
            return
        new = place.with_name(f"{MADE_BY_FILE}.{os.getpid()}")
        # for its owner alone: an argument of a builder may be nobody else's business
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        new.replace(place)


def _arguments(request: ExportRequest) -> Iterator[str]:
    where = request.ckpt_dir
    yield f"--ckpt-dir={where if where.is_dir() else where.parent}"
    yield f"--out={request.out}"
    yield from arguments(request)


def new_base(model: Path, ckpt_dir: Path | None = None) -> str:
    """The command that publishes a new base; `ckpt_dir` where nothing else says where the trainer saves."""
    if (kept := _kept(model)) is not None:
        typed = " ".join(map(quoted, kept.arguments))
        return f"cd {quoted(kept.directory)} && export-model {typed} --updatable --again"
    words = ["export-model", "--ckpt-dir", str(ckpt_dir or "DIR"), "--model", "WHAT", "--out", str(model)]
    with suppress(ManifestError, OSError):
        newest = newest_version(model)
        manifest = None if newest is None else read_manifest(newest.path)
        entry = None if manifest is None else manifest.incremental
        if manifest is not None:
            words[2] = str(ckpt_dir or manifest.source.directory)
        if isinstance(entry, BaseEntry):
            if entry.origin is not None and entry.origin.files:
                named = entry.origin.files[0].path, entry.origin.function
                words[4] = ":".join(filter(None, named))
            words += arguments(entry.updates) if entry.updates != Updates() else ()
    return " ".join([*map(quoted, words), "--updatable", "--again"])


def look_at_trainer(model: Path) -> str:
    """The command that says whether the trainer writes, and whether an export would publish."""
    directory = "DIR"
    if (kept := _kept(model)) is not None:
        given = (word.partition("=")[2] for word in kept.arguments if word.startswith("--ckpt-dir="))
        directory = str(Path(kept.directory, next(given, "DIR")))
    return f"export-model doctor {quoted(model)} --ckpt-dir {quoted(directory)}"

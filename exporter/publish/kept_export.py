"""The arguments of a model's export, kept for later commands that propose it again, ready to be typed.

They are kept beside the model, readable by its own user alone: neither servers nor stores read the file. For
a model in a store they are kept in this user's directory for states (`XDG_STATE_HOME`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from exporter.options import ExportRequest, arguments, declared
from exporter.options.old_names import renew_arguments
from exporter.storage.files import read_record, replace_file
from exporter.storage.layout import MADE_BY_FILE
from exporter.storage.local_paths import quoted
from exporter.storage.mirror import shown
from exporter.storage.url import Url

_LONGEST_BYTES = 1 << 16


class _Kept(Struct, frozen=True):
    """The kept file: the arguments of an export, and the directory in which they were typed."""

    directory: str
    arguments: list[str]


def _place(model: str | Path) -> Path:
    """The path of the file with the arguments of a model's export, by the model's path or URL.

    It need not exist. RuntimeError if the user's home directory is needed, and not known; UsageError if the
    URL is malformed.
    """
    url = Url.parse(shown(os.fspath(model)))
    if url is None:
        return Path(model) / MADE_BY_FILE
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    # a URL has characters that a file's name cannot have
    name = hashlib.sha256(str(url).encode()).hexdigest()[:32]
    return Path(home).expanduser() / "export-model" / name / MADE_BY_FILE


def _kept(model: str | Path) -> _Kept | None:
    """The arguments that an export of this user kept for a model (its path or URL).

    None if there are none, they cannot be read, or another user wrote them. UsageError if the URL is
    malformed.
    """
    place = _place(model)
    with suppress(OSError, RuntimeError, msgspec.DecodeError):
        if place.lstat().st_uid != os.getuid():
            return None  # never propose a command that another user wrote
        return msgspec.json.decode(read_record(place, _LONGEST_BYTES), type=_Kept)
    return None


def keep_command(request: ExportRequest) -> None:
    """Keep an export's arguments and the current directory in a file, for the hints of later commands.

    The file is beside a local model, and in the user's directory of states for a model in a store. If
    `--model` was not a name that can be typed, or a name is not UTF-8, a kept file is removed instead. The
    file is only for people, so that a failure to write it is ignored.
    """
    with suppress(OSError, RuntimeError):
        place = _place(request.out)
        if request.model is not None and not isinstance(request.model, str):
            place.unlink(missing_ok=True)
            return
        try:
            content = msgspec.json.encode(_Kept(str(Path.cwd()), list(_arguments(request))))
        except UnicodeEncodeError:  # a name that is not UTF-8 has no form in JSON
            place.unlink(missing_ok=True)
            return
        if place.parent != request.out:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # for its owner alone: an argument of a builder may be nobody else's business
        replace_file(place, content, mode=0o600)


def _arguments(request: ExportRequest) -> Iterator[str]:
    where = request.ckpt_dir
    yield f"--ckpt-dir={shown(str(where if where.is_dir() else where.parent))}"
    yield f"--out={shown(str(request.out))}"
    yield from arguments(request)


def export_kept_of(model: str | Path) -> str:
    """The command for a new base of a model (path or URL), with the arguments that this user's export kept.

    Empty without kept arguments. UsageError if a URL is malformed.
    """
    return _again(model, "--new-base", "always", "--again")


def look_at_trainer(model: str | Path, *, takes_deltas: bool = True) -> str:
    """The command that shows the trainer's progress and the next publication, and publishes nothing.

    It is a dry run of this user's export with the arguments that were kept, or the doctor of the model (a
    path or URL) without any. `takes_deltas`: the export would publish a delta. UsageError if a URL is
    malformed.
    """
    again = _again(model, *(["--incr"] if takes_deltas else []), "--dry-run")
    return again or f"export-model doctor {quoted(model)}"


def _again(model: str | Path, *options: str) -> str:
    """The command line of this user's kept export of a model, with further `options`.

    Empty if none was kept. UsageError if the model's URL is malformed.
    """
    kept = _kept(model)
    if kept is None:
        return ""
    known = {one.name for one in declared(ExportRequest)}
    typed = " ".join(map(quoted, [*renew_arguments(kept.arguments, known), *options]))
    return f"cd {quoted(kept.directory)} && export-model {typed}"

"""Open a model by its path or URL: commands work on a local path, and their publications are uploaded to the
URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec.structs import replace

from exporter.errors import ManifestError, UsageError
from exporter.options import ANYBODY, UNSIGNED, DataMode, Signing, Trusting
from exporter.storage.layout import MANIFEST_FILE
from exporter.storage.url import Url
from exporter.terminal.progress import ProgressFactory, no_progress

if TYPE_CHECKING:
    from exporter.publish.signing import Signer, Trust

T = TypeVar("T")


class OpenModel(Protocol):
    """A model to work on: `path` is its base path, local or standing for a URL (`is_remote`)."""

    path: Path
    is_remote: bool

    @property
    def meets(self) -> tuple[str, ...]:
        """Sentences for people on uploads, decisions and holds in the store that a command would meet.

        Empty if there is none, or for a local model.
        """

    def carry(self, work: Callable[[], T], progress: ProgressFactory = no_progress) -> T:
        """Run `work`, which may publish under `path`; return its result once the model itself has the change.

        For a model in a store the publications are uploaded, with bars of `progress`, and `work` is repeated
        if another machine published first: see `RemoteModel.carry`, also for what is raised. What `work`
        raises passes.
        """
        ...


class LocalModel:
    """A model on this machine: publishing under its path is all there is to do."""

    is_remote = False
    meets: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"LocalModel({str(self.path)!r})"

    def carry(self, work: Callable[[], T], progress: ProgressFactory = no_progress) -> T:
        """Run `work` and return its result: a local model has the change at once.

        `progress` is not used. What `work` raises passes.
        """
        return work()


def require_apart(ckpt_dir: Path, out: Path) -> None:
    """Refuse a model `out` and a checkpoint directory that overlap in one store; ignore local paths.

    Raises:
        UsageError: both are the same, or one is below the other; or a URL has a part that no object's name
            can have.
    """
    train, model = (Url.parse(os.fspath(path)) for path in (ckpt_dir, out))
    if train is None or model is None or (train.scheme, train.bucket) != (model.scheme, model.bucket):
        return
    if f"{train.path}/".startswith(f"{model.path}/") or f"{model.path}/".startswith(f"{train.path}/"):
        raise UsageError(
            f"--out {model} and --ckpt-dir {train} lie in each other",
            cause="versions and deltas would lie among the trainer's files",
            hint="name a directory of the model's own",
        )


def data_mode(model: str | os.PathLike[str], asked: DataMode) -> DataMode:
    """Return how values get into a version of a model (path or URL), for the mode that was `asked`.

    In a store AUTO becomes COMPACT, because nothing can link to objects; any other mode is returned as it is.

    Raises:
        UsageError: links are requested for a model in a store.
    """
    if Url.parse(os.fspath(model)) is None or asked not in (DataMode.AUTO, DataMode.LINK):
        return asked
    if asked is DataMode.LINK:
        raise UsageError("--data link goes with a local --out", hint="leave --data out: values are copied")
    return DataMode.COMPACT


@contextmanager
def opened(
    model: str | os.PathLike[str],
    *,
    read_only: bool = False,
    deciding: str = "",
    signing: Signing = UNSIGNED,
    trusting: Trusting = ANYBODY,
) -> Iterator[OpenModel]:
    """Open a model by its path or URL for the block, and yield it. A local path need not exist.

    A URL is shown as a private local directory, which the end of the block removes. With `read_only` nothing
    is written to the URL; otherwise a publication that a killed process has committed is revealed there, and
    without `deciding` this waits up to 75 s for another machine's upload.

    `deciding` is the name of a person's command, which takes precedence over all publishers to the URL. With
    `signing`, publications are signed; with `trusting`, only publications signed by its keys are read. At a
    URL that is opened with a signing key, only this key and the keys of `signing.trust` are trusted.

    Raises:
        UsageError: the URL is a whole bucket, a version, or inside another model; a key cannot be used; the
            library that reads stores is not installed.
        NotTrusted: the identity that a local copy has pinned cannot be read.
        PositionMoved: another machine's upload takes longer, or an object vanished while it was read.
        ExportError: the store cannot be read, or its head is damaged; see errors.py.
        OSError: the private directory cannot be made.
    """
    signer, trust = _signer(signing, model), trust_in(trusting, model)
    if Url.parse(os.fspath(model)) is None:
        with _in_force(Path(model), signer, trust, unsigned=signing.unsigned):
            yield LocalModel(Path(model))
        return
    from exporter.transfer.remote_model import RemoteModel  # with the library that reads stores

    remote = RemoteModel(os.fspath(model), read_only=read_only, deciding=deciding)
    if signer is not None:
        trust = signer.trusting(signing.trust)
    try:
        with _in_force(remote.path, signer, trust, unsigned=signing.unsigned):
            remote.show()
            yield remote
    finally:
        remote.close()


def _signer(signing: Signing, model: str | os.PathLike[str]) -> Signer | None:
    """Return the key that signs the publications of a model; None if they are not signed.

    UsageError if the key cannot be used, or if `signing` has a key and also permits unsigned publications.
    """
    if signing.sign_key is None:
        return None
    if signing.unsigned:
        raise UsageError("--sign-key and --unsigned exclude each other", hint="leave one of them out")
    from exporter.publish.signing import Signer

    return Signer.of(signing.sign_key, signing.signed_as or name_of(model))


def trust_in(trusting: Trusting, model: str | os.PathLike[str]) -> Trust | None:
    """Return the keys trusted to publish a model, by its path or URL; None if all publications are accepted.

    In a local copy, keys without a named identity accept only the identity that is pinned there.

    Raises:
        UsageError: a key cannot be used.
        NotTrusted: the pinned identity cannot be read.
    """
    if not trusting.trust:
        return None
    from exporter.publish.signing import Trust
    from exporter.publish.versions import pinned_identity

    found = Trust.of(trusting.trust, trusting.signed_as or name_of(model))
    if found.identity is None and Url.parse(os.fspath(model)) is None:
        found = replace(found, identity=pinned_identity(Path(model)))
    return found


def name_of(model: str | os.PathLike[str]) -> str:
    """Return the name by which signatures know a model by default: the last part of its path or URL.

    "" for a whole bucket. UsageError if a URL has a part that no object's name can have.
    """
    url = Url.parse(os.fspath(model))
    return os.path.basename(os.path.abspath(model)) if url is None else url.name  # noqa: PTH100, PTH119  `..`


def _in_force(
    model: Path, signer: Signer | None, trust: Trust | None, *, unsigned: bool
) -> AbstractContextManager[None]:
    if signer is None and trust is None and not unsigned:
        return nullcontext()
    from exporter.publish.versions import in_force

    return in_force(model, signer, trust, unsigned=unsigned)


@contextmanager
def opened_if_model(place: str) -> Iterator[OpenModel | None]:
    """Open the model at the URL `place` for reading during the block; yield None if no model is there.

    None, too, if `place` is not a URL of a store, a whole bucket, or the URL of a checkpoint, even if another
    program's file has the name of a head there.

    Raises:
        UsageError: the URL has a part that no object's name can have, or is a version or inside another
            model; or the library that reads stores is not installed.
        ManifestError: the head of the model is damaged.
        ExportError: the store cannot be read; see errors.py.
    """
    url = Url.parse(place)
    if url is None or not url.path:
        yield None
        return
    if not _is_model(url):
        yield None
        return
    with opened(place, read_only=True) as model:
        yield model


def _is_model(url: Url) -> bool:
    """True if the head of a model is at `url`.

    ManifestError if there are versions and their head is damaged, ExportError if the store cannot be read.
    """
    from exporter.storage.objects import ObjectWriter
    from exporter.transfer.head import fetch_head

    store = ObjectWriter(url)
    try:
        return fetch_head(store) is not None
    except ManifestError:
        versions = (path for path in store.directories(url.path) if path.rpartition("/")[2].isdecimal())
        if any(store.look(f"{path}/{MANIFEST_FILE}") is not None for path in versions):
            raise
        return False

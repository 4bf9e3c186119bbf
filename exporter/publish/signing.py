"""Signatures of publications, and the keys that are trusted to sign them.

A manifest that is signed has the SHA-256 of each file of its directory, and ends with the line

    "signature": {"model":"ranker","key":"<id of the key>","ed25519":"<signature>"}}

The signature (Ed25519, RFC 8032) covers these bytes, with a line break between two of them:

    export-model publication 1
    the model's name
    the path below the model: `4200`, or `deltas/<log>/<from>-<to>`
    the manifest without that line: positions, lineage, step, source, options, tensors, every file's SHA-256

So a publication is refused if it was altered, or signed for another place or another model. A name is the
last part of a path, and two models may share it: so the manifest has the model's *identity*, too, a random id
of its first version that all later ones repeat. A copy keeps the identity of its first publication, and
accepts no other (`exporter.transfer.pull`); `NAME@IDENTITY` names one. Earlier releases gave models no
identity. Holds and a store's head are not signed (`exporter.transfer.pull` says how they are treated).

Publishing to a store also reads from it: deltas to merge, values to restore. So that nobody else's bytes are
signed on, only the publisher's own key is trusted there, and the keys that `--trust` names.

Callers say which key signs and which keys are trusted for a model, and for how long: `in_force` of
`exporter.publish.versions`. Every publication passes `signer_of` before it is renamed into place, and every
manifest that is read passes `require_trusted`; without keys in force this module is not imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from exporter.errors import ManifestError, NotTrusted, UsageError, VerificationError, to_install
from exporter.jobs.runner import Runner
from exporter.jobs.task import Digest, Input
from exporter.publish.manifest import FileEntry, Manifest, Signature, head_from_json, to_json
from exporter.storage import mirror
from exporter.storage.files import (
    SETTLED_NS,
    FileIdentity,
    Unchanged,
    file_digest,
    identity_of,
    read_regular,
)
from exporter.storage.local_paths import quoted
from exporter.storage.waiting import workers
from exporter.wire.json_documents import DocumentError, decode, encode

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_BEGINNING = "export-model publication 1"
# As `manifest._text` joins fields. No value holds this, since JSON escapes line breaks.
_LAST_LINE = b',\n "signature": '
_LONGEST_LINE = 4096  # a name of 255 characters takes 3,060 bytes in ASCII, the rest about 200
_LONGEST_KEYS = 64 << 10
_LONGEST_NAME = 255
_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s.*?-----END \1-----", re.DOTALL)
_READERS = 4
_PIECE = 64 << 20
TO_MAKE_KEYS = "make one: openssl genpkey -algorithm ed25519 -out KEY"


class Signer:
    """A private key that signs a model's publications."""

    def __init__(self, model: str, key: Ed25519PrivateKey, identity: str | None = None) -> None:
        self.model, self._key, self.identity = model, key, identity
        self.key_id = _id_of(key.public_key())

    @classmethod
    def of(cls, source: str, model: str) -> Signer:
        """The signer of publications of `model`, with the private key (PEM, PKCS #8) in a file or a variable.

        `source` is the file's path, or `env:NAME`. `model` is the model's name, or NAME@IDENTITY.

        Raises:
            UsageError: there is no key, it is of another kind, others may read the file, the model's name
                is invalid, or the library is not installed.
            LfsPointer: the file is a pointer of Git LFS.
        """
        name, identity = _named(model)
        return cls(name, _private_key(source), identity)

    def require(self, identity: str | None, where: object) -> None:
        """Refuse to sign publications of another identity than the signer's own.

        A signer without an identity accepts any.

        Raises:
            NotTrusted: `identity` differs, or is None; `where` is named in the message.
        """
        if self.identity not in (None, identity):
            raise NotTrusted(
                f"{where} is the model {identity or 'without an identity'}, expected {self.identity}",
                hint=f"find out who wrote there; or leave the identity out: --signed-as {quoted(self.model)}",
            )

    def trusting(self, files: Iterable[str | Path]) -> Trust:
        """Return the trust in this signer's key and in the public keys (PEM) in some files.

        A publisher accepts no others.

        Raises:
            UsageError: a file cannot be read or holds anything but public keys.
            LfsPointer: a file is a pointer of Git LFS.
        """
        found = Trust(tuple(map(Path, files)), self.model, self._key.public_key(), self.identity)
        # reads the files now: a wrong one is an error of the command line, not of a later reading
        found.keys()
        return found

    def __repr__(self) -> str:
        return f"Signer({self.model!r}, {self.key_id!r})"

    def signed(self, manifest: Manifest, path: str) -> Manifest:
        """Return the manifest with its signature for `path`, the publication's path below the model."""
        said = _message(self.model, path, to_json(manifest).encode("ascii"))
        return replace(manifest, signature=Signature(self.model, self.key_id, self._key.sign(said).hex()))


class Trust(Struct, frozen=True):
    """The public keys that are trusted to publish a model, by their files, which may change at any time."""

    files: tuple[Path, ...]
    model: str
    own: Any = None
    """A public key that is trusted, too."""
    identity: str | None = None
    """The identity of the only model that is accepted; None: any model of that name."""

    @classmethod
    def of(cls, files: Iterable[str | Path], model: str) -> Trust:
        """The trust in the public keys (PEM) in some files, each with one key or several, to publish `model`.

        `model` is the model's name, or NAME@IDENTITY, which accepts no other identity.

        Raises:
            UsageError: a file cannot be read or holds anything but public keys, the library is not
                installed, or the model's name is invalid.
            LfsPointer: a file is a pointer of Git LFS.
        """
        name, identity = _named(model)
        found = cls(tuple(map(Path, files)), name, identity=identity)
        # reads the files now, as in `Signer.trusting`
        found.keys()
        return found

    def keys(self) -> dict[str, Ed25519PublicKey]:
        """Return the public keys by their ids, read from the files again if these have changed.

        Raises:
            UsageError: a file cannot be read or holds anything but public keys, or the library is not
                installed.
            LfsPointer: a file is a pointer of Git LFS.
        """
        found = {} if self.own is None else {_id_of(self.own): self.own}
        for file in self.files:
            found.update(_public.of(file, _public_keys))
        return found

    def check(self, content: bytes, path: str, where: object) -> None:
        """Refuse a manifest that no trusted key has signed for this model and for `path` below the model.

        `content` is the manifest's file, `where` names it in errors. If no key is trusted, all are refused. A
        delta may lack its model's identity: the lineage of its base is enough.

        Raises:
            NotTrusted: it is not signed, or by another key, for another model or path, or it was altered;
                or it is a version of a model with another identity, or without one.
            UsageError: a file of keys cannot be read or holds anything but public keys, or the library is
                not installed.
        """
        keys = self.keys()
        manifest, mark, line = content.rpartition(_LAST_LINE)
        if not mark:
            raise NotTrusted(f"{where} is not signed", cause=f"trusted are {_listed(keys)}")
        signature = _signature(line, where)
        if signature.model != self.model:
            raise NotTrusted(
                f"{where} is signed as a publication of {signature.model!r}, expected {self.model!r}",
                hint=f"if this is the model that is meant: --signed-as {quoted(signature.model)}",
            )
        key = keys.get(signature.key)
        if key is None:
            raise NotTrusted(
                f"{where} is signed by the key {signature.key}, which is not trusted",
                cause=f"trusted are {_listed(keys)}",
            )
        from cryptography.exceptions import InvalidSignature

        said = _message(self.model, path, manifest + b"}\n")
        try:
            key.verify(bytes.fromhex(signature.ed25519), said)
        except InvalidSignature:
            raise NotTrusted(
                f"the signature of {where} does not fit",
                cause="the manifest was altered, or it was signed for another place",
                hint="publish a new base (--new-base always --again --sign-key); and find out who writes "
                "there",
            ) from None
        # after the signature: until then nobody has said what the manifest says
        self._check_identity(content, path, where)

    def _check_identity(self, content: bytes, path: str, where: object) -> None:
        if self.identity is None:
            return
        try:
            found = head_from_json(content).identity
        except ManifestError as error:
            raise NotTrusted(f"{where} has a damaged manifest", cause=error.cause) from None
        if found == self.identity or (found is None and not path.isdecimal()):
            return
        if found is None:
            from exporter.publish.kept_export import export_kept_of  # late: it is rarely asked for

            again = export_kept_of(str(where).rpartition("/")[0])
            raise NotTrusted(
                f"{where} does not say of which model it is, expected {self.identity}",
                cause="an earlier release has published it, maybe for another model of this name",
                # A merger may have nothing to merge: no delta need follow this base.
                hint="publish a base with this release: "
                f"{again or 'the same export with --new-base always --again --sign-key'}",
            )
        raise NotTrusted(
            f"{where} is of another model {self.model!r}: {found}, expected {self.identity}",
            cause="one that was begun anew in its place, or elsewhere",
            hint="find out who wrote it, and remove it; if this is the model that is meant: --signed-as "
            f"{quoted(f'{self.model}@{found}')}",
        )


def with_digests(directory: Path, files: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    """Return the entries of files in a staged directory with the SHA-256 of each, in the same order.

    All files are read, several at a time. OSError if one cannot be read, CheckpointError if an object of a
    store cannot.
    """
    files = tuple(files)
    paths, size = [directory / file.path for file in files], sum(file.bytes_ for file in files)
    digests = _digests(paths, size, _digest)
    return tuple(replace(file, sha256=digest) for file, digest in zip(files, digests, strict=True))


def verify_digests(
    directory: Path, files: Iterable[FileEntry], *, anew: bool = False, runner: Runner | None = None
) -> None:
    """Read each of a directory's files that has a SHA-256 in the manifest, and compare it.

    With `anew` also those are read whose digest this process knows: their times may have been set back. With
    `runner`, its tasks read them, each anew. This waits for all of them.

    Raises:
        VerificationError: one differs.
        OSError, CheckpointError: one cannot be read.
        EngineFailed, PublishError: the engine of `runner` failed, or its job cannot be written.
        UsageError: the URL below which `runner` keeps jobs cannot be used.
    """
    files = [file for file in files if file.sha256 is not None]
    paths, size = [directory / file.path for file in files], sum(file.bytes_ for file in files)
    if runner is None:
        digests = _digests(paths, size, file_digest if anew else _digest)
    else:
        names = (f"{number}" for number in range(len(files)))
        tasks = [
            Digest(name=name, inputs=(Input.of(path),), bytes_=file.bytes_)
            for name, path, file in zip(names, paths, files, strict=True)
        ]
        with runner.job(tasks) as job:
            digests = [receipt.tag for receipt in job.receipts()]
    for file, digest in zip(files, digests, strict=True):
        if digest != file.sha256:
            raise VerificationError(
                f"{directory / file.path} has SHA-256 {digest}, expected {file.sha256}",
                cause="it is not what was signed, or published",
                hint="remove that directory and fetch it again; where it was made, publish it again",
            )


def _digests(paths: list[Path], size: int, digest: Callable[[Path], str]) -> list[str]:
    if size < _PIECE or len(paths) < 2:
        return [*map(digest, paths)]
    with workers(_READERS, "sha256") as pool:
        return list(pool.map(digest, paths))


def _digest(path: Path) -> str:
    """The SHA-256 of a file; of a pinned object, or a file with a second link, it is computed once and kept.

    The second link is the trainer's. Later reads of an object get the version that was listed. OSError or
    CheckpointError if the file cannot be read.
    """
    if (stored := mirror.pinned(path)) is not None:
        is_pinned = stored[1].tag is not None
        return _known.get(stored) or _kept(stored if is_pinned else None, _passing_digest(path))
    found = path.stat()
    if found.st_nlink == 1:
        return file_digest(path)
    # before the file is read, and compared again after it
    looks = FileIdentity.of(found)
    if (known := _known.get(looks)) is not None:
        return known  # if the file changed unnoticed, readers refuse its bytes: nothing wrong is accepted
    digest = file_digest(path)
    is_settled = identity_of(path) == looks and time.time_ns() - looks.modified_ns >= SETTLED_NS
    return _kept(looks if is_settled else None, digest)


_known: dict[object, str] = {}
_MOST_KNOWN = 4096


def _kept(of: object, digest: str) -> str:
    """Remember the digest of a file or an object, by its identity `of` (not if that is None), and return it.

    At most `_MOST_KNOWN` are remembered.
    """
    if of is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[of] = digest
    return digest


def _passing_digest(path: Path) -> str:
    """Return the SHA-256 of an object in a store, by its file in a mirror; its bytes are not kept on disk.

    CheckpointError if the object cannot be fetched, OSError if the mirror's file is gone.
    """
    digest, size = hashlib.sha256(), path.stat().st_size
    for start in range(0, size, _PIECE):
        stop = min(start + _PIECE, size)
        passing, left = mirror.copy(path, start, stop), stop - start
        with passing or path.open("rb") as file:
            file.seek(0 if passing else start)
            while left and (block := file.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()


def _message(model: str, path: str, manifest: bytes) -> bytes:
    return b"\n".join([f"{_BEGINNING}\n{model}\n{path}".encode(), manifest])


def _signature(line: bytes, where: object) -> Signature:
    """Return the signature in a manifest's last line; `where` names the publication in errors.

    NotTrusted unless the line is exactly as this program writes it.
    """
    try:
        if len(line) > _LONGEST_LINE:
            raise DocumentError(f"it has {len(line)} bytes")
        found: Signature = decode(line.removesuffix(b"}\n"), Signature, "signature", written=encode)
        # byte for byte, as a signature does not cover its own line: nothing else may stand there
        if encode(found) + b"}\n" != line:
            raise DocumentError("it is not the last line")
    except DocumentError as error:
        raise NotTrusted(f"the signature of {where} is damaged", cause=str(error)) from None
    return found


def _named(model: str) -> tuple[str, str | None]:
    """Return a model's name, and the identity in `NAME@IDENTITY` (32 hex digits; None without one).

    UsageError if the name is empty, too long or not printable.
    """
    found = re.fullmatch(r"(.+)@([0-9a-f]{32})", model)
    name, identity = (model, None) if found is None else (found[1], found[2])
    # printable: the name is a line of the signed text, and must not hold a line break
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise UsageError(f"--signed-as {model[:60]!r} is not a model's name", hint="as in --signed-as ranker")
    return name, identity


def _private_key(source: str) -> Ed25519PrivateKey:
    serialization, private, _ = _library()
    content = _secret(source)
    try:
        key = serialization.load_pem_private_key(content, None)
    except TypeError:
        raise UsageError(
            f"--sign-key {source} is locked with a password",
            hint="unlock it into a file that this user alone may read: openssl pkey -in LOCKED -out KEY",
        ) from None
    except Exception:  # noqa: BLE001 - whatever the library says of a secret is not repeated
        raise UsageError(f"--sign-key {source} holds no private key in PEM", hint=TO_MAKE_KEYS) from None
    if not isinstance(key, private):
        raise UsageError(f"--sign-key {source} is not an Ed25519 key, but {_kind(key)}", hint=TO_MAKE_KEYS)
    return key


def _secret(source: str) -> bytes:
    if "PRIVATE KEY" in source:
        raise UsageError(
            "--sign-key was given a key itself, which other programs can see there",
            hint="replace that key, and name its file, or a variable that holds it: --sign-key env:NAME",
        )
    name = source.removeprefix("env:")
    if name != source:
        if not (text := os.environ.get(name, "")):
            raise UsageError(
                f"--sign-key {source}: there is no such variable",
                hint=f"export it with the key, or name the key's file: --sign-key {name.lower()}.key",
            )
        return text.encode()
    path = Path(source)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        content = read_regular(path, _LONGEST_KEYS)
    except OSError as error:
        raise UsageError(
            f"--sign-key {source} cannot be read", cause=error.strerror or str(error), hint=TO_MAKE_KEYS
        ) from None
    # the group may read it, not write it; all others may do nothing
    if mode & 0o027 and b"PRIVATE KEY" in content:
        raise UsageError(
            f"--sign-key {source} has mode {mode:04o}: others than its owner and group may use it",
            hint=f"chmod 600 {quoted(source)}, and replace the key if others had access: it publishes models",
        )
    return content


_public: Unchanged[Mapping[str, Ed25519PublicKey]] = Unchanged()


def _public_keys(path: Path) -> Mapping[str, Ed25519PublicKey]:
    serialization, _, public = _library()
    hint = "it holds public keys in PEM: openssl pkey -in {} -pubout -out {}"
    new = path.with_name(f"{path.name}.pem")  # never over what is there, which may be the only secret
    try:
        content = read_regular(path, _LONGEST_KEYS)
    except OSError as error:
        raise UsageError(
            f"--trust {path} cannot be read",
            cause=error.strerror or str(error),
            hint=hint.format("KEY", quoted(path if isinstance(error, FileNotFoundError) else new)),
        ) from None
    hint = hint.format(quoted(path) if b"PRIVATE KEY" in content else "KEY", quoted(new))
    found = {}
    for block in _PEM.finditer(content):
        if block[1] != b"PUBLIC KEY":
            what = block[1].decode("ascii").lower()
            raise UsageError(f"--trust {path} holds a block {what!r}, which readers must not have", hint=hint)
        try:
            key = serialization.load_pem_public_key(block[0])
        except Exception as error:  # noqa: BLE001 - the library has a dozen kinds
            raise UsageError(
                f"--trust {path} holds a key that cannot be read", cause=str(error), hint=hint
            ) from None
        if not isinstance(key, public):
            raise UsageError(f"--trust {path} holds a key that is not Ed25519, but {_kind(key)}", hint=hint)
        found[_id_of(key)] = key
    if not found:
        raise UsageError(f"--trust {path} holds no public key", hint=hint)
    return found


def _kind(key: object) -> str:
    return re.sub(r"^_|(Private|Public)Key$", "", type(key).__name__)


def _id_of(key: Ed25519PublicKey) -> str:
    serialization, _, _ = _library()
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()[:32]


def _listed(keys: Iterable[str]) -> str:
    return "the keys " + ", ".join(sorted(keys))


def _library() -> tuple[Any, type[Ed25519PrivateKey], type[Ed25519PublicKey]]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise UsageError(
            "signatures need the library cryptography, which is not installed", hint=to_install("signing")
        ) from None
    return serialization, ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey

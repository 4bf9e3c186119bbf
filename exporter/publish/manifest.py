"""`manifest.json`: the contents and the position of a published directory. Written last, read without trust.

    {"format_version": 1, "kind": "base", "position": 4200, "step": 4200, "lineage": null,
     "schema_digest": "<sha256>",
     "source": {"directory": "run7", "checkpoint": "model.ckpt-4200", "digest": "<sha256>"},
     "created": "2025-01-31T09:30:00.000000Z", "exporter": "0.1.0",
     "tensors": [{"name": "w", "dtype": "float32", "shape": [3, 2], "bytes": 24, "crc32c": ["9a4f01c2"]}],
     "files": [{"path": "saved_model.pb", "bytes": 812, "crc32c": "00c0ffee"}]}

A delta has `from_position`, too. A base that takes deltas, and a delta, have `incremental`: their place in
their log, and the trainer's state. A version that a rollback or resumption published again has `taken_back`;
one whose tables servers map has `mapped`.

A version made from a checkpoint has `plan_digest`, the digest of its plan (`exporter.pipeline.full`). Every
`crc32c` is TensorFlow's masked one, as in the bundle's index, in eight hex digits; a tensor has one for each
of its slices; a data shard has none, because its tensors have theirs. A manifest that is signed ends with
`signature` (`exporter.publish.signing`); its files have a `sha256`, too.

Integers are integers below 2**63, digests and ids strings, times RFC 3339 in UTC. Readers ignore fields that
they do not know and refuse a `format_version` that they do not know.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import asdict, fields

from exporter.catalog import Catalog, TensorRef
from exporter.delta.deviation import Budgeted, Rounded, WildRows
from exporter.delta.format import Schema
from exporter.errors import ManifestError, SchemaChanged
from exporter.graph.origin import GraphOrigin
from exporter.increments.trained import TrainerVersion
from exporter.mapping.mapping_spec import MappingSpec
from exporter.newer_python import StrEnum
from exporter.options import Updates, option_of
from exporter.publish.served_check import Stored, require_fitting, resolved
from exporter.storage.layout import MANIFEST_FILE, VARIABLES_DIRECTORY, flaw_of
from exporter.storage.local_paths import quoted
from exporter.wire.json_documents import (
    Count,
    Crc,
    DocumentError,
    DtypeLabel,
    Id,
    Release,
    Sha256,
    Shape,
    Text,
    decode,
    decode_head,
    doc,
    encode,
    encode_lines,
    format_version,
)


class DeltaOrigin(StrEnum):
    """The operation that made a delta."""

    INCREMENTS = "increments"
    COMPARISON = "comparison"
    MERGE = "merge"
    ROLLBACK = "rollback"
    RESUME = "resume"


class BaseEntry(
    Struct,
    frozen=True,
    omit_defaults=True,
    dict=True,
    rename={"schema_rows": "schema", "origin": "graph"},
):
    """`incremental` in the manifest of a base that takes deltas."""

    log: Annotated[Count, doc("the position of the base that its log began with")]
    trained: Annotated[TrainerVersion, doc("the trainer's state that it serves")]
    schema_rows: Annotated[list[list[Any]], doc("name, dtype, shape and kind of each served variable")]
    recipe: Annotated[MappingSpec, doc("how the next delta is made from a checkpoint")]
    updates: Annotated[Updates, doc("how its graph takes deltas")]
    state: Annotated[Id | None, doc("the id of the state from which it was merged")] = None
    origin: Annotated[GraphOrigin | None, doc("the source of its graph; absent: not recorded")] = None

    @classmethod
    def of(
        cls, log: int, schema: Schema, mapping_spec: MappingSpec, trained: TrainerVersion, updates: Updates
    ) -> BaseEntry:
        """The entry of a base that begins the log with the number `log`, which is the base's position.

        `schema` describes the served variables, `mapping_spec` is the recipe by which deltas are made,
        `trained` the trainer's state that the base serves, and `updates` the options of its graph.
        """
        return cls(log, trained, schema.to_json(), mapping_spec, updates)

    @cached_property
    def schema(self) -> Schema:
        """The served variables, as deltas hold them; DocumentError if `schema_rows` is not a schema."""
        try:
            return Schema.from_json(self.schema_rows)
        except ValueError as error:
            raise DocumentError(f"manifest.incremental.schema: {error}") from error

    @cached_property
    def mapping_spec(self) -> MappingSpec:
        """The recipe by which the next delta is made from a checkpoint.

        A recipe of an earlier release, which has only the rules, is completed. DocumentError if `schema_rows`
        is not a schema.
        """
        return resolved(self.recipe, self.schema)

    def check_updates(self, given: Updates | None) -> None:
        """Raise SchemaChanged if a later command line gives update options that differ from the base's.

        None, or only default values, are always accepted.
        """
        if given is None or given == Updates():
            return
        was, now = asdict(self.updates), asdict(given)
        differing = {option_of(Updates, name): name for name in was if was[name] != now[name]}
        if differing:
            raise SchemaChanged(
                "the base was exported with other update options",
                cause="; ".join(
                    f"{option} was {_as_typed(was[name])}, is {_as_typed(now[name])}"
                    for option, name in differing.items()
                ),
                hint=f"give {' and '.join(differing)} as it was, or {SchemaChanged.default_hint}",
            )


def _as_typed(value: object) -> str:
    """An option's value as text; for a flag "given" or "not given"."""
    return {True: "given", False: "not given"}[value] if isinstance(value, bool) else str(value)


def _always_written(default: Any) -> Any:
    """A msgspec field with a default value that is written although `omit_defaults` is set.

    Older releases require such fields.
    """
    # `omit_defaults` omits plain defaults only, never values of a factory.
    return field(default_factory=lambda: default)


class DeltaEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A delta's place in its log.

    `rounded` counts the rows of this delta; `trained.rounded` counts those of all deltas so far. Earlier
    releases wrote no `before`: it is where their delta begins. See `Manifest.state_id` for `state`.
    """

    log: Annotated[Count, doc("the position of the base that its log began with")]
    schema: Annotated[Id, doc("the digest of the log's schema")]
    made: Annotated[DeltaOrigin, doc("how it came to be")]
    rows: Annotated[Count, doc("rows of all tables together")]
    parts: Annotated[Count, doc("the number of publications in it")] = _always_written(1)
    only_from: Annotated[bool, doc("true: it applies at its first position only")] = _always_written(False)
    back_to: Annotated[Count | None, doc("the position whose values came back; null: none")] = (
        _always_written(None)
    )
    before: Annotated[Count | None, doc("of a rollback: the position to which resuming returns")] = None
    state: Annotated[Id | None, doc("of a merger: the id of the state at its end")] = None
    reason: Annotated[str | None, doc("of a rollback: the reason; null or absent: none was given")] = None
    canary: Annotated[bool, doc("of a rollback: resuming returns the log to a canary")] = False
    failed: Annotated[bool, doc("of a rollback: a canary made it, rejecting the values before")] = False
    finite: Annotated[bool, doc("true: it was checked, and has neither NaN nor infinity")] = False
    rounded: Annotated[Rounded | None, doc("rows that were rounded for it; null: none")] = _always_written(
        None
    )
    budget: Annotated[Budgeted | None, doc("its use of the budget; absent: it had none")] = None
    wild: Annotated[tuple[WildRows, ...], doc("rows beyond `--max-norm`, by table; absent: none")] = ()
    trained: Annotated[TrainerVersion, doc("the trainer's state at its end")]


FORMAT_VERSION = 1
Time = Annotated[str, Meta(pattern=r"^[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}(\.[0-9]{6})?Z$(?!\n)")]


class TensorEntry(Struct, frozen=True, rename={"bytes_": "bytes"}):
    """A tensor as served."""

    name: Annotated[Text, doc("its name in the bundle")]
    dtype: Annotated[DtypeLabel, doc("TensorFlow's name of its dtype")]
    shape: Annotated[Shape, doc("its shape")]
    bytes_: Annotated[Count, doc("its size in bytes")]
    crc32c: Annotated[tuple[Crc, ...], doc("the masked checksum of each stored run of bytes, in hex")]

    @classmethod
    def of(cls, ref: TensorRef) -> TensorEntry:
        """The manifest's entry for a tensor in a published bundle's catalog."""
        crcs = tuple(f"{part.crc32c:08x}" for part in ref.extents)
        return cls(ref.name, ref.dtype.label, ref.shape, ref.bytes_, crcs)


_INODE_BITS = (1 << 63) - 1  # the manifest's integers are below 2**63


class LinkedFile(Struct, frozen=True):
    """A file with another link elsewhere (a trainer's shard), with its status when it was published."""

    inode: Annotated[Count, doc("its inode; a copy has another one, and the trainer does not write to it")]
    links: Annotated[Count, doc("its number of links")]
    mtime_ns: Annotated[int, doc("when it was last written, in nanoseconds since 1970")]
    ctime_ns: Annotated[int, doc("when it, or its links, last changed, in nanoseconds since 1970")]

    @classmethod
    def of(cls, found: os.stat_result) -> LinkedFile:
        """The record of a file, by its status as `stat` returns it."""
        return cls(found.st_ino & _INODE_BITS, found.st_nlink, found.st_mtime_ns, found.st_ctime_ns)

    def is_written(self, found: os.stat_result) -> bool:
        """True if the file with status `found` is the recorded one and its modification time has changed.

        False for a copy, which is another file.
        """
        return found.st_ino & _INODE_BITS == self.inode and found.st_mtime_ns != self.mtime_ns

    def may_be_written(self, found: os.stat_result) -> bool:
        """True as `is_written`; also if the recorded file's inode changed without losing or getting a link.

        `found` is the status of the file now.
        """
        # Trainers prune, and several versions link one shard: both change `ctime`, and no byte. Otherwise it
        # may be a write after which the time was set back, as `rsync -t` does.
        now = LinkedFile.of(found)
        is_changed = now.ctime_ns != self.ctime_ns and now.links == self.links
        return self.is_written(found) or (now.inode == self.inode and is_changed)


class FileEntry(Struct, frozen=True, omit_defaults=True, rename={"bytes_": "bytes"}):
    """A file of the published directory."""

    path: Annotated[Text, doc("below the directory, with /")]
    bytes_: Annotated[Count, doc("its length")]
    crc32c: Annotated[Crc | None, doc("its masked checksum, in hex; null: its tensors have theirs")] = (
        _always_written(None)
    )
    sha256: Annotated[Sha256 | None, doc("its digest; absent: it is not signed")] = None
    linked: Annotated[LinkedFile | None, doc("its status when published, if it is a trainer's, too")] = None

    def is_written(self, directory: Path, *, for_sure: bool = True) -> bool:
        """True if the trainer has a link to this published file, too, and wrote to it since publication.

        `directory` is the published one. Judged by the file's size and times, which a program may set; with
        `for_sure` false, also True if it may have been written to. False if the file cannot be looked at.
        """
        if self.linked is None:
            return False
        try:
            found = (directory / self.path).stat()
        except OSError:
            return False
        if found.st_size != self.bytes_:
            return found.st_ino & _INODE_BITS == self.linked.inode
        return self.linked.is_written(found) or (not for_sure and self.linked.may_be_written(found))


class Signature(Struct, frozen=True):
    """A signature of a manifest, made by a publisher's key for its path below the model."""

    model: Annotated[Text, doc("the model's name, which it covers with the path and all above it")]
    key: Annotated[Id, doc("the id of the key: SHA-256 of the public key's DER, its first 32 digits")]
    ed25519: Annotated[str, Meta(pattern=r"^[0-9a-f]{128}$(?!\n)"), doc("the signature (RFC 8032), in hex")]


class Origin(Struct, frozen=True, omit_defaults=True):
    """The checkpoint that was exported, without the rest of its path, which is the trainer's own business."""

    directory: Annotated[Text, doc("the name of the directory it was in")]
    checkpoint: Annotated[Text, doc("its prefix, without the path")]
    digest: Annotated[Sha256 | None, doc("distinguishes it from others of its name; a delta has none")] = None

    @classmethod
    def of(cls, prefix: Path, digest: str | None = None) -> Origin:
        """The origin for the path prefix of a checkpoint.

        `digest` tells it from others of that name (None: a delta's).
        """
        directory = os.fsencode(prefix.absolute().parent.name)
        return cls(directory.decode(errors="backslashreplace"), prefix.name, digest)  # it need not be UTF-8


class RestoredValues(Struct, frozen=True, omit_defaults=True):
    """A rollback or resumption that published a version again, and the position whose values it restored."""

    made: Annotated[Literal["rollback", "resume"], doc("which of the two")]
    back_to: Annotated[Count, doc("the version or position whose values came back")]
    before: Annotated[Count, doc("the one to which resuming returns, or that a resumption followed")]
    reason: Annotated[str | None, doc("the reason, in words; absent: none was given")] = None


class MappedTable(Struct, frozen=True, omit_defaults=True, rename={"bytes_": "bytes"}):
    """A variable that servers map."""

    name: Annotated[Text, doc("its name as served, with its slice if it is a part")]
    file: Annotated[Text, doc("the shard in `variables/` that holds it alone, hot rows included")]
    bytes_: Annotated[Count, doc("its length")]
    overlay_rows: Annotated[
        Count | None, doc("the number of changed rows that fit in its overlay; absent: it takes no deltas")
    ] = None
    hot_rows: Annotated[
        Count, doc("the number of its rows stored again at its end, the most read first; absent: none")
    ] = 0
    places: Annotated[Text, doc("the shard in `variables/` with the places of hot rows; absent: none")] = ""


class UnmappedTable(Struct, frozen=True, rename={"bytes_": "bytes"}):
    """A large variable that servers read into memory, although tables were to be mapped."""

    name: Annotated[Text, doc("its name in the bundle")]
    bytes_: Annotated[Count, doc("its size in bytes")]
    why: Annotated[str, doc("the reason why it is not mapped, in words")]


class MappedRecord(Struct, frozen=True):
    """The tables of a version that servers map, and the directory from which they map them."""

    id: Annotated[str, doc("the content of `variables/mapped.id`; empty: no table is mapped")]
    directory: Annotated[
        Text, doc("the version's path as servers see it, by the graph; elsewhere tables are restored")
    ]
    tables: Annotated[tuple[MappedTable, ...], doc("the mapped tables")]
    restored: Annotated[tuple[UnmappedTable, ...], doc("large variables that are not")] = ()


class MergedPart(Struct, frozen=True):
    """A publication that a base was merged from."""

    path: Annotated[Text, doc("below the model")]
    manifest: Annotated[Sha256, doc("the SHA-256 of its `manifest.json`")]


class MergedFrom(Struct, frozen=True):
    """The publications from which a base was merged; merging them again anywhere gives the same files."""

    parts: Annotated[tuple[MergedPart, ...], doc("the base, and the deltas on top of it, oldest first")]
    task_bytes: Annotated[Count, doc("about what one task read; large tables are divided by it")]


class ManifestDraft(Struct, frozen=True, kw_only=True):
    """The fields of a manifest that are known before the publication has a position and its final files.

    A delta has `from_position`, a version does not.
    """

    tensors: tuple[TensorEntry, ...]
    source: Origin
    exporter: str
    step: int | None = None
    lineage: str | None = None
    identity: str | None = None
    from_position: int | None = None
    incremental: BaseEntry | DeltaEntry | None = None
    taken_back: RestoredValues | None = None
    plan_digest: str | None = None
    tensorflow: str | None = None
    mapped: MappedRecord | None = None
    for_server: str | None = None
    oldest_server: str | None = None
    opened_batch: int | None = None
    merged_from: MergedFrom | None = None

    def complete(
        self, *, position: int, created: datetime, files: tuple[FileEntry, ...], publisher: str | None = None
    ) -> Manifest:
        """Return the manifest to publish: this draft with the given fields.

        `publisher` is `user@machine` or None.
        """
        return Manifest(**asdict(self), position=position, created=created, files=files, publisher=publisher)


class Manifest(ManifestDraft, frozen=True, kw_only=True):
    """The contents of a published directory. `position` is a reader's after loading or applying it."""

    position: int
    created: datetime
    files: tuple[FileEntry, ...]
    publisher: str | None = None
    signature: Signature | None = None

    def __repr__(self) -> str:
        return f"Manifest(position={self.position}, step={self.step}, tensors={len(self.tensors)})"

    @property
    def bytes_(self) -> int:
        """The number of bytes of all listed files; the manifest itself is not one of them."""
        return sum(file.bytes_ for file in self.files)

    def overwritten(self, version: Path) -> list[Path]:
        """The paths of the files in the directory `version` that the trainer also links and wrote to since.

        They are judged by their sizes and times; files that cannot be looked at are left out.
        """
        return [version / file.path for file in self.files if file.is_written(version)]

    @property
    def schema_digest(self) -> str:
        """The SHA-256 (lower-case hex) of the tensors' names, dtypes and shapes."""
        return schema_digest(self.tensors)

    @property
    def state_id(self) -> str:
        """An id (32 hex digits) of the values at the manifest's position, by their checksums and their time.

        So it differs if other values were published there before. A merger of deltas, or of a base and
        deltas, has the id of the delta whose values it has.
        """
        if self.incremental is not None and self.incremental.state is not None:
            return self.incremental.state
        # ids are in later manifests and in names of caches: another formula would not find them again
        crcs = [[int(crc, 16) for crc in tensor.crc32c] for tensor in self.tensors]
        return hashlib.sha256(encode([self.created.isoformat(), crcs])).hexdigest()[:32]


class _LogOf(Struct, frozen=True):
    log: Count


class ManifestHead(Struct, frozen=True, rename={"created_text": "created"}):
    """The first fields of a manifest: position, time, checkpoint, log, plan and identity.

    `plan_digest` is None if it was not recorded, `identity` if an earlier release published it.
    """

    position: Count
    created_text: Time
    source: Origin
    incremental: _LogOf | None = None
    plan_digest: Sha256 | None = None
    identity: Id | None = None

    @property
    def created(self) -> datetime:
        """The time of publication.

        DocumentError if its text has the form of a time and is none, which `head_from_json` refuses.
        """
        return _created(self.created_text)

    @property
    def log(self) -> int | None:
        """The position with which the log of a base or delta began; None for a version without deltas."""
        return None if self.incremental is None else self.incremental.log


class _Document(Struct, frozen=True, kw_only=True, tag_field="kind"):
    format_version: Annotated[Count, doc("of this document: 1")] = FORMAT_VERSION
    position: Annotated[Count, doc("the position of a reader that has loaded or applied it")]
    step: Annotated[Count | None, doc("the training step of its values; null: not known")]
    lineage: Annotated[Text | None, doc("the random id of its log; null: it takes no deltas")]
    schema_digest: Annotated[Text, doc("SHA-256 of the names, dtypes and shapes of `tensors`")]
    source: Annotated[Origin, doc("the checkpoint from which it was made")]
    created: Annotated[Time, doc("when it was published, in UTC")]
    exporter: Annotated[Text, doc("the version of this program that published it")]
    tensors: Annotated[tuple[TensorEntry, ...], doc("the tensors in its bundle")]
    files: Annotated[tuple[FileEntry, ...], doc("every file of the directory except this one")]
    identity: Annotated[
        Id | None, doc("the random id of its model, set by its first base; absent: of an earlier release")
    ] = None
    signature: Annotated[Signature | None, doc("of all fields above; absent: it is not signed")] = None


class VersionDocument(_Document, frozen=True, kw_only=True, tag="base"):
    """`<model>/<version>/manifest.json`."""

    publisher: Annotated[Text | None, doc("who published it: `user@machine`; absent: not known")] = None
    incremental: Annotated[BaseEntry | None, doc("how it takes deltas; absent: it takes none")] = None
    taken_back: Annotated[
        RestoredValues | None, doc("the rollback or resumption that made it; absent: none")
    ] = None
    plan_digest: Annotated[Sha256 | None, doc("a digest of the graph and options it was made by")] = None
    tensorflow: Annotated[Text | None, doc("the version of TensorFlow that made it; absent: none ran")] = None
    mapped: Annotated[MappedRecord | None, doc("the tables that servers map; absent: not asked for")] = None
    for_server: Annotated[Release | None, doc("the TensorFlow of the servers for which it was made")] = None
    oldest_server: Annotated[Release | None, doc("the oldest TensorFlow whose servers load it")] = None
    opened_batch: Annotated[
        Count | None, doc("training's batch size, if an experiment made its numbers follow each request")
    ] = None
    merged_from: Annotated[MergedFrom | None, doc("what it was merged from; absent: it was not")] = None


class DeltaDocument(_Document, frozen=True, kw_only=True, tag="delta"):
    """`<model>/deltas/<log>/<from>-<to>/manifest.json`."""

    from_position: Annotated[Count, doc("the first position to which it applies")]
    publisher: Annotated[Text | None, doc("who published it: `user@machine`; absent: not known")] = None
    incremental: Annotated[DeltaEntry | None, doc("its place in its log")] = None
    plan_digest: Annotated[Sha256 | None, doc("a digest of the graph and options it was made by")] = None


Document: TypeAlias = VersionDocument | DeltaDocument


def overwritten_notes(manifest: Manifest, version: Path) -> tuple[str, ...]:
    """A warning, in a tuple, if the trainer wrote into files of the version in a directory; else ()."""
    written = manifest.overwritten(version)
    if not written:
        return ()
    look = f"export-model verify {quoted(version.parent)}"
    return (f"{written[0]} {OVERWRITTEN}: servers that load it may fail or answer wrongly; see {look}",)


OVERWRITTEN = "was written to after it was published: it is a hard link to a file of the trainer"


def tensor_entries(catalog: Catalog) -> tuple[TensorEntry, ...]:
    """The manifest's entries for all tensors of a bundle's catalog, sorted by name."""
    return tuple(TensorEntry.of(catalog.tensors[name]) for name in sorted(catalog.tensors))


def schema_digest(tensors: Iterable[TensorEntry]) -> str:
    """The digest of tensors' names, dtypes and shapes: a lower-case SHA-256 of compact ASCII JSON.

    The JSON is `[[name, dtype, shape], ...]`, sorted by name.
    """
    # each manifest states its digest and is refused if it differs: the formula can never change
    rows = sorted((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    return hashlib.sha256(encode(rows)).hexdigest()


def to_json(manifest: Manifest) -> str:
    """The text of `manifest.json` (ASCII): one line for each field, tensor and file."""
    return _text(_document(manifest)).decode()


def from_json(text: str | bytes) -> Manifest:
    """Return the manifest in `text`, the content of `manifest.json`, with every field checked.

    Raises:
        ManifestError: not JSON, a field is missing, of the wrong type, out of range or given twice, a path
            leaves the directory, or the format version is unknown.
    """
    with _damage_named(text):
        return _manifest(decode(text, Document, "manifest", written=_text))


def head_from_json(text: str | bytes) -> ManifestHead:
    """Return the head of the manifest in `text`; its tensors and files, most of the work, are not parsed.

    ManifestError if the head is damaged, or of another format version.
    """
    with _damage_named(text):
        # as `_text` writes that key
        head: ManifestHead = decode_head(text, ManifestHead, "manifest", end='"tensors": [')
        # now: a caller of `created` expects no DocumentError
        _created(head.created_text)
        return head


@contextmanager
def _damage_named(text: str | bytes) -> Iterator[None]:
    try:
        if (version := format_version(text, "manifest")) != FORMAT_VERSION:
            raise ManifestError(
                f"the manifest has format version {version}, this program reads {FORMAT_VERSION}",
                hint="use the export-model that published it, or a newer one",
            )
        yield
    except DocumentError as exc:
        raise ManifestError("the manifest is damaged", cause=str(exc)) from exc


def _document(manifest: Manifest) -> Document:
    kind = VersionDocument if manifest.from_position is None else DeltaDocument
    said = asdict(manifest) | {
        "schema_digest": manifest.schema_digest,
        # microseconds always: by itself `isoformat` leaves them out at a whole second
        "created": manifest.created.astimezone(timezone.utc).isoformat(timespec="microseconds")[:-6] + "Z",
    }
    return kind(**{name: said[name] for name in kind.__struct_fields__ if name in said})


def _text(document: Document) -> bytes:
    kind = document.__struct_config__.tag
    lines = [f'"format_version": {FORMAT_VERSION}'.encode(), f'"kind": "{kind}"'.encode()]
    for name, is_required in _head_fields(type(document)):
        value = getattr(document, name)
        if is_required or value is not None:
            lines.append(f'"{name}": '.encode() + encode(value))
    # after the short fields: `head_from_json` searches for this key, and parses what is before it
    lines.append(b'"tensors": ' + encode_lines(document.tensors))
    lines.append(b'"files": ' + encode_lines(document.files))
    # last: it covers all bytes before this line
    if document.signature is not None:
        lines.append(b'"signature": ' + encode(document.signature))
    return b"{" + b",\n ".join(lines) + b"}\n"


@cache
def _head_fields(kind: type[Document]) -> tuple[tuple[str, bool], ...]:
    """The names of a document's fields before the long lists, in order, and whether each must be written.

    They are in the order of their declaration, except that a delta's two positions are next to each other.
    """
    apart = {"format_version", "tensors", "files", "signature"}
    found = [(each.name, each.required) for each in fields(kind) if each.name not in apart]
    return tuple(sorted(found, key=lambda each: each[0] != "from_position"))


def _manifest(document: Document) -> Manifest:
    said = asdict(document)
    del said["format_version"]
    schema_digest = said.pop("schema_digest")
    said["created"] = _created(document.created)
    manifest = Manifest(**said)
    _check_consistency(manifest, schema_digest)
    return manifest


def _check_consistency(manifest: Manifest, schema_digest: str) -> None:
    for what, names in (
        ("tensor", [tensor.name for tensor in manifest.tensors]),
        ("file", [file.path for file in manifest.files]),
    ):
        if len(set(names)) != len(names):
            raise DocumentError(f"a {what} is listed twice")
    if not manifest.files:
        raise DocumentError("files lists none: nothing is published without one")
    # the signature covers files by their digests alone: one without could hold anything
    if manifest.signature is not None and not all(file.sha256 for file in manifest.files):
        raise DocumentError("it is signed, and a file has no sha256")
    for file in manifest.files:
        # a pull makes files of these names
        if not is_inside(file.path):
            raise DocumentError(f"path {file.path[:60]!r} is not that of a file of the directory")
    if manifest.from_position is not None and manifest.from_position >= manifest.position:
        raise DocumentError(f"from_position is {manifest.from_position}, position {manifest.position}")
    if schema_digest != manifest.schema_digest:
        raise DocumentError(f"schema_digest is {schema_digest[:64]}, of its tensors {manifest.schema_digest}")
    if isinstance(manifest.incremental, BaseEntry):
        stored = {tensor.name: Stored(tensor.dtype, tensor.shape) for tensor in manifest.tensors}
        require_fitting(manifest.incremental.schema, manifest.incremental.mapping_spec, stored)
    if manifest.mapped is not None:
        _check_mapped(manifest.mapped, manifest)


def _check_mapped(mapped: MappedRecord, manifest: Manifest) -> None:
    """Raise DocumentError unless mapped tables match the files and served variables in the manifest."""
    base = manifest.incremental if isinstance(manifest.incremental, BaseEntry) else None
    files = {file.path: file.bytes_ for file in manifest.files}
    rows = {each.name: each.shape[0] for each in base.schema.variables if each.is_table} if base else {}
    for what in ("name", "file"):
        if len({getattr(table, what) for table in mapped.tables}) != len(mapped.tables):
            raise DocumentError(f"mapped: two tables have one {what}")
    if bool(mapped.id) != bool(mapped.tables):
        raise DocumentError(f"mapped: id is {mapped.id[:64]!r}, for {len(mapped.tables)} tables")
    for table in mapped.tables:
        named = f"mapped table {table.name!r}"
        if files.get(f"{VARIABLES_DIRECTORY}/{table.file}") != table.bytes_:
            raise DocumentError(f"{named} is not the whole of a file {table.file!r} that is listed")
        if bool(table.hot_rows) != bool(table.places):
            raise DocumentError(f"{named} has {table.hot_rows} hot rows, and places in {table.places!r}")
        if table.places and f"{VARIABLES_DIRECTORY}/{table.places}" not in files:
            raise DocumentError(f"{named} has hot rows, and a file {table.places!r} is not listed")
        if base is not None and table.overlay_rows not in range(rows.get(table.name, -1) + 1):
            raise DocumentError(f"{named} has an overlay of {table.overlay_rows} rows: it has no more itself")


def _created(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.removesuffix("Z") + "+00:00")  # Python 3.10 does not take the Z
    except ValueError as exc:
        raise DocumentError(f"created is {text!r}, which is not a time") from exc


def is_inside(path: str) -> bool:
    """True if a manifest may list `path`: a file's name below its directory, other than `manifest.json`."""
    return not flaw_of(path) and path.partition("/")[0] != MANIFEST_FILE

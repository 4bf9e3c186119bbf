"""The head of a model in a store: its last publication, and the one in progress.

Readers follow manifests and holds, which a store cannot change together. The head is a single object,
replaced only if it is still the one that was read. It decides what is published:

    1. reserve    the head names what is being uploaded
    2. upload     the files, and the manifest under another name
    3. commit     the head names it as published, with the holds of that moment: now it is published
    4. reveal     the holds that keep readers back; `manifest.json`, copied from that name; the other holds

A decision (a rollback, its resumption, a merger, a tag) is made by a person, and takes precedence over all
publishers: it first writes itself into the head, as `deciding`. A publisher replaces the head before readers
can see any of its work, so it finds the decision, whenever that was written, and commits nothing until the
decision is done. Meanwhile its upload continues, and is valid if the decision did not change publications or
holds. A decision renews the head as an upload does. One that was killed blocks others no longer than a killed
upload would, but a hold that it has set remains. Releases that do not know decisions omit them from the heads
that they write; the process that decides then begins again.

A process killed before step 3 has published nothing, and cannot do so later, once another one has replaced
the head. A process killed in step 4 has published: the next command reveals it. If a process is suspended in
step 4 while others reveal, publish more, and remove its publication, it restores nothing: the manifest's
other name is gone by then, and the store does not copy a missing object. A process that was only slow may
still write to an abandoned path. Therefore nothing else is ever published there, unless every byte that
readers read is the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from exporter.errors import ManifestError
from exporter.publish.hold import LONGEST_DOCUMENT, LONGEST_HOLD
from exporter.publish.manifest import Manifest
from exporter.publish.tags import LONGEST_TAGS
from exporter.storage.files import read_record, replace_file, writing
from exporter.storage.layout import (
    DELTAS_DIRECTORY,
    HEAD_FILE,
    HOLD_DOCUMENT_FILE,
    HOLD_FILE,
    PUSHED_FILE,
    TAGS_FILE,
)
from exporter.storage.objects import ObjectWriter, Tag
from exporter.storage.url import Url
from exporter.wire.json_documents import Count, DocumentError, Moment, Text, decode, format_version, in_utc

FORMAT_VERSION = 1
ITEM = rf"[0-9]{{1,19}}|{DELTAS_DIRECTORY}/[0-9]{{20}}/[0-9]{{20}}-[0-9]{{20}}"
"""The path of a version or a delta below its model, as a regular expression."""
HOLD = rf"(?:{DELTAS_DIRECTORY}/[0-9]{{20}}/)?{HOLD_FILE}"
"""The path of a hold."""
HOLD_DOCUMENT = rf"(?:{DELTAS_DIRECTORY}/[0-9]{{20}}/)?{re.escape(HOLD_DOCUMENT_FILE)}"
"""The path of a hold's document."""
_LONGEST = 1 << 20  # tags take 64 KiB of it, each log's hold up to 16 KiB
_Item = Annotated[str, Meta(pattern=rf"^(?:{ITEM})$(?!\n)")]
_ItemOrNone = Annotated[str, Meta(pattern=rf"^(?:{ITEM})?$(?!\n)")]
_HoldPath = Annotated[str, Meta(pattern=rf"^{HOLD}$(?!\n)")]
_HoldText = Annotated[str, Meta(pattern=r"^[\x00-\xff]*$", max_length=LONGEST_HOLD)]
_DocumentPath = Annotated[str, Meta(pattern=rf"^{HOLD_DOCUMENT}$(?!\n)")]
_TagsText = Annotated[str, Meta(pattern=r"^[\x00-\xff]*$", max_length=LONGEST_TAGS)]
_DocumentText = Annotated[str, Meta(pattern=r"^[\x00-\xff]*$", max_length=LONGEST_DOCUMENT)]


class Upload(Struct, frozen=True):
    """An upload in progress: its path below the model, its manifest's SHA-256, and its `files_digest`."""

    path: _Item
    manifest: str
    files: str


class Decision(Struct, frozen=True):
    """A person's command during which nobody else publishes: its name, the user and machine, and its start.

    `owner` identifies the process of the command, and is the `owner` of the heads that this process writes.
    """

    what: Text
    who: Text
    when: Moment
    owner: str

    @property
    def text(self) -> str:
        """A clause for messages: the user, the command in progress, and the time of its start in UTC."""
        return f"{self.who} is at `export-model {self.what}` since {in_utc(self.when):%H:%M:%S} UTC"


class Head(Struct, frozen=True):
    """The path of the newest publication, the lower-case SHA-256 of its manifest, and the holds by their
    paths.

    `hold_documents` say who set the holds; None in heads of a release that does not know them. `tags` is the
    document of tags: empty if there are none, and None in heads of a release that does not know tags, which
    are unchanged then. `given_up` has the abandoned uploads: those replaced before they were published, as
    digests of their files by path. `deciding` is the decision in progress. `owner` and `beat` make each head
    unique, for stores that distinguish objects by their content.
    """

    path: _ItemOrNone = ""
    manifest: str = ""
    uploading: Upload | None = None
    holds: dict[_HoldPath, _HoldText] | None = None
    hold_documents: dict[_DocumentPath, _DocumentText] | None = None
    tags: _TagsText | None = None
    given_up: dict[_Item, str] = field(default_factory=dict)
    owner: str = ""
    beat: int = 0
    deciding: Decision | None = None
    format_version: int = FORMAT_VERSION

    def encoded(self) -> bytes:
        """Return the head as JSON: the content of its object in the store."""
        return msgspec.json.encode(self)

    def holding(self, files: Mapping[str, bytes]) -> Head:
        """Return the same head with other holds and tags: `files` has their content by path below the model.

        Paths that end in `hold.json` are documents of holds, `tags.json` has the tags, all others are holds.
        Without a file of tags the new head has none.
        """
        # latin-1 has a character for each byte: whatever a hold contains comes back as it was
        text = {name: content.decode("latin-1") for name, content in files.items()}
        tags = text.pop(TAGS_FILE, "")
        documents = {name: text.pop(name) for name in files if name.endswith(HOLD_DOCUMENT_FILE)}
        return replace(self, holds=text, hold_documents=documents, tags=tags)

    @property
    def hold_files(self) -> dict[str, bytes] | None:
        """The content of the head's files of tags and holds, by path: tags, documents, then numbers.

        Paths are below the model. None if the head is of a release that does not mention holds.
        """
        if self.holds is None:
            return None
        tags = {TAGS_FILE: self.tags} if self.tags else {}
        text = {**tags, **(self.hold_documents or {}), **self.holds}
        return {name: content.encode("latin-1") for name, content in text.items()}

    def files_beside(self, shown: Mapping[str, bytes]) -> dict[str, bytes] | None:
        """Return `hold_files`, with the file of tags in `shown` if the head's release does not know tags.

        `shown` has the content of the files of holds and tags in the store, by path below the model. None if
        the head does not mention holds.
        """
        found = self.hold_files
        if found is not None and self.tags is None and TAGS_FILE in shown:
            found = {TAGS_FILE: shown[TAGS_FILE], **found}
        return found

    @property
    def paths(self) -> list[str]:
        """The paths of the newest publication and of the upload in progress, in this order; at most two."""
        coming = "" if self.uploading is None else self.uploading.path
        return [path for path in (self.path, coming) if path]

    def is_same_model(self, other: Head) -> bool:
        """Return True if both heads name the same publication and the same holds; their tags may differ."""
        holds = self.holds, self.hold_documents
        return self.is_same_publication(other) and holds == (other.holds, other.hold_documents)

    def is_same_publication(self, other: Head | None) -> bool:
        """Return True if both heads name the same newest publication; False if the other is None."""
        return other is not None and (self.path, self.manifest) == (other.path, other.manifest)


class Known(Head, frozen=True):
    """A store's head as the directory of a local model remembers it.

    `own` are the rollbacks and resumptions that were made in this directory and are not the store's: by path,
    the position whose values came back; None if an earlier release wrote the file. `last` is the greatest
    position that came from the store; 0 if it is not known.
    """

    own: dict[_Item, Count] | None = None
    last: Count = 0


def fetch_head(store: ObjectWriter) -> tuple[Head, Tag] | None:
    """Return the head at the URL of `store`, and its tag for conditional writes; None if there is no head.

    There is none before anything is published.

    Raises:
        ManifestError: the object is not a head, or is of another format version.
        CheckpointError: the store cannot be read, or the object has more than 1 MiB.
    """
    found = store.fetch(store.url.key(HEAD_FILE), _LONGEST)
    if found is None:
        return None
    try:
        if (version := format_version(found[0], HEAD_FILE)) != FORMAT_VERSION:
            raise ManifestError(
                f"{store.url}/{HEAD_FILE} has format version {version}, this program reads {FORMAT_VERSION}",
                hint="use the export-model that published there, or a newer one",
            )
        return _decoded(found[0], Head, HEAD_FILE), found[1]
    except DocumentError as error:
        raise ManifestError(
            f"{store.url}/{HEAD_FILE} is not the head of a model",
            cause=str(error),
            hint="publish to a URL of its own; if it is damaged, remove it: another is written then",
        ) from None


def files_digest(manifest: Manifest) -> str:
    """Return the SHA-256 (hex) of a manifest's lists of files and tensors.

    Publications with the same digest have the same content, also if their times or reasons differ.
    """
    return hashlib.sha256(msgspec.json.encode([manifest.files, manifest.tensors])).hexdigest()


def remember(model: Path, url: Url, head: Head, own: Mapping[str, int] | None = None, last: int = 0) -> None:
    """Write the head of the store at `url` into a file in the model's directory, replacing an earlier one.

    The next local merger may remove publications that the head names. During a pull, it names the last
    publication fetched, and as `uploading` the one being fetched. `own` and `last` are as in `Known`; an
    `own` of None is kept as empty, a negative `last` as 0. Remembered heads of other stores stay, unless the
    file cannot be read. The file is replaced atomically; it need not survive a power cut.

    Raises:
        PublishError, TargetNotWritable, DiskFull: the file cannot be written.
        ManifestError: the file of remembered heads is damaged.
    """
    known = replace(
        msgspec.convert(head, Known, from_attributes=True), own=dict(own or {}), last=max(last, 0)
    )
    heads = _heads(model) | {str(url): known}
    path = model / PUSHED_FILE
    with writing(path):
        replace_file(path, msgspec.json.encode(heads))


def recall(model: Path, url: Url) -> Known | None:
    """Return the head that a model's directory remembers of the store at `url`; None if it remembers none.

    None also if the file of remembered heads cannot be read.

    Raises:
        ManifestError: that file is damaged.
    """
    return _heads(model).get(str(url))


def _heads(model: Path) -> dict[str, Known]:
    path = model / PUSHED_FILE
    try:
        found: dict[str, Known] = _decoded(read_record(path, _LONGEST), dict[str, Known], PUSHED_FILE)
    except OSError:
        return {}  # the publications themselves are enough, as long as they exist
    except DocumentError as error:
        raise ManifestError(
            f"{path} is damaged",
            cause=str(error),
            hint="remove it: what is published here, and in the stores, tells the rest",
        ) from None
    return found


def _decoded(text: bytes, type_: Any, where: str) -> Any:
    return decode(text, type_, where, written=msgspec.json.encode)

"""URLs of object stores."""

from __future__ import annotations

import re

from msgspec import Struct

from exporter.errors import UsageError

_URL = re.compile(r"([Ss]3|[Gg][Ss]|[Aa][Zz]):/{1,2}([^/?#@:\s]+)(?:/+([^?#]*))?", re.ASCII)
_NO_NAME = re.compile(r"\.\.|.*[\x00-\x1f\x7f].*", re.DOTALL)


class Url(Struct, frozen=True):
    """The URL of objects in a store: `scheme://bucket/path`; at Azure the bucket is the container."""

    scheme: str
    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Url | None:
        """Return the URL in a text, or in the text of a `Path` made of one (`s3:/b`); None for other texts.

        Empty parts and `.` are left out of the path. UsageError if a part cannot be in an object's name.
        """
        found = _URL.fullmatch(text)
        if found is None:
            return None
        parts = [part for part in (found[3] or "").split("/") if part not in ("", ".")]
        if wrong := next(filter(_NO_NAME.fullmatch, parts), None):
            raise UsageError(
                f"{text!r}: {wrong!r} cannot be part of an object's name", hint="write the URL without it"
            )
        return cls(found[1].lower(), found[2], "/".join(parts))

    @property
    def parent(self) -> Url:
        """The URL of the directory above, as if there were directories; of a bucket, the bucket."""
        return Url(self.scheme, self.bucket, self.path.rpartition("/")[0])

    @property
    def name(self) -> str:
        """The text after the last slash of the path; "" for a bucket."""
        return self.path.rpartition("/")[2]

    def key(self, name: str) -> str:
        """Return the key of the object with this name below the URL; with "" the prefix of all such keys."""
        return f"{self.path}/{name}" if self.path else name

    def __str__(self) -> str:
        """Return the URL as text, without a slash at its end."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")

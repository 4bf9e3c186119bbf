"""URLs of object stores."""

from __future__ import annotations

import re

from msgspec import Struct

_URL = re.compile(r"(s3|gs|az):/{1,2}([^/?#@:\s]+)(?:/+([^?#]*))?", re.ASCII)


class Url(Struct, frozen=True):
    """Where objects are: `scheme://bucket/path`; of Azure the bucket is the container."""

    scheme: str
    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Url | None:
        """The URL of an object store, or of a `Path` made of one (`s3:/b`); None for any other text."""
        found = _URL.fullmatch(text)
        if found is None:
            return None
        return cls(found[1], found[2], "/".join(part for part in (found[3] or "").split("/") if part))

    @property
    def parent(self) -> Url:
        """The directory above, as if there were directories."""
        return Url(self.scheme, self.bucket, self.path.rpartition("/")[0])

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        """The URL as it is written."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")

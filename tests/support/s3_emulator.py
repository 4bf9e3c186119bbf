"""moto's S3 server, whose conditional writes are made atomic, as the real store's are.

It compares an object's tag and puts the new one in two steps, in threads: of four writers that name the same
tag it lets two win in every fifth race.

    python -m tests.support.s3_emulator -H HOST -p PORT
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_WRITING = threading.RLock()
_put_object = S3Response.put_object


def _put_alone(self: S3Response) -> Any:
    with _WRITING:
        return _put_object(self)


if __name__ == "__main__":
    S3Response.put_object = _put_alone  # type: ignore[method-assign]
    main(sys.argv[1:])

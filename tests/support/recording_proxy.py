"""A proxy of its own process before a store: requests wait, and what was written to some objects is kept.

    python -m tests.support.recording_proxy ADDRESS SECONDS NAME RECORD

prints its own address, and appends a line to the file RECORD for each accepted PUT of an object called NAME.
A process, so that those who are measured do not wait for the interpreter's lock of those who watch.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from tests.support.http_proxy import Forwarding, serving


@contextmanager
def recording(address: str, wait: float, name: str, record: Path) -> Iterator[str]:
    """Run the proxy; its address."""
    command = [sys.executable, "-m", __spec__.name, address, str(wait), name, str(record)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main(address: str, wait: str, name: str, record: str) -> None:
    lock = Lock()

    class Recording(Forwarding):
        target = address

        def forward(self) -> None:
            time.sleep(float(wait))
            answer = self.ask()
            if self.command == "PUT" and self.path.endswith(name) and answer.status == 200:
                with lock, Path(record).open("ab") as file:
                    file.write(self.body.replace(b"\n", b" ") + b"\n")
            self.answer(answer)

    with serving(Recording) as here:
        print(here, flush=True)
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Stop processes at a step of a task: a file `<step>-<output>` in $WORKER_FAULTS says what happens there.

Every Python that begins with this directory in PYTHONPATH runs this. The steps of a task that writes:
`before` its output appears, `between` output and receipt, `after` the receipt. A file that says `kill` kills
the process, once; at one that says `wait` it waits until the file is gone.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

_FAULTS = os.environ.get("WORKER_FAULTS", "")
_mine = threading.local()


def _step(step: str, name: str) -> None:
    path = Path(_FAULTS, f"{step}-{name}")
    if not path.exists():
        return
    if path.read_text() == "kill":
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 120
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event not in ("os.rename", "os.remove") or getattr(_mine, "is_busy", False):
        return
    _mine.is_busy = True
    try:
        if event == "os.remove":  # of the new file's name, which is the first thing that follows
            if receipt := _mine.__dict__.pop("receipt", ""):
                _step("after", receipt)
            return
        target = Path(os.fsdecode(arguments[1]))  # type: ignore[arg-type]
        if target.parent.name == "receipts":
            _mine.receipt = target.stem
            _step("between", _mine.receipt)
        else:
            _step("before", target.name)
    finally:
        _mine.is_busy = False


if _FAULTS:
    sys.addaudithook(_audit)

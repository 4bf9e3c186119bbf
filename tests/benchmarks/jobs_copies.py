"""A copy of a bucket takes a base; the same bytes by `cp`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from exporter.transfer.pull import pull
from exporter.transfer.push import plan_push, push
from tests.benchmarks.job import Timer


def take(timer: Timer, environment: str, url: str, copy: str, version: str) -> dict[str, Any]:
    """Pull into a copy that has all but this version."""
    os.environ |= json.loads(environment)
    shutil.rmtree(Path(copy) / version, ignore_errors=True)
    (Path(copy) / ".pushed").unlink(missing_ok=True)
    with timer:
        done = pull(url, Path(copy))
    assert done.fetched == (version,)
    return {"fetched": done.bytes_, "spared": sum(each.bytes_ for each in done.spared)}


def cp(timer: Timer, source: str, target: str) -> None:
    """Copy the base, and wait until it is on disk, as a pull does."""
    with timer:
        subprocess.run(["cp", "-r", source, target], check=True)
        subprocess.run(["sync", *map(str, Path(target).rglob("*"))], check=True)


def send(timer: Timer, environment: str, model: str, url: str) -> int:
    """Push a model; the bytes that were uploaded."""
    os.environ |= json.loads(environment)
    with timer:
        return push(plan_push(Path(model), url)).bytes_

"""What runs in processes of their own for `bench_stores`; the environment that leads to a store is JSON."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exporter.storage.objects import ObjectReader, RemoteObject
from tests.benchmarks import jobs_full_export
from tests.benchmarks.job import Timer

_PART_BYTES, _CONNECTIONS = 8 << 20, 16


def variables(timer: Timer, environment: str, url: str, out: str) -> dict[str, int]:
    """The kept tensors of a checkpoint in a store: how many bytes, and in how many requests they came."""
    os.environ.update(json.loads(environment))
    requests, read = [], ObjectReader.read

    def counted(self: ObjectReader, found: RemoteObject, start: int, stop: int) -> memoryview:
        requests.append(found.key)
        return read(self, found, start, stop)

    ObjectReader.read = counted  # type: ignore[method-assign]
    try:
        kept = jobs_full_export.variables(timer, url, out)
        return {"bytes": kept, "requests": sum(".data-" in key for key in requests)}
    finally:
        ObjectReader.read = read  # type: ignore[method-assign]


def download(timer: Timer, environment: str, bucket: str, prefix: str, bytes_: str, out: str) -> int:
    """As many bytes of the same objects, by obstore alone."""
    import obstore
    from obstore.store import S3Store

    os.environ.update(json.loads(environment))
    store = S3Store(bucket, client_options={"allow_http": True})
    objects = [each for batch in obstore.list(store, prefix) for each in batch if ".data-" in each["path"]]
    parts, left = [], int(bytes_)
    for each in objects:
        for start in range(0, min(each["size"], left), _PART_BYTES):
            parts.append((each["path"], start, min(start + _PART_BYTES, each["size"], start + left)))
            left -= parts[-1][2] - start
    offsets = [sum(stop - start for _, start, stop in parts[:at]) for at in range(len(parts))]
    with timer, Path(out).open("wb") as file, ThreadPoolExecutor(_CONNECTIONS) as pool:

        def one(part: tuple[str, int, int], offset: int) -> None:
            path, start, stop = part
            os.pwrite(
                file.fileno(), memoryview(obstore.get_range(store, path, start=start, end=stop)), offset
            )

        list(pool.map(one, parts, offsets))
    return Path(out).stat().st_size

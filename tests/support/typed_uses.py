"""Uses of the Python API as its users write them; `mypy --strict` passes, and finds what it is to find.

Each `type: ignore` stands where a mistake is: it would be an error itself if the mistake were not found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import exporter
from exporter import (
    DataMode,
    Exported,
    ExportedDelta,
    ExportRequest,
    Jobs,
    StopWhen,
    Updates,
    Watching,
    export,
    export_incremental,
)
from exporter.training import ExportHook


def serving() -> tuple[dict[str, object], dict[str, object]]:
    return {}, {}


def right() -> None:
    version: Exported = export("train", "models/m", model="model.py:serving", data="compact", keep=3)
    print(version.published.path.name, version.variables.bytes_copied, version.is_new)
    export(Path("train"), "s3://bucket/m", serving, data=DataMode.COPY, model_args={"depth": 3, "on": True})
    export("train", "models/m", "model.py:serving", renames=["a=b"], golden="golden.json", version=7)
    export("train", "models/m", updates=Updates(isolation="row"), jobs=Jobs(engine="ray", workers=4))
    delta: ExportedDelta = export("train", "models/m", save_incr_model=True, delta_dtype="int8")
    print(delta.rows)
    request = ExportRequest("train", Path("models/m"), model=serving, verify="outputs", again=True)
    whole: Exported = export(request)
    either: Exported | ExportedDelta = export_incremental(request, new_base="if-needed")
    watched: Iterator[Exported] = exporter.watch(
        "train", "models/m", watching=Watching(1.0, StopWhen(count=3)), casts=["bfloat16"]
    )
    print(whole, either, next(watched), exporter.execute(exporter.plan("train", "models/m")))
    exporter.rollback("models/m", 3, reason="scores fell")
    exporter.rollback("models/m", "@previous", dry_run=True)
    exporter.merge(Path("models/m"), start=3)
    print(
        exporter.inspect("train"), exporter.verify_model("models/m"), exporter.open_checkpoint("train").step
    )
    print([event.position for event in exporter.history("models/m").publications])
    print(exporter.diff("models/m@3", Path("train")).is_empty, exporter.push("models/m", "s3://b/m").position)
    print(exporter.pull("s3://b/m", "copy", prune=True).fetched)
    ExportHook(request, every_checkpoints=3)


def wrong() -> None:
    export("train", "models/m", data="compct")  # type: ignore[call-overload]
    export("train", "models/m", modle="model.py:serving")  # type: ignore[call-overload]
    export("train", "models/m", keep="3")  # type: ignore[call-overload]
    export(3, "models/m")  # type: ignore[call-overload]
    exporter.plan("train", "models/m", keep="3")  # type: ignore[arg-type]
    exporter.export_incremental("train", "models/m", modle="model.py:serving")  # type: ignore[call-arg]
    ExportRequest("train", "models/m", verify="all")  # type: ignore[arg-type]
    ExportRequest("train")  # type: ignore[call-arg]
    Updates(isolation="rows")  # type: ignore[arg-type]
    exporter.rollback("models/m", 3.5)  # type: ignore[arg-type]

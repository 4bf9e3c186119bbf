"""The files that take longest, by their time: they begin first, so that all processes end together.

pytest-xdist hands files out as they come (with --no-loadscope-reorder); by default those of many tests go
first, and the longest have few.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
LONGEST = (
    "guides/test_serve.py",
    "guides/test_production.py",
    "guides/test_follow.py",
    "guides/test_trainers.py",
    "guides/test_export.py",
    "guides/test_training.py",
    "test_engines.py",
    "guides/test_scripts.py",
    "integration/test_delta_crash_points.py",
    "integration/test_increments_cluster.py",
    "integration/test_examples.py",
    "integration/test_incremental_export.py",
    "test_benchmarks.py",
    "test_incremental_callers.py",
    "test_incremental_tables.py",
    "test_republish.py",
    "test_fuzz.py",
    "test_incremental_pipeline.py",
    "test_incremental_graphs.py",
    "test_same_graph.py",
    "test_lost_output.py",
    "integration/test_families_served.py",
    "integration/test_families_archives.py",
    "integration/test_families_object.py",
    "integration/test_chaos.py",
    "integration/test_server_process.py",
    "test_training_export.py",
    "test_keras_archive.py",
    "integration/test_mirrored_cluster.py",
)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their file's place in `LONGEST`; those of other files stay behind, in their order.

    Raises:
        pytest.UsageError: a file is there no more.
    """
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    if gone := [path for path in places if not path.is_file()]:
        raise pytest.UsageError(f"{gone[0]} is not there: name what took its place in {__file__}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
